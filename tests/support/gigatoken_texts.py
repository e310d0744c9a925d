"""Random texts for tests of encoders, and tokenizers trained on them."""

import io
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from tokamake.data.tokenizers import Tokenizer, _unicode_differences
from tokamake.data.tokenizers._exactness import REGEXES
from tokamake.data.tokenizers._gigatoken import Gigatoken

Json = dict[str, Any]
MARKED = frozenset(np.flatnonzero(_unicode_differences.table()).tolist())
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


def unmarked(texts: list[str]) -> list[str]:
    """Return the texts that gigatoken may get, selected without `find_marked`."""
    return [text for text in texts if not MARKED & set(map(ord, text))]


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
        sentence_iterator=iter(lines), model_writer=model, **(settings | changes)
    )
    return model.getvalue()


def fast_sentencepiece(model: bytes) -> Callable[[list[str]], list[list[int]]]:
    """Load gigatoken for a SentencePiece model like the library does."""
    tokenizer = Tokenizer(
        vocab_size=1,
        eod=0,
        encode_batch=None,
        decode=str,
        package="sentencepiece",
        definition=lambda: model,
    )
    return lambda texts: rows(*Gigatoken(tokenizer).encode(texts))


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
