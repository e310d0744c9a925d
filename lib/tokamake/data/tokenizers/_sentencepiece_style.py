"""BPE in SentencePiece's style as arguments of lib/csrc: characters are merged, others are bytes.

Spaces are written as U+2581. No regular expression splits text. A word ends where no merge can
join two characters, so its tokens do not depend on the text around it.

A reason of `Unsupported` is a clause whose subject "it" is the tokenizer.
"""

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tokamake._csrc import BytePairs, Vocabulary
from tokamake.data.tokenizers import _sentencepiece_model as sentencepiece_model
from tokamake.data.tokenizers._byte_level import byte_ids
from tokamake.data.tokenizers._exactness import Json, Unsupported
from tokamake.data.tokenizers._sentencepiece_model import BYTE, NORMAL, UNUSED, USER_DEFINED

MARK = "\u2581"
"""Stands for a space."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""Pieces of single bytes."""
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
_PREPEND = {"type": "Prepend", "prepend": MARK}
_METASPACE = {"never": "", "always": "unless mark", "first": "first unless mark"}


def json_arguments(tokenizer: Json, vocabulary: Vocabulary) -> dict[str, Any]:
    """Arguments of lib/csrc for a tokenizer.json; Unsupported if it may not be exact."""
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer")
    prefix = _prefix(normalizer, tokenizer.get("pre_tokenizer"))
    if model.get("ignore_merges"):
        raise Unsupported("its model has byte_fallback with ignore_merges")
    if normalizer and any(token.get("normalized") for token in tokenizer.get("added_tokens") or []):
        raise Unsupported("an added token is searched for in normalized text")
    return {**_arguments(vocabulary), "prefix": prefix}


def model_arguments(definition: bytes) -> dict[str, Any]:
    """Arguments of lib/csrc for a SentencePiece model; Unsupported if it may not be exact."""
    spec = sentencepiece_model.read(definition)
    words = [piece for piece in spec.pieces if piece.kind == NORMAL]
    merged = sorted((piece for piece in words if len(piece.text) > 1), key=lambda p: -p.score)
    # sentencepiece merges the leftmost of two pairs with equal scores. Pieces of spaces alone share
    # a score in Llama-2's model; their order does not change the tokens.
    scores = [piece.score for piece in merged if piece.text.strip(MARK)]
    normal = {piece.text for piece in words}
    # sentencepiece, too, finds the longest at each place, and joins them to no text around.
    added = [(piece, n) for n, piece in enumerate(spec.pieces) if piece.kind == USER_DEFINED]
    checks = {
        f"it is a {spec.kind} model": spec.kind != "bpe",
        "it has no byte_fallback": not spec.byte_fallback,
        "it normalizes text": spec.normalizes,
        "it removes extra whitespace": spec.removes_spaces,
        "it marks spaces in another way": not spec.escapes_spaces or spec.spaces_are_suffixes,
        "it has unused pieces": any(piece.kind == UNUSED for piece in spec.pieces),
        "a user-defined piece has a space": any({MARK, " "} & {*piece.text} for piece, _ in added),
        "two of its pieces have the same score": len({*scores}) < len(scores),
        "a character of its pieces is no piece": not {*"".join(normal)} <= normal,
    }
    if reason := next((reason for reason, holds in checks.items() if holds), ""):
        raise Unsupported(reason)
    ids = {piece.text: n for n, piece in enumerate(spec.pieces) if piece.kind in (NORMAL, BYTE)}
    cuts = ((text[:cut], text[cut:]) for text, *_ in merged for cut in range(1, len(text)))
    merges = [(left, right) for left, right in cuts if left in normal and right in normal]
    vocabulary = Vocabulary(orjson.dumps(ids), orjson.dumps(merges))
    return {
        **_arguments(vocabulary, shares_ranks=True),
        "prefix": "document" if spec.adds_prefix else "",
        "added": [(piece.text, n, 0) for piece, n in added],
    }


def _prefix(normalizer: Json | None, pre_tokenizer: Json | None) -> str:
    """Prefix of each text; Unsupported if text is changed otherwise than by marks of spaces."""
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    match pre_tokenizer:
        case {"type": "Metaspace", "replacement": "\u2581", "split": False, **options} if not steps:
            return _METASPACE[str(options["prepend_scheme"])]
        case None | {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
            # After _SPACES, there are no spaces to split at.
            if steps in ([_SPACES], [_PREPEND, _SPACES]):
                return "always" if len(steps) > 1 else ""
    raise Unsupported("its normalizer and pre_tokenizer are not known to be exact")


def metaspace_prefix(step: Json) -> str:
    """Prefix of each text by a pre-tokenizer Metaspace that splits; Unsupported if it is other."""
    match step:
        case {
            "type": "Metaspace",
            "replacement": "\u2581",
            "split": True,
            "prepend_scheme": scheme,
        }:
            return _METASPACE[str(scheme)]
    raise Unsupported("its pre_tokenizer is not known to be exact")


def fallback_ids(vocabulary: Vocabulary) -> NDArray[np.uint32]:
    """(256,) token ids of bytes of characters that the vocabulary lacks.

    Gemma has the character of a tab in place of its byte, which no other character has.
    """
    texts = [
        chr(byte) if byte < 128 and vocabulary.id(text) is None else text
        for byte, text in enumerate(BYTES)
    ]
    return byte_ids(vocabulary, texts)


def _arguments(vocabulary: Vocabulary, *, shares_ranks: bool = False) -> dict[str, Any]:
    singles, merges = fallback_ids(vocabulary), vocabulary.merges()
    of_bytes = [number for text in BYTES if (number := vocabulary.id(text)) is not None]
    if np.isin(merges[:, :2], of_bytes).any():
        raise Unsupported("it merges bytes")
    if vocabulary.id(MARK) is None:
        raise Unsupported("its vocabulary lacks U+2581")
    characters = vocabulary.characters()
    model = BytePairs(singles, merges, characters=characters, shares_ranks=shares_ranks)
    return {"model": model, "joints": vocabulary.joints()}
