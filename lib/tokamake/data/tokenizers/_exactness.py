"""The tokenizers that ours or gigatoken encodes exactly as their own package does.

Takes the text of a tokenizer.json or a SentencePiece model and says what speaks against it; what is
not known to be exact is refused. Evidence: test_byte_level.py and test_gigatoken.py.
"""

import json
from collections.abc import Iterable
from itertools import product
from typing import Any

from tokamake.data.tokenizers import _sentencepiece_model as sentencepiece_model
from tokamake.data.tokenizers._unicode_differences import alphabet

Json = dict[str, Any]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST

REGEXES = {
    "GPT-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama-3": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER,
    "Qwen-2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER,
    "Qwen-3.5": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _REST,
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST,
    "Nemotron": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST,
}
"""Expressions, by what made them known, with which a Split before byte-level BPE is exact."""

_MODEL_KEYS = {
    "type": ("BPE",),
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}
_MOST_ADDED = 100  # each is compared wherever one of them may begin
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPACE_NORMALIZERS: tuple[Json, ...] = (
    _SPACES,
    {"type": "Sequence", "normalizers": [_SPACES]},
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _SPACES]},
)


def json_refusal(text: bytes) -> str:
    """What keeps gigatoken from being exact for a tokenizer.json, in one clause; empty: nothing.

    Truncation and padding are no matter: documents are encoded without either.
    """
    tokenizer = json.loads(text)
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer")
    reason = _model_refusal(model)
    if not reason and model.get("byte_fallback"):
        reason = _pieces_refusal(normalizer, tokenizer.get("pre_tokenizer"), model)
    elif not reason:
        reason = f"it normalizes text ({normalizer['type']})" if normalizer else ""
        reason = reason or _split_refusal(tokenizer.get("pre_tokenizer"))
    return reason or _added_refusal(tokenizer)


def byte_level_refusal(text: bytes) -> str:
    """What keeps our own encoder from being exact for a tokenizer.json; empty: nothing."""
    tokenizer = json.loads(text)
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    if reason := _model_refusal(model):
        return reason
    checks = {
        "it normalizes text": tokenizer.get("normalizer"),
        "it takes unknown characters apart": model.get("byte_fallback"),
        "it takes words of its vocabulary as they are": model.get("ignore_merges"),
        "it does not split words as GPT-2": not _splits_as_gpt2(tokenizer.get("pre_tokenizer")),
        "a byte is not in its vocabulary": not {*alphabet().values()} <= {*model["vocab"]},
        "it has many added tokens": len(added) > _MOST_ADDED,
    }
    return next((reason for reason, holds in checks.items() if holds), "") or _added_refusal(
        tokenizer
    )


def _model_refusal(model: Json) -> str:
    for key, allowed in _MODEL_KEYS.items():
        if model.get(key) not in allowed:
            return f"the model's {key} is {model.get(key)!r}"
    return ""


def _splits_as_gpt2(pre_tokenizer: Json | None) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel", **rest}:
            return bool(rest.get("use_regex", True))
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"pattern": {"Regex": regex}, "behavior": "Isolated"},
                {"type": "ByteLevel"},
            ],
        }:
            return regex == REGEXES["GPT-2"] and not _split_refusal(pre_tokenizer)
    return False


def _pieces_refusal(normalizer: Json | None, pre_tokenizer: Json | None, model: Json) -> str:
    """For SentencePiece-like models, whose unknown characters become bytes."""
    if model.get("ignore_merges"):
        return "the model has byte_fallback with ignore_merges"
    if pre_tokenizer is None:
        return "" if normalizer in _SPACE_NORMALIZERS else "its normalizer is not known to be exact"
    metaspace = {k: pre_tokenizer.get(k) for k in ("type", "replacement", "split")}
    if normalizer or metaspace != {"type": "Metaspace", "replacement": "▁", "split": False}:
        return "its normalizer and pre_tokenizer are not known to be exact"
    return ""


def _split_refusal(pre_tokenizer: Json | None) -> str:
    """For byte-level models: words by one of the known expressions, then bytes."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get(
            "use_regex", True
        ):
            return ""
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, **how},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if how in (
            {"behavior": "Isolated", "invert": False},
            {"behavior": "Removed", "invert": True},
        ):
            known = regex in REGEXES.values()
            return "" if known else "it splits words by an expression not known to be exact"
    return "its pre_tokenizer is not known to be exact"


def _added_refusal(tokenizer: Json) -> str:
    added = tokenizer.get("added_tokens") or []
    numbers, normalizes = tokenizer["model"]["vocab"], tokenizer.get("normalizer") is not None
    if any(numbers.get(token["content"], token["id"]) != token["id"] for token in added):
        return "an added token has another number in the vocabulary"
    for token in added:
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag):
                return f'the added token "{token["content"]}" has {flag}'
        if not token["content"]:
            return "an added token is empty"
        if token.get("normalized") and normalizes:
            return f'the added token "{token["content"]}" is searched for in normalized text'
    first = {token["content"] for token in added if not token.get("normalized")}
    second = {token["content"] for token in added if token.get("normalized")}
    if _overlap(first, second):
        return "added tokens of two kinds overlap"
    return ""


def _overlap(some: set[str], others: set[str]) -> bool:
    """Whether text exists in which one of `some` and one of `others` share characters."""
    inner = {c for text in some for c in text} & {c for text in others for c in text}
    if not inner:
        return False
    if len(some) * len(others) > 100_000:
        return True  # not worth the search
    return any(_touch(a, b) or _touch(b, a) for a, b in product(some, others))


def _touch(a: str, b: str) -> bool:
    """Whether `a` holds `b` or ends as `b` begins."""
    return b in a or any(a.endswith(b[:size]) for size in range(1, min(len(a), len(b))))


def sentencepiece_refusal(model: bytes) -> str:
    """What keeps gigatoken from being exact for a SentencePiece model; empty: nothing.

    Scores must differ: of two pieces with the same score sentencepiece merges the leftmost. Those
    of spaces alone, all alike in Llama-2's model, come out the same either way.
    """
    spec = sentencepiece_model.read(model)
    if spec.kind != "bpe":
        return f"it is a {spec.kind} model"
    checks = {
        "it has no byte_fallback": not spec.byte_fallback,
        "it normalizes text": spec.normalizes,
        "it removes extra whitespace": spec.removes_spaces,
        "it marks spaces in another way": not spec.escapes_spaces or spec.spaces_are_suffixes,
        "it has user-defined or unused pieces": any(p.kind in (4, 5) for p in spec.pieces),
    }
    words = {piece.text for piece in spec.pieces if piece.kind == 1}
    merged = [p for p in spec.pieces if p.kind == 1 and len(p.text) > 1]
    scores = [piece.score for piece in merged if piece.text.strip("▁")]
    scores += {piece.score for piece in merged if not piece.text.strip("▁")}
    checks["two of its pieces have the same score"] = len(set(scores)) < len(scores)
    reserved = (piece.text for piece in spec.pieces if piece.kind != 1)
    checks["its pieces spell out a special piece"] = _spelt(reserved, words)
    return next((reason for reason, holds in checks.items() if holds), "")


def _spelt(reserved: Iterable[str], words: set[str]) -> bool:
    """Whether one of `reserved` is two of `words`."""
    return any(
        text[:cut] in words and text[cut:] in words for text in reserved for cut in range(len(text))
    )
