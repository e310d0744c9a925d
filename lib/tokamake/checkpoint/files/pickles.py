"""Writes pickles that name classes and functions of torch, without importing it."""

import argparse
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Global:
    """A class or function."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """What a function makes."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Made:
    """An object with attributes."""

    kind: Global
    state: Any


@dataclass(frozen=True)
class Items:
    """A dictionary, of which the keys may be any of these."""

    pairs: Iterable[tuple[Any, Any]]


@dataclass(frozen=True)
class Persistent:
    """What is kept elsewhere, by its name there."""

    name: tuple[Any, ...]


def _unknown(value: Any) -> Any:
    raise TypeError(f"no way to write a {type(value).__name__}")


def dumps(value: Any, translate: Callable[[Any], Any] = _unknown) -> bytes:
    """A pickle of protocol 2, as torch writes.

    Args:
        value: of plain types, `argparse.Namespace` and those above, nested in any way.
        translate: says what stands for values of other types.
    """
    return pickle.PROTO + b"\x02" + _codes(value, translate) + pickle.STOP


def _codes(value: Any, translate: Callable[[Any], Any]) -> bytes:
    def every(*values: Any) -> bytes:
        return b"".join(_codes(each, translate) for each in values)

    match value:
        case None | bool() | int() | float() | str():
            return _plain(value)
        case Global():
            return pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        case Call():
            return every(value.function, value.arguments) + pickle.REDUCE
        case Made():
            new = every(value.kind) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
            return new + every(value.state) + pickle.BUILD
        case Persistent():
            return every(value.name) + pickle.BINPERSID
        case tuple():
            return pickle.MARK + every(*value) + pickle.TUPLE
        case list():
            return pickle.EMPTY_LIST + pickle.MARK + every(*value) + pickle.APPENDS
        case Mapping():
            return every(Items(value.items()))
        case Items():
            each = (one for pair in value.pairs for one in pair)
            return pickle.EMPTY_DICT + pickle.MARK + every(*each) + pickle.SETITEMS
        case set():
            return every(Call(Global("__builtin__", "set"), ([*value],)))
        case argparse.Namespace():
            return every(Made(Global("argparse", "Namespace"), vars(value)))
        case _:
            return every(translate(value))


def _plain(value: Any) -> bytes:
    match value:
        case None:
            return pickle.NONE
        case bool():
            return pickle.NEWTRUE if value else pickle.NEWFALSE
        case int() if -(2**31) <= value < 2**31:
            return pickle.BININT + struct.pack("<i", value)
        case int():
            encoded = pickle.encode_long(value)
            return pickle.LONG1 + bytes([len(encoded)]) + encoded
        case float():
            return pickle.BINFLOAT + struct.pack(">d", value)
    encoded = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
