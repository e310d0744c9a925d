"""Plug-ins: files or folders whose name is a value in the config.

A kind of plug-in is a folder of files (`optim`), or all folders with a module of a fixed name
(`models/*/model`, `checkpoint/**/format`). Names are checked against the list of files, so
validation of a config does not import torch.
"""

import ast
import functools
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tokamake.errors import UserError, choice

_ROOT = Path(__file__).parent


def names(kind: str) -> list[str]:
    """Names of all plug-ins of a kind, e.g. `names("optim")`, except files named `_x.py`."""
    return sorted(_paths(kind))


def check(kind: str, name: str) -> str:
    """Return `name` if a plug-in has this name, else raise an error that lists all names."""
    if name not in names(kind):
        raise UserError(
            f"no {kind.partition('/*')[0]} plug-in is called {name!r}; {choice(name, names(kind))}"
        )
    return name


def load(kind: str, name: str) -> ModuleType:
    """Import a plug-in; one that is imported needs no look at the disk."""
    module = kind.replace("*", name) if "*" in kind else f"{kind}/{name}"
    if loaded := sys.modules.get(f"tokamake/{module}".replace("/", ".")):
        return loaded
    return import_module(_full_name(kind, name))


@functools.cache
def _full_name(kind: str, name: str) -> str:
    """Name of the module of a plug-in."""
    path = _paths(kind)[check(kind, name)].relative_to(_ROOT).with_suffix("")
    return ".".join(("tokamake", *path.parts))


@functools.cache
def constant(kind: str, name: str, constant: str, *, default: Any = None) -> Any:
    """Value of a literal constant of a plug-in, read without importing the plug-in."""
    path = _paths(kind)[check(kind, name)]
    if constant in (values := _assignments(path)):
        return ast.literal_eval(values[constant])
    if default is not None:
        return default
    raise UserError(f"{path}: has no constant {constant}; add it, as in the other plug-ins")


@functools.cache
def _assignments(path: Path) -> dict[str, ast.expr]:
    """Values that a file assigns to names, not evaluated."""
    values = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name):
            values[target.id] = node.value
    return values


def _paths(kind: str) -> dict[str, Path]:
    """File of each plug-in of a kind, by name."""
    if "*" in kind:
        return {path.parent.name: path for path in _ROOT.glob(f"{kind}.py")}
    paths = (_ROOT / kind).glob("*.py")
    return {path.stem: path for path in paths if not path.stem.startswith("_")}
