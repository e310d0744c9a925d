"""Random texts for tests of encoders, and tokenizers trained on them."""

import io
import json
import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from tokamake.data.tokenizers import Tokenizer
from tokamake.data.tokenizers._exactness import byte_alphabet
from tokamake.data.tokenizers._fast_encoder import FastEncoder, refusal

Json = dict[str, Any]
Encode = Callable[[list[str]], list[list[int]]]
_GROUPS_PER_CALL = 64
_EDGE = 256
_EDGES = {(plane << 16) + low for plane in range(18) for low in range(-_EDGE, _EDGE)}
ASSIGNED_POINTS = [
    point
    for point in range(0x110000)
    if (point < 0x40000 or 0xE0000 <= point < 0xE1000 or point in _EDGES)
    and not 0xD800 <= point < 0xE000
]
"""Code points of all planes that have characters, and both ends of the others."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACE_RUNS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACE_RUNS
REGEXES = {
    "GPT-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama-3": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SIGNS_AND_SPACES,
    "Qwen-2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SIGNS_AND_SPACES,
    "Qwen-3.5": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _SPACE_RUNS,
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACE_RUNS,
    "Nemotron": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACE_RUNS,
}
"""Expressions by model, for a Split before byte-level BPE."""
ATOMS = [
    *("a", "b", "the", "Hello", "WORLD", "iPhone", "1", "23", "4567", "12345678", "'s", "'S"),
    *("'ll", "'LL", "'t", "'ſ", "'re", "'d", "'", "''", ".", ",", "!!", "...", "/", "_", "é"),
    *("ß", "İ", "ı", "Ǆ", "ǅ", "ʰ", "ª", "日本", "語", "한국어", "ي", "א", "ॐ", "½", "Ⅷ", "٣"),
    *("一", "²", "𝟘", "𝐀", "𐐀", "😀", "👩‍👩‍👧", "🇹🇷", "👍🏽", "…", "—", "“", "℃", "∑", "ﬁ"),
    *("①", "Å", "ｶﾞ", "<", "s>", "<|endoftext|>", "<|endoftext", "|>", "<s>", "</s>", "<unk>"),
    *("<0x0A>", "<0x", "0A>", "[INST]", "\u2581", "\u2581\u2581", "\u2581a", " ", "  ", "    "),
    *("\t", "\n", "\n\n", "\r\n", "\r", "\x00", "\x1f", "\x0b", "\x85", "\x7f", "\xa0", "\u2003"),
    *("\u3000", "\u200b", "\u200d", "\ufeff", "\u2028", "\u1680", "\u180e", "e\u0301", "\u1100"),
    *("\u1161", "\u0301", "\u0303\u0301", "\u20dd", "\ufffd", "\uffff", "\U0010ffff", "\u0378"),
]


def random_texts(count: int, seed: int, atoms: list[str] = ATOMS) -> list[str]:
    """Return texts of mixed scripts, spaces, contractions, emoji, special tokens and controls."""
    return [*_random_texts(count, seed, (*atoms,))]


@cache  # the same texts for many tokenizers
def _random_texts(count: int, seed: int, atoms: tuple[str, ...]) -> list[str]:
    rng = random.Random(seed)

    def character() -> str:
        return chr(
            rng.choice(
                [*map(rng.randrange, (0x80, 0x800, 0xD800)), 0x10000 + rng.randrange(0x20000)]
            )
        )

    texts = []
    for _ in range(count):
        size, style = rng.choice([0, 1, 3, 8, 20, 60]), rng.random()
        if style < 0.75:
            texts.append("".join(rng.choice(atoms) for _ in range(size)))
        elif style < 0.9:
            texts.append("".join(character() for _ in range(size)))
        else:
            texts.append("".join(rng.choice(" \n\r\t'a1.\u3000\u2581") for _ in range(size)))
    return texts


def byte_level(regex: str = "", **model: Any) -> Json:
    """Return the tokenizer.json of a byte-level BPE that was trained on random texts."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if regex:
        trained.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(random_texts(3000, seed=9), trainer)
    return json.loads(trained.to_str())


def sentencepiece_model(**changes: Any) -> bytes:
    """A model that was trained on random texts, with changed settings."""
    return _trained(json.dumps(changes))


