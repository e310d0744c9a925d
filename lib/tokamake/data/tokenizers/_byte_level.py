"""Byte-level BPE as arguments of lib/csrc, for every expression that `_patterns` compiles.

tests/data/tokenizers/test_byte_level.py compares the tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake._csrc import BytePairs, Vocabulary
from tokamake.data.tokenizers._exactness import Json, Unsupported, byte_alphabet, flat_steps
from tokamake.data.tokenizers._patterns import compile_pattern

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Expression of the pre-tokenizer ByteLevel: GPT-2's (Radford et al. 2019, its encoder.py)."""
_KEPT = {  # matches, and the text between them
    ("Isolated", False): (True, True),
    ("Isolated", True): (True, True),
    ("Removed", False): (False, True),
    ("Removed", True): (True, False),
}

_Split = tuple[NDArray[np.uint8], NDArray[np.uint16], bool, bool]


def arguments(tokenizer: Json, vocabulary: Vocabulary) -> dict[str, Any]:
    """Arguments of lib/csrc for a tokenizer.json; Unsupported if it may not be exact."""
    model = tokenizer["model"]
    alphabet = [character for _, character in sorted(byte_alphabet().items())]
    singles = byte_ids(vocabulary, alphabet)
    whole = vocabulary.byte_words([*map(ord, alphabet)]) if model.get("ignore_merges") else []
    splits, prefix = splits_and_prefix(tokenizer.get("pre_tokenizer"))
    return {
        "model": BytePairs(singles, vocabulary.merges(), whole=whole),
        "splits": splits,
        "prefix": prefix,
    }


def byte_ids(vocabulary: Vocabulary, texts: list[str]) -> NDArray[np.uint32]:
    """(256,) token ids of single bytes, from the text of each."""
    ids = [number for text in texts if (number := vocabulary.id(text)) is not None]
    if len(ids) < len(texts):
        raise Unsupported("a byte is not in its vocabulary")
    return np.array(ids, np.uint32)


def splits_and_prefix(pre_tokenizer: Json | None) -> tuple[list[_Split], str]:
    """Splits of a pre-tokenizer, and the prefix of each text."""
    steps = [*flat_steps(pre_tokenizer, "pretokenizers")]
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
    return splits, "unless space" if has_prefix else ""


def _pattern(step: Json) -> tuple[str, tuple[bool, bool]]:
    """Expression of a pre-tokenizer, and whether matches and the text between them are kept."""
    match step:
        case {"type": "ByteLevel"}:
            return GPT2, (True, True)
        case {"type": "Digits", "individual_digits": is_single}:
            return "\0Digits" if is_single else "\0Digits+", (True, True)
        case {"type": "Punctuation", "behavior": "Isolated" | "Contiguous" as behavior}:
            return "\0Punctuation" + "+" * (behavior == "Contiguous"), (True, True)
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior}:
            kept = _KEPT.get((behavior, bool(step.get("invert"))))
            if kept and "\0" not in regex:
                return regex, kept
    raise Unsupported(f"its pre_tokenizer has a {step['type']} that is not known to be exact")
