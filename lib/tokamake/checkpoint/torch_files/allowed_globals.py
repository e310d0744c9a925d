"""What stands for classes and functions that a pickle names, and what a pickle may name.

Nothing of what is named is imported or called. Names that programs are made of are refused; those
of others' classes may stand in an `argparse.Namespace` alone, as Megatron keeps its arguments.
"""

import argparse
import pickle
import re
import reprlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_KNOWN = (
    *("megatron.", "deepspeed.", "numpy.", "transformer_engine.", "apex."),
    *("_codecs.", "pathlib.", "torch.nn.parameter."),
)
"""Where classes and functions come from that checkpoints of Megatron and DeepSpeed name, for random
generators, settings and scales of 8 bit."""
_HARMLESS = {
    *(("_io", "BytesIO"), ("signal", "Signals"), ("types", "SimpleNamespace")),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *(("collections", name) for name in ("Counter", "defaultdict", "deque")),
    *(("torch", "device"), ("torch", "Tensor")),
    *(("__builtin__", name) for name in ("bool", "bytes", "dict", "list", "str", "tuple")),
}
"""Others that do."""
_SIGNAL = re.compile("signal[.]SIG[A-Z0-9]+")
"""Signals, which Python before 3.11.5 pickles by their global names."""
_OWN = {*sys.stdlib_module_names, "__builtin__", "commands", "copy_reg"}
"""Python's own modules, of today and of version 2, with all that can start a program."""


def _is_own(name: str) -> bool:
    return name.partition(".")[0] in _OWN


class _Kind(type):
    """Shows a stand-in for a class as its name, and for a member of an enum too."""

    name: str

    def __repr__(cls) -> str:
        return cls.name.rpartition(".")[2]


class StandIn(metaclass=_Kind):
    """Stands for what a file names; does nothing but keep what it is made of.

    Attributes:
        name: module and name of what it stands for.
        arguments: what it was called with.
        values: attributes of what it stands for.
    """

    name = ""
    arguments: tuple[Any, ...] = ()
    _state: Any = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments = arguments
        self._kept: list[Any] = [options] if options else []

    def __repr__(self) -> str:
        """As what it stands for might be made: AttnBackend(5)."""
        return f"{type(self)!r}({', '.join(map(repr, self.arguments))})"

    def __setstate__(self, state: Any) -> None:
        """Take attributes, as objects without rules of their own are stored."""
        self._state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take an item, as kinds of dictionaries do."""
        self.extend((key, value))

    def append(self, value: Any) -> None:
        """Take an item, as kinds of lists do."""
        self.extend((value,))

    def extend(self, values: Any) -> None:
        """Take items, as kinds of lists do."""
        self._kept = [*vars(self).get("_kept", ()), *values]

    @property
    def values(self) -> Mapping[Any, Any]:
        """See above."""
        return self._state if isinstance(self._state, Mapping) else {}

    def inside(self) -> tuple[Any, ...]:
        """All that it keeps."""
        return (*self.arguments, self._state, *vars(self).get("_kept", ()))


def _new(name: str, base: Any = StandIn) -> type[StandIn]:
    made: Any = _Kind("StandIn", (base,), {"name": name})
    return made


class Attribute:
    """Stands for getattr: gives what stands for a class within a class, or for an enum's member.

    It looks nothing up, and has no attributes, so that no file can change it.
    """

    __slots__ = ()

    def __call__(self, kind: Any, name: Any) -> type[StandIn]:
        """What stands for `name` of what a stand-in stands for.

        Raises:
            pickle.UnpicklingError: of anything else, of Python's own classes, or no plain name.
        """
        if not isinstance(kind, _Kind):
            raise pickle.UnpicklingError("asks for an attribute of what is no class")
        if type(name) is not str or not name.isidentifier() or name.startswith("__"):
            raise pickle.UnpicklingError(f"asks for the attribute {reprlib.repr(name)}")
        if _is_own(kind.name):
            raise pickle.UnpicklingError(f"names {kind.name}.{name}")
        # Its base says what it was taken from, which `AllowedGlobals.check` judges.
        return _new(f"{kind.name}.{name}", kind)


def value_of(found: Any, members: Mapping[str, Any]) -> Any:
    """Value of an enum's member, which a file has by value or by name (see `pickles.GETATTR`).

    Args:
        found: what stands for it, or the plain value.
        members: values by name.

    Returns:
        The value; None: it is not known.
    """
    if isinstance(found, _Kind):
        return members.get(found.name.rpartition(".")[2])
    if isinstance(found, StandIn):
        return found.arguments[0] if found.arguments else None
    return found


class AllowedGlobals:
    """Stand-ins of one file, by what they stand for.

    A pickle can set attributes of the classes that it names, so that each file has its own.

    Attributes:
        namespace: in the place of argparse.Namespace.
    """

    def __init__(self) -> None:
        self.namespace = type("Namespace", (argparse.Namespace,), {})
        self._made: dict[str, type[StandIn]] = {}
        self._foreign: set[str] = set()

    def find(self, module: str, name: str) -> type[StandIn]:
        """What stands for a class or function.

        Raises:
            pickle.UnpicklingError: it could run something.
        """
        full = f"{module}.{name}"
        known = full.startswith(_KNOWN) or (module, name) in _HARMLESS or _SIGNAL.fullmatch(full)
        # Of Python's own classes no methods, as Path.touch.
        if _is_own(full) and (not known or "." in name):
            raise pickle.UnpicklingError(f"names {full}")
        if not known:
            self._foreign.add(full)
        return self._made.setdefault(full, _new(full))

    def check(self, found: Any) -> None:
        """See that others' classes stand in arguments only.

        Args:
            found: what a file holds.

        Raises:
            pickle.UnpicklingError: one stands elsewhere, or was made and thrown away.
        """
        if not self._foreign:
            return
        places = {*_places(found)}
        for name in sorted(self._foreign):
            if (name, True) not in places or (name, False) in places:
                raise pickle.UnpicklingError(f"names {name}")


def _places(found: Any) -> Iterator[tuple[str, bool]]:
    """Names of stand-ins, and whether they are in a namespace."""
    seen, waiting = set[tuple[int, bool]](), [(found, False)]
    while waiting:
        value, within = waiting.pop()
        if (id(value), within) in seen:
            continue
        seen.add((id(value), within))
        inside: Any = ()
        if isinstance(value, _Kind):
            yield from ((kind.name, within) for kind in value.__mro__ if isinstance(kind, _Kind))
        elif isinstance(value, StandIn):
            inside = (type(value), *value.inside())
        elif isinstance(value, argparse.Namespace):
            within, inside = True, (*vars(value).values(),)
        elif isinstance(value, Mapping):
            inside = (*value.keys(), *value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            inside = (*value,)
        waiting += [(each, within) for each in inside]
