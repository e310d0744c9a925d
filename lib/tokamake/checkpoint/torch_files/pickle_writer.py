"""Write pickles that name classes and functions of torch, without importing torch."""

import argparse
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Global:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """Result of a call."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Instance:
    """An object with a state; its class is not called."""

    kind: Global
    state: Any


@dataclass(frozen=True)
class Items:
    """A dictionary whose keys may be instances of the classes here."""

    pairs: Iterable[tuple[Any, Any]]


@dataclass(frozen=True)
class Persistent:
    """Data outside of the pickle, by name."""

    name: tuple[Any, ...]


GETATTR = {("builtins", "getattr"), ("__builtin__", "getattr")}
"""Pickles call getattr for a nested class below protocol 4, and in Python 3.11.0 to 3.11.4 for a
member of an enum; other versions of Python call the enum with the value."""


def _unknown(value: Any) -> Any:
    raise TypeError(f"cannot pickle a {type(value).__name__}")


def dumps(
    value: Any, translate: Callable[[Any], Any] = _unknown, *, references: bool = False
) -> bytes:
    """Return a pickle of protocol 2, torch's protocol, with the same bytes in every Python.

    Args:
        translate: returns a replacement for values of other types.
        references: whether equal names and strings are written once and referenced later.
    """
    writer = _Writer(translate, references=references)
    writer.write(value)
    return bytes(writer.codes + pickle.STOP)


class _Writer:
    """Writes opcodes; see `dumps`."""

    def __init__(self, translate: Callable[[Any], Any], *, references: bool) -> None:
        self.codes = bytearray(pickle.PROTO + b"\x02")
        self._translate = translate
        self._references: dict[Any, bytes] | None = {} if references else None

    def write(self, value: Any) -> None:
        """Append the opcodes that make a value."""
        match value:
            case str() | Global():
                self._write_text(value)
            case None | bool() | int() | float():
                self.codes += _number(value)
            case tuple():
                self._write_all(pickle.MARK, value, after=pickle.TUPLE)
            case Call():
                self._write_all(b"", (value.function, value.arguments), after=pickle.REDUCE)
            case Instance():
                self._write_all(b"", (value.kind,), after=pickle.EMPTY_TUPLE + pickle.NEWOBJ)
                self._write_all(b"", (value.state,), after=pickle.BUILD)
            case list():
                self._write_all(pickle.EMPTY_LIST + pickle.MARK, value, after=pickle.APPENDS)
            case Mapping():
                self.write(Items(value.items()))
            case Items():
                flat = (item for pair in value.pairs for item in pair)
                self._write_all(pickle.EMPTY_DICT + pickle.MARK, flat, after=pickle.SETITEMS)
            case Persistent():
                self._write_all(b"", (value.name,), after=pickle.BINPERSID)
            case set():
                self.write(Call(Global("__builtin__", "set"), ([*value],)))
            case argparse.Namespace():
                self.write(Instance(Global("argparse", "Namespace"), vars(value)))
            case _:
                self.write(self._translate(value))

    def _write_all(self, before: bytes, values: Iterable[Any], *, after: bytes) -> None:
        self.codes += before
        for value in values:
            self.write(value)
        self.codes += after

    def _write_text(self, value: str | Global) -> None:
        known = self._references
        if known is not None and (reference := known.get(value)):
            self.codes += reference
            return
        self.codes += _name(value) if isinstance(value, Global) else _text(value)
        if known is not None:
            number = len(known)
            if number < 256:
                put, get, packed = pickle.BINPUT, pickle.BINGET, struct.pack("<B", number)
            else:
                put, get, packed = pickle.LONG_BINPUT, pickle.LONG_BINGET, struct.pack("<I", number)
            known[value] = get + packed
            self.codes += put + packed


def _name(value: Global) -> bytes:
    return pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _number(value: float | None) -> bytes:
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
    return pickle.BINFLOAT + struct.pack(">d", value)
