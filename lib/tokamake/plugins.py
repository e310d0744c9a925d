"""A plug-in is a file: its name in the folder is its name in the config.

Names are checked against the folder listing, so a config is validated without importing torch.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType

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
