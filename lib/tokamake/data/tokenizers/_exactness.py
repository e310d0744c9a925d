"""Rules that decide which tokenizers gigatoken encodes exactly like their own package.

The functions read a tokenizer.json or a SentencePiece model and return why it is refused. Anything
not known to be exact is refused. test_byte_level.py and test_gigatoken*.py compare the tokens.

A reason is a clause whose subject "it" is the tokenizer.
"""

import json
from collections.abc import Iterable
from itertools import product
from typing import Any

from tokamake.data.tokenizers import _sentencepiece_model as sentencepiece_model
from tokamake.data.tokenizers._sentencepiece_model import NORMAL, UNUSED, USER_DEFINED

Json = dict[str, Any]
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
"""Expressions by model. gigatoken is exact for a Split by one of them before byte-level BPE."""
_ALLOWED_MODEL = {
    "type": ("BPE",),
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}
_MAX_PAIRS = 100_000  # of added tokens; more take too long to compare
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPACE_NORMALIZERS: tuple[Json, ...] = (
    _SPACES,
    {"type": "Sequence", "normalizers": [_SPACES]},
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _SPACES]},
)


def byte_alphabet() -> dict[int, str]:
    """Return the character of each byte in GPT-2's and all later byte-level vocabularies."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + rank) for rank, byte in enumerate(hidden)
    }


def json_refusal(text: bytes) -> str:
    """Return why gigatoken may not be exact for a tokenizer.json; empty if it is exact.

    Truncation and padding do not matter: documents are encoded without them.
    """
    tokenizer = json.loads(text)
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer")
    reason = model_refusal(model)
    if not reason and model.get("byte_fallback"):
        reason = _byte_fallback_refusal(normalizer, tokenizer.get("pre_tokenizer"), model=model)
    elif not reason:
        reason = f"it normalizes text ({normalizer['type']})" if normalizer else ""
        reason = reason or _split_refusal(tokenizer.get("pre_tokenizer"))
    return reason or added_refusal(tokenizer) or _order_refusal(tokenizer)


def _first(checks: dict[str, Any]) -> str:
    return next((reason for reason, holds in checks.items() if holds), "")


def model_refusal(model: Json) -> str:
    """Return why a model is no BPE whose tokens depend on the words alone."""
    for key, allowed in _ALLOWED_MODEL.items():
        if model.get(key) not in allowed:
            return f"the model's {key} is {model.get(key)!r}"
    return ""


def _byte_fallback_refusal(
    normalizer: Json | None, pre_tokenizer: Json | None, *, model: Json
) -> str:
    """Check a model in SentencePiece's style, which splits unknown characters into bytes."""
    if model.get("ignore_merges"):
        return "the model has byte_fallback with ignore_merges"
    if pre_tokenizer is None:
        return "" if normalizer in _SPACE_NORMALIZERS else "its normalizer is not known to be exact"
    metaspace = {k: pre_tokenizer.get(k) for k in ("type", "replacement", "split")}
    if normalizer or metaspace != {"type": "Metaspace", "replacement": "▁", "split": False}:
        return "its normalizer and pre_tokenizer are not known to be exact"
    return ""


def _split_refusal(pre_tokenizer: Json | None) -> str:
    """Check a byte-level model: a split into words by a known expression, then into bytes."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **options} if options.get(
            "use_regex", True
        ):
            return ""
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, **options},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if options in (
            {"behavior": "Isolated", "invert": False},
            {"behavior": "Removed", "invert": True},
        ):
            is_known = regex in REGEXES.values()
            return "" if is_known else "it splits words by an expression not known to be exact"
    return "its pre_tokenizer is not known to be exact"


def added_refusal(tokenizer: Json) -> str:
    """Return why added tokens may be found in another way than by their texts alone."""
    added, ids = tokenizer.get("added_tokens") or [], tokenizer["model"]["vocab"]
    if any(ids.get(token["content"], token["id"]) != token["id"] for token in added):
        return "an added token has another number in the vocabulary"
    for token in added:
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag):
                return f'the added token "{token["content"]}" has {flag}'
        if not token["content"]:
            return "an added token is empty"
    return ""


def _order_refusal(tokenizer: Json) -> str:
    """Return why gigatoken may find other added tokens."""
    added, normalizes = tokenizer.get("added_tokens") or [], tokenizer.get("normalizer") is not None
    for token in added:
        if token.get("normalized") and normalizes:
            return f'the added token "{token["content"]}" is searched for in normalized text'
    # `tokenizers` searches twice: first for the tokens that are not normalized, then for the rest.
    first = {token["content"] for token in added if not token.get("normalized")}
    second = {token["content"] for token in added if token.get("normalized")}
    if _can_overlap(first, second):
        return "added tokens of two kinds overlap"
    return ""


def _can_overlap(first: set[str], second: set[str]) -> bool:
    """Whether a text exists where a token of `first` overlaps a token of `second`."""
    if not {c for text in first for c in text} & {c for text in second for c in text}:
        return False
    if len(first) * len(second) > _MAX_PAIRS:
        return True
    return any(_touches(a, b) or _touches(b, a) for a, b in product(first, second))


def _touches(a: str, b: str) -> bool:
    """Whether `a` contains `b`, or a suffix of `a` is a prefix of `b`."""
    return b in a or any(a.endswith(b[:size]) for size in range(1, min(len(a), len(b))))


def sentencepiece_refusal(model: bytes) -> str:
    """Return why gigatoken may not be exact for a SentencePiece model; empty if it is exact."""
    spec = sentencepiece_model.read(model)
    if spec.kind != "bpe":
        return f"it is a {spec.kind} model"
    checks = {
        "it has no byte_fallback": not spec.byte_fallback,
        "it normalizes text": spec.normalizes,
        "it removes extra whitespace": spec.removes_spaces,
        "it marks spaces in another way": not spec.escapes_spaces or spec.spaces_are_suffixes,
        "it has user-defined or unused pieces": any(
            piece.kind in (USER_DEFINED, UNUSED) for piece in spec.pieces
        ),
    }
    words = {piece.text for piece in spec.pieces if piece.kind == NORMAL}
    merged = [piece for piece in spec.pieces if piece.kind == NORMAL and len(piece.text) > 1]
    # sentencepiece merges the leftmost of two pairs with equal scores; gigatoken may not. Pieces
    # of spaces alone share a score in Llama-2's model; their order does not change the tokens.
    scores = [piece.score for piece in merged if piece.text.strip("▁")]
    scores += {piece.score for piece in merged if not piece.text.strip("▁")}
    checks["two of its pieces have the same score"] = len(set(scores)) < len(scores)
    special = (piece.text for piece in spec.pieces if piece.kind != NORMAL)
    checks["its pieces spell out a special piece"] = _can_be_merged(special, words)
    return _first(checks)


def _can_be_merged(texts: Iterable[str], words: set[str]) -> bool:
    """Whether one of `texts` is the concatenation of two `words`."""
    return any(
        text[:cut] in words and text[cut:] in words for text in texts for cut in range(len(text))
    )
