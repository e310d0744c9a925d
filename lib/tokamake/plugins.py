"""A plug-in is a file: its name in the folder is its name in the config.

Names are checked against the folder listing, so a config is validated without importing torch.
"""

import ast
import functools
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tokamake.errors import UserError

_ROOT = Path(__file__).parent


def names(folder: str) -> list[str]:
    """Plug-ins in a folder of the package, e.g. `names("optim")`; modules named `_x` are none."""
    return sorted(
        path.stem for path in (_ROOT / folder).glob("*.py") if not path.stem.startswith("_")
    )


def check(folder: str, name: str) -> str:
    """Return `name` if the folder has such a plug-in, else raise `UserError` with the choices."""
    if name not in names(folder):
        raise UserError(
            f"no {folder} plug-in is called {name!r}; choose one of {', '.join(names(folder))}"
        )
    return name


def load(folder: str, name: str) -> ModuleType:
    """Import a plug-in."""
    return import_module(f"tokamake.{folder.replace('/', '.')}.{check(folder, name)}")


@functools.cache
def constant(folder: str, name: str, constant: str) -> Any:
    """Value of a constant of a plug-in, a literal, read without importing what the plug-in does."""
    path = _ROOT / folder / f"{check(folder, name)}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        if isinstance(target, ast.Name) and target.id == constant:
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return ast.literal_eval(node.value)
    raise UserError(f"{path}: has no constant {constant}; add it, as the other plug-ins have")
