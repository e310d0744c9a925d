"""Pickles as each version of Python writes them, on whichever Python the tests run."""

import enum
import io
import pathlib
import pickle
import sys
import types
from typing import Any, NamedTuple
from unittest.mock import patch


class Python(NamedTuple):
    """How a version of Python pickles.

    Attributes:
        by_name: whether enum members are looked up by name (3.11.0 to 3.11.4), not by value.
        paths: module of the classes of paths.
        in_parts: whether paths are stored as their parts, not as the arguments of the constructor.
        protocol: used if the caller names none.
    """

    by_name: bool
    paths: str
    in_parts: bool
    protocol: int

    def reduced(self, value: Any) -> Any:
        """Reduced form of a value, as `Pickler.reducer_override` returns it."""
        if isinstance(value, enum.Enum):
            if not self.by_name:
                return type(value), (value.value,)
            # Members of enums that are built from constants of a module are names of that module.
            of_module = type(value).__module__ == "signal"
            return value.name if of_module else (getattr, (type(value), value.name))
        if isinstance(value, pathlib.PurePath):
            kind = getattr(sys.modules[self.paths], type(value).__name__)
            return kind, value.parts if self.in_parts else (str(value),)
        return NotImplemented

    def dumps(self, value: Any, protocol: int | None = None) -> bytes:
        """Pickle a value, by default with the protocol that this Python takes."""
        stream = io.BytesIO()
        pickler = self.module().Pickler(stream, self.protocol if protocol is None else protocol)
        with patch.dict(sys.modules, {self.paths: _paths(self.paths)}):
            pickler.dump(value)
        return stream.getvalue()

    def module(self) -> Any:
        """Module for the argument `pickle_module` of torch.save."""
        reduced = self.reduced

        class Pickler(pickle.Pickler):
            def reducer_override(self, value: Any) -> Any:
                return reduced(value)

        return types.SimpleNamespace(__name__="pickle", Pickler=Pickler)


def _paths(name: str) -> types.ModuleType:
    """A module with classes of paths, as pickles name it."""
    module = types.ModuleType(name)
    for kind in ("PosixPath", "PurePosixPath"):
        setattr(module, kind, type(kind, (), {"__module__": name}))
    return module


PYTHONS = {
    "3.10": Python(False, "pathlib", True, 4),
    "3.11.2": Python(True, "pathlib", True, 4),
    "3.11.7": Python(False, "pathlib", True, 4),
    "3.12": Python(False, "pathlib", True, 4),
    "3.13": Python(False, "pathlib._local", False, 4),
    "3.14": Python(False, "pathlib", False, 5),
}


def at_hand() -> Python:
    """The Python that runs the tests."""
    if (3, 11) <= sys.version_info < (3, 11, 5):
        return PYTHONS["3.11.2"]
    major, minor = min(sys.version_info[:2], (3, 14))
    return PYTHONS.get(f"{major}.{minor}", PYTHONS["3.11.7"])
