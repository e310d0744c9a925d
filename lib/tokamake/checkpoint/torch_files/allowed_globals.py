"""Classes and functions that a pickle may name, and the stand-ins for them.

Nothing that a pickle names is imported or called. Python's own modules are refused, because they
can start programs. Classes of unknown packages are accepted within an `argparse.Namespace` only,
since Megatron's arguments hold values of any package.
"""

import argparse
import pickle
import re
import reprlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tokamake.checkpoint.torch_files.pickle_bounds import MAX_ARGUMENTS, sealed

_KNOWN = (
    *("megatron.", "deepspeed.", "numpy.", "transformer_engine.", "apex."),
    *("_codecs.", "pathlib.", "torch.nn.parameter."),
)
"""Modules whose names occur in checkpoints of Megatron and DeepSpeed: random generators, settings,
scales of 8-bit numbers."""
_HARMLESS = {
    *(("_io", "BytesIO"), ("signal", "Signals"), ("types", "SimpleNamespace")),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *(("collections", name) for name in ("Counter", "defaultdict", "deque")),
    *(("torch", "device"), ("torch", "Tensor")),
    *(("__builtin__", name) for name in ("bool", "bytes", "dict", "list", "str", "tuple")),
}
"""Further names that occur in such checkpoints, from modules that are refused otherwise."""
_SIGNAL = re.compile("signal[.]SIG[A-Z0-9]+")
"""Names of signals; Python before 3.11.5 pickles signals by name."""
_OWN = {*sys.stdlib_module_names, "__builtin__", "commands", "copy_reg"}
"""Modules of Python itself, also of Python 2. Some of them can start programs."""


def _is_own(name: str) -> bool:
    return name.partition(".")[0] in _OWN


class _Kind(type):
    """Class of stand-in classes. It prints a stand-in as the name of the class or function."""

    name: str

    def __repr__(cls) -> str:
        return cls.name.rpartition(".")[2]


class StandIn(metaclass=_Kind):
    """Stands for an object of a class that a file names. It only keeps the pickle's values.

    Attributes:
        name: module and name of the class.
        arguments: of the call that makes the object.
        values: attributes of the object.
    """

    name = ""
    arguments: tuple[Any, ...] = ()
    _state: Any = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if len(arguments) > MAX_ARGUMENTS:
            raise pickle.UnpicklingError(f"passes {len(arguments):,} arguments to {type(self)!r}")
        self.arguments = arguments
        self._items: list[Any] = [options] if options else []

    def __repr__(self) -> str:
        """Return e.g. AttnBackend(5)."""
        return f"{type(self)!r}({', '.join(map(repr, self.arguments))})"

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        # Subclasses of dict are pickled this way; subclasses of list with append and extend.
        self.extend((key, value))

    def append(self, value: Any) -> None:
        self.extend((value,))

    def extend(self, values: Any) -> None:
        self._items = [*vars(self).get("_items", ()), *values]

    @property
    def values(self) -> Mapping[Any, Any]:
        return self._state if isinstance(self._state, Mapping) else {}

    def inside(self) -> tuple[Any, ...]:
        return (*self.arguments, self._state, *vars(self).get("_items", ()))


def _new_class(name: str, base: Any = StandIn) -> type[StandIn]:
    stand_in: Any = _Kind("StandIn", (base,), {"name": name})
    return stand_in


def attribute_of(kind: Any, name: Any) -> type[StandIn]:
    """Return the stand-in for a nested class or for a member of an enum; nothing is looked up.

    Raises:
        pickle.UnpicklingError: `kind` is no stand-in or one of Python's own classes, or `name` is
            private or no identifier.
    """
    if not isinstance(kind, _Kind):
        raise pickle.UnpicklingError("asks for an attribute of an object that is no class")
    if type(name) is not str or not name.isidentifier() or name.startswith("__"):
        raise pickle.UnpicklingError(f"asks for the attribute {reprlib.repr(name)}")
    if _is_own(kind.name):
        raise pickle.UnpicklingError(f"names {kind.name}.{name}")
    # `AllowedGlobals.check` finds the class, which may be of an unknown package, as the base.
    return _new_class(f"{kind.name}.{name}", kind)


ATTRIBUTE = sealed(attribute_of)
"""Stands for getattr."""


def value_of(member: Any, values: Mapping[str, Any]) -> Any:
    """Return the value of an enum's member, by its stand-in, or None if its name is unknown."""
    if isinstance(member, _Kind):
        return values.get(member.name.rpartition(".")[2])
    if isinstance(member, StandIn):
        return member.arguments[0] if member.arguments else None
    return member


def _share_attributes(namespace: argparse.Namespace, attributes: Any) -> None:
    if type(attributes) is not dict or not all(type(name) is str for name in attributes):
        raise pickle.UnpicklingError("sets attributes that are not named")
    namespace.__dict__ = attributes


class AllowedGlobals:
    """Stand-ins of one file. A pickle can set attributes of classes, so each file has its own.

    Attributes:
        namespace: stands for argparse.Namespace.
    """

    def __init__(self) -> None:
        # A copy of the attributes for each instance could fill all memory.
        set_state = {"__setstate__": _share_attributes}
        self.namespace = type("Namespace", (argparse.Namespace,), set_state)
        self._stand_ins: dict[str, type[StandIn]] = {}
        self._unknown: set[str] = set()

    def find(self, module: str, name: str) -> type[StandIn]:
        """Return the stand-in for a class or function."""
        full = f"{module}.{name}"
        known = full.startswith(_KNOWN) or (module, name) in _HARMLESS or _SIGNAL.fullmatch(full)
        # Not even methods of known classes of Python, such as Path.touch.
        if _is_own(full) and (not known or "." in name):
            raise pickle.UnpicklingError(f"names {full}")
        if not known:
            self._unknown.add(full)
        return self._stand_ins.setdefault(full, _new_class(full))

    def check(self, content: Any) -> None:
        """Check that classes of unknown packages occur within namespaces only.

        Raises:
            pickle.UnpicklingError: one occurs elsewhere, or the pickle made and dropped it.
        """
        if not self._unknown:
            return
        places = {*_places(content)}
        for name in sorted(self._unknown):
            if (name, True) not in places or (name, False) in places:
                raise pickle.UnpicklingError(f"names {name}")


def _places(content: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names of stand-ins, and whether each occurs within a namespace."""
    # With a stack of its own: a pickle can nest values deeper than Python recurses.
    seen, stack = set[tuple[int, bool]](), [(content, False)]
    while stack:
        value, in_namespace = stack.pop()
        if (id(value), in_namespace) in seen:
            continue
        seen.add((id(value), in_namespace))
        inner: Any = ()
        if isinstance(value, _Kind):
            bases = (base for base in value.__mro__ if isinstance(base, _Kind))
            yield from ((base.name, in_namespace) for base in bases)
        elif isinstance(value, StandIn):
            inner = (type(value), *value.inside())
        elif isinstance(value, argparse.Namespace):
            in_namespace, inner = True, (*vars(value).values(),)
        elif isinstance(value, Mapping):
            inner = (*value.keys(), *value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            inner = (*value,)
        stack += [(item, in_namespace) for item in inner]