@cache
def _trained(changes: str) -> bytes:
    settings = {
        "vocab_size": 1200,
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
        "num_threads": 1,
    }
    rng = random.Random(5)
    words = [atom for atom in ATOMS if not {"\n", "\0", ">"} & set(atom)]
    lines = ["".join(rng.choice(words) for _ in range(30)) for _ in range(1500)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **(settings | json.loads(changes))
    )
    return model.getvalue()


def encoders(definition: bytes, package: str) -> tuple[str, Encode]:
    """Why lib/csrc refuses a definition, and its function that encodes."""
    tokenizer = Tokenizer(
        vocab_size=1,
        eod=0,
        encode_batch=None,
        decode=str,
        package=package,
        definition=lambda: definition,
    )
    if reason := refusal(tokenizer):
        return reason, lambda _: []
    encoder = FastEncoder(tokenizer)
    return "", lambda texts: rows(*encoder.encode(texts))


def differing_points(
    points: Iterable[int], encoders: tuple[Encode, Encode], *, group_size: int = 128
) -> set[int]:
    """Return the code points that two encoders of a `probe_tokenizer` classify differently.

    Surrogates are ignored. Texts of `group_size` code points are compared first; where they differ,
    each code point is compared.
    """
    points = [point for point in points if not 0xD800 <= point < 0xE000]
    groups = [points[start : start + group_size] for start in range(0, len(points), group_size)]
    encode_a, encode_b = encoders
    differing: set[int] = set()
    for start in range(0, len(groups), _GROUPS_PER_CALL):
        batch = groups[start : start + _GROUPS_PER_CALL]
        texts = ["".join(map(_probe_text, group)) for group in batch]
        for group, a, b in zip(batch, encode_a(texts), encode_b(texts), strict=True):
            if a != b and len(group) > 1:
                differing |= differing_points(group, encoders, group_size=1)
            elif a != b:
                differing |= {*group}
    return differing


def _probe_text(point: int) -> str:
    """Return a code point beside letters of both cases, digits, signs, spaces, contractions."""
    return "a{0}1 {0}A!!{0}a'{0}{0}\n".format(chr(point))


def probe_tokenizer(regex: str) -> str:
    """Return a byte-level tokenizer.json whose tokens show where `regex` splits a probe text.

    Any two bytes that can meet at the border of a multi-byte character form a token.
    """
    characters = byte_alphabet()
    neighbors = [characters[byte] for byte in b"aA1! \n'"]
    leads = [characters[byte] for byte in range(0xC2, 0xF5)]  # first bytes in UTF-8
    tails = [characters[byte] for byte in range(0x80, 0xC0)]  # continuation bytes
    pairs = [*product(neighbors, leads), *product(tails, neighbors), *product(tails, leads)]
    pairs += product(neighbors, neighbors)
    vocabulary = {characters[byte]: byte for byte in range(256)}
    vocabulary |= {a + b: 256 + rank for rank, (a, b) in enumerate(pairs)}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    to_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, to_bytes]},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
        }
    )


def rows(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]]


def changed(tokenizer: Json, path: str, value: Any) -> Json:
    copy = json.loads(json.dumps(tokenizer))
    *parents, key = path.split("/")
    node = copy
    for parent in parents:
        node = node[parent]
    node[key] = value
    return copy


def added(tokenizer: Json, *tokens: Json) -> Json:
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    first = len(tokenizer["model"]["vocab"])
    more = [{"id": first + n, **plain, **token} for n, token in enumerate(tokens)]
    return changed(tokenizer, "added_tokens", tokenizer["added_tokens"] + more)


def shuffled(tokenizer: Json) -> tuple[Json, Json]:
    """The tokenizer with shuffled ids, and then also with all possible merges, shuffled."""
    rng = random.Random(0)
    ids = [7 + 3 * index for index in range(len(tokenizer["model"]["vocab"]))]
    rng.shuffle(ids)
    vocabulary = dict(zip(tokenizer["model"]["vocab"], ids, strict=True))
    with_ids = changed(tokenizer, "model/vocab", vocabulary)
    with_ids["added_tokens"][0]["id"] = vocabulary["<|endoftext|>"]
    merges = [
        (word[:cut], word[cut:])
        for word in vocabulary
        for cut in range(1, len(word))
        if word[:cut] in vocabulary and word[cut:] in vocabulary
    ]
    rng.shuffle(merges)
    return with_ids, changed(with_ids, "model/merges", merges)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(
    behavior: str = "Isolated", invert: bool = False, regex: str = REGEXES["Llama-3"]
) -> Json:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def sequence(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}
