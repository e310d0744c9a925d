"""Byte-level BPE, implemented in lib/csrc for every expression that `_patterns` compiles.

Its memory is bounded. `tokenize.encoder` is the only caller, and compares samples with the
`tokenizers` package. tests/data/tokenizers/test_byte_level.py compares the tokens.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from tokamake._csrc import ByteLevel
from tokamake.data.tokenizers import Tokenizer
from tokamake.data.tokenizers._exactness import Json, added_refusal, byte_alphabet, model_refusal
from tokamake.data.tokenizers._patterns import Unsupported, compile_pattern, matching, of_all_points
from tokamake.data.tokenizers._unicode_forms import Normalize, marks_and_function

GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
"""Expressions of the pre-tokenizer ByteLevel: GPT-2's (Radford et al. 2019, its encoder.py)."""
_GPT2_CLASSES = (r"\p{L}", r"\p{N}", r"\s")
_KEPT = {  # matches, and the text between them
    ("Isolated", False): (True, True),
    ("Isolated", True): (True, True),
    ("Removed", False): (False, True),
    ("Removed", True): (True, False),
}

_Split = tuple[NDArray[np.uint8], NDArray[np.uint16], bool, bool]


class _Rules(NamedTuple):
    """Arguments of lib/csrc, and the function that normalizes clusters."""

    splits: list[_Split]
    bytes: NDArray[np.uint32]
    merges: NDArray[np.uint32]
    options: dict[str, Any]
    normalize: Normalize


def refusal(tokenizer: Tokenizer) -> str:
    """Return why lib/csrc may differ from the tokenizer's own package; empty if it cannot.

    The reason is a clause whose subject "it" is the tokenizer.
    """
    if tokenizer.package != "tokenizers":
        return "it is of another kind"
    try:
        _rules(tokenizer.definition())
    except Unsupported as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:  # a later version of tokenizer.json
        return f"its definition has an unknown form ({error!r})"
    return ""


def is_fastest(tokenizer: Tokenizer) -> bool:
    """Whether lib/csrc, if it is exact, encodes faster than gigatoken."""
    return tokenizer.package == "tokenizers" and splits_as_gpt2(
        orjson.loads(tokenizer.definition())
    )


