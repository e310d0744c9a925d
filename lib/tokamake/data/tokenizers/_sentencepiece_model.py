"""Reads what decides the tokens from a SentencePiece .model file, a protocol buffer.

Field numbers are those of sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_CONTROL, _UNKNOWN = 3, 2


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    kind: int
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""


class Spec(NamedTuple):
    """What a model does with text."""

    pieces: list[Piece]
    kind: str
    """unigram, bpe, word or char."""
    byte_fallback: bool
    normalizes: bool
    """By a table of characters, as nmt_nfkc."""
    removes_spaces: bool
    escapes_spaces: bool
    spaces_are_suffixes: bool


Value = int | bytes


def read(model: bytes) -> Spec:
    """Parse a model.

    Raises:
        ValueError: it is no SentencePiece model.
    """
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    try:
        for number, _, value in _fields(model):
            if number == 1:
                piece = _message(value)
                (score,) = struct.unpack("<f", _bytes(piece.get(2, b"\0\0\0\0")))
                pieces.append(Piece(_bytes(piece.get(1, b"")).decode(), score, _int(piece, 3, 1)))
            elif number == 2:
                trainer = _message(value)
            elif number == 3:
                normalizer = _message(value)
    except (IndexError, struct.error, TypeError) as error:
        raise ValueError(f"not a SentencePiece model ({error})") from None
    return Spec(
        pieces,
        _KINDS.get(_int(trainer, 3, 1), "unknown"),
        bool(_int(trainer, 35, 0)),
        bool(normalizer.get(2, b"")),
        bool(_int(normalizer, 4, 1)),
        bool(_int(normalizer, 5, 1)),
        bool(_int(trainer, 24, 0)),
    )


def without_control_pieces(model: bytes) -> bytes:
    """The model with its control pieces made unknown ones.

    sentencepiece never finds a control piece, as <s>, in text; gigatoken would.
    """
    parts = []
    for number, raw, value in _fields(model):
        if number == 1 and _int(_message(value), 3, 1) == _CONTROL:
            value = _bytes(value) + bytes([3 << 3, _UNKNOWN])  # the last one counts
            raw = bytes([1 << 3 | 2]) + _varint(len(value)) + value
        parts.append(raw)
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[tuple[int, bytes, Value]]:
    """Field number, its bytes with tag, and value of each field of a message."""
    position = 0
    while position < len(message):
        start = position
        tag, position = _read_varint(message, position)
        value: Value
        match tag & 7:
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
        yield tag >> 3, message[start:position], value


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[position]
        result |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return result, position


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _message(value: Value) -> dict[int, Value]:
    return {number: inner for number, _, inner in _fields(_bytes(value))}


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where text belongs")
    return value


def _int(message: dict[int, Value], number: int, default: int) -> int:
    value = message.get(number, default)
    if not isinstance(value, int):
        raise TypeError("text where a number belongs")
    return value
