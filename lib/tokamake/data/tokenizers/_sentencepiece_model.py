"""Parser of SentencePiece .model files (protocol buffers), limited to fields that decide tokens.

Field numbers are from sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_MODEL_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    kind: int
    """NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE."""


class Spec(NamedTuple):
    """Properties of a model that determine how it encodes text."""

    pieces: list[Piece]
    kind: str
    """unigram, bpe, word or char."""
    byte_fallback: bool
    normalizes: bool
    """Whether a table replaces characters, e.g. nmt_nfkc."""
    adds_prefix: bool
    removes_spaces: bool
    escapes_spaces: bool
    spaces_are_suffixes: bool


Value = int | bytes


def read(model: bytes) -> Spec:
    """Parse a model, or raise ValueError."""
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    try:
        for number, value in _fields(model):
            if number == 1:
                pieces.append(_piece(_message(value)))
            elif number == 2:
                trainer = _message(value)
            elif number == 3:
                normalizer = _message(value)
    except (IndexError, struct.error, TypeError) as error:
        raise ValueError(f"not a SentencePiece model ({error})") from None
    return Spec(
        pieces,
        kind=_MODEL_KINDS.get(_int(trainer, 3, default=1), "unknown"),
        byte_fallback=bool(_int(trainer, 35, default=0)),
        normalizes=bool(normalizer.get(2, b"")),
        adds_prefix=bool(_int(normalizer, 3, default=1)),
        removes_spaces=bool(_int(normalizer, 4, default=1)),
        escapes_spaces=bool(_int(normalizer, 5, default=1)),
        spaces_are_suffixes=bool(_int(trainer, 24, default=0)),
    )


def _piece(message: dict[int, Value]) -> Piece:
    (score,) = struct.unpack("<f", _bytes(message.get(2, b"\0\0\0\0")))
    return Piece(_bytes(message.get(1, b"")).decode(), score, _int(message, 3, default=NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field of a message."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        value: Value
        match tag & 7:  # wire type
            case 0:
                value, position = _read_varint(message, position)
            case 1 | 5 as wire:
                size = 8 if wire == 1 else 4
                value, position = message[position : position + size], position + size
            case 2:
                size, position = _read_varint(message, position)
                value, position = message[position : position + size], position + size
            case wire:
                raise ValueError(f"not a SentencePiece model (wire type {wire})")
        yield tag >> 3, value


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[position]
        result |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return result, position


def _message(value: Value) -> dict[int, Value]:
    return dict(_fields(_bytes(value)))


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where text belongs")
    return value


def _int(message: dict[int, Value], number: int, *, default: int) -> int:
    value = message.get(number, default)
    if not isinstance(value, int):
        raise TypeError("text where a number belongs")
    return value