class ByteLevelEncoder:
    """Encoder of lib/csrc for a tokenizer without `refusal`. Not for several threads at once."""

    package = "tokamake"

    def __init__(self, tokenizer: Tokenizer) -> None:
        rules = _rules(tokenizer.definition())
        self._normalize = rules.normalize
        self._encoder = ByteLevel(rules.splits, rules.bytes, rules.merges, **rules.options)

    def unsafe(self, _: Sequence[str]) -> NDArray[np.int64]:
        """Return the indices of texts that may be encoded differently: always empty."""
        return np.empty(0, np.int64)

    def encode(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the concatenated token ids of all texts, and the number of tokens of each."""
        return self._encoder.encode(texts, self._normalize)

    def encode_utf8(
        self, data: NDArray[np.uint8], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Encode texts that are concatenated in UTF-8; `ends` holds the end of each text."""
        return self._encoder.encode_utf8(data, ends, self._normalize)


@lru_cache(maxsize=1)  # each thread has an encoder of its own
def _rules(definition: bytes) -> _Rules:
    """Read a tokenizer.json; Unsupported if lib/csrc may not be exact for it."""
    tokenizer = orjson.loads(definition)
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    if reason := model_refusal(model):
        raise Unsupported(reason)
    ids, alphabet = model["vocab"], byte_alphabet()
    if not {*alphabet.values()} <= ids.keys():
        raise Unsupported("a byte is not in its vocabulary")
    if reason := added_refusal(tokenizer):
        raise Unsupported(reason)
    splits, has_prefix = _splits(tokenizer.get("pre_tokenizer"))
    is_gpt2 = splits_as_gpt2(tokenizer)
    marks, normalize = marks_and_function(tokenizer.get("normalizer"))
    return _Rules(
        splits,
        np.array([ids[character] for _, character in sorted(alphabet.items())], np.uint32),
        _merges(model),
        {
            "whole": _whole_words(ids, alphabet) if model.get("ignore_merges") else [],
            "added": [(t["content"], t["id"]) for t in added if not t.get("normalized")],
            "later": [(normalize(t["content"]), t["id"]) for t in added if t.get("normalized")],
            "marks": marks,
            "gpt2_classes": _gpt2_classes() if is_gpt2 else np.empty(0, np.uint8),
            "add_prefix_space": has_prefix,
        },
        normalize,
    )


def splits_as_gpt2(tokenizer: Json) -> bool:
    """Whether a tokenizer.json splits text by GPT-2's expression alone."""
    match [*_flat(tokenizer.get("pre_tokenizer"), "pretokenizers")]:
        case [{"type": "ByteLevel", **options}]:
            return bool(options.get("use_regex", True))
        case [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"},
            {"type": "ByteLevel", **options},
        ]:
            return regex in GPT2 and not options.get("use_regex", True)
    return False


def _gpt2_classes() -> NDArray[np.uint8]:
    classes = (number * matching(text) for number, text in enumerate(_GPT2_CLASSES, 1))
    return of_all_points(np.sum([*classes], axis=0).astype(np.uint8))


def _splits(pre_tokenizer: Json | None) -> tuple[list[_Split], bool]:
    """Splits of a pre-tokenizer, and whether a space begins each text."""
    steps = [*_flat(pre_tokenizer, "pretokenizers")]
    places = [place for place, step in enumerate(steps) if step["type"] == "ByteLevel"]
    if len(places) != 1:
        raise Unsupported("its pre_tokenizer does not split text into bytes once")
    has_prefix = bool(steps[places[0]].get("add_prefix_space"))
    if has_prefix and places[0] > 0:
        raise Unsupported("a space begins each of its words")
    splits = []
    for place, step in enumerate(steps):
        if step["type"] == "ByteLevel" and not step.get("use_regex", True):
            continue
        pattern, kept = _pattern(step)
        classes, transitions = compile_pattern(pattern)
        if place > places[0]:  # characters stand for bytes
            classes = classes[[ord(character) for _, character in sorted(byte_alphabet().items())]]
        splits.append((classes, transitions, *kept))
    return splits, has_prefix


def _flat(step: Json | None, key: str) -> Iterator[Json]:
    """Yield the steps of a Sequence, and of those in it."""
    if step and step["type"] == "Sequence":
        for part in step[key]:
            yield from _flat(part, key)
    elif step:
        yield step


def _pattern(step: Json) -> tuple[str, tuple[bool, bool]]:
    """Expression of a pre-tokenizer, and whether matches and the text between them are kept."""
    match step:
        case {"type": "ByteLevel"}:
            return GPT2[0], (True, True)
        case {"type": "Digits", "individual_digits": is_single}:
            return "\0Digits" if is_single else "\0Digits+", (True, True)
        case {"type": "Punctuation", "behavior": "Isolated" | "Contiguous" as behavior}:
            return "\0Punctuation" + "+" * (behavior == "Contiguous"), (True, True)
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior}:
            kept = _KEPT.get((behavior, bool(step.get("invert"))))
            if kept and "\0" not in regex:
                return regex, kept
    raise Unsupported(f"its pre_tokenizer has a {step['type']} that is not known to be exact")


def _merges(model: Json) -> NDArray[np.uint32]:
    """(merges, 3) token ids of each pair and of its result, in the order of ranks."""
    ids = model["vocab"]
    rows = [(ids[left], ids[right], ids[left + right]) for left, right in model["merges"]]
    return np.array(rows, np.uint32).reshape(-1, 3)


def _whole_words(ids: dict[str, int], alphabet: dict[int, str]) -> list[tuple[bytes, int]]:
    """Bytes and token of each word of a vocabulary that text can spell."""
    to_latin = {ord(character): byte for byte, character in alphabet.items()}
    words = ((word.translate(to_latin), token) for word, token in ids.items() if word)
    return [(word.encode("latin-1"), token) for word, token in words if max(word) <= "\xff"]
