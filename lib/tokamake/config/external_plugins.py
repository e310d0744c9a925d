"""Plug-ins with options that may be outside the package: filters of documents, scorers of texts.

Such a plug-in is a file of a folder of the library, the path of a Python file, or an entry point.
"""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import plugins
from tokamake.errors import SignalExit, UserError, choice


class PlugInKind(NamedTuple):
    """A kind of plug-ins. Its entry points have the group `tokamake.<noun>s`."""

    noun: str
    folder: str
    """Folder of the built-in ones."""
    extra: str
    """Extra of tokamake that installs the packages of the built-in ones."""
    external: str
    """How the config names a Python file, for messages."""

    def load(self, name: str) -> Any:
        """Return the module of a file, or the object of an entry point."""
        if name.endswith(".py"):
            return import_file(name, noun=f"{self.noun}s")
        if self.has(name):
            return plugins.load(self.folder, name)
        others = {entry.name: entry for entry in entry_points(group=f"tokamake.{self.noun}s")}
        if name not in others:
            known = [*plugins.names(self.folder), *others]
            remedy = choice(name, known, other=f", or {self.external}")
            raise UserError(f"{name}: unknown {self.noun}; {remedy}")
        try:
            return others[name].load()
        except ImportError as error:
            raise UserError(f"{name}: cannot be imported ({error}); install its package") from None

    def has(self, name: str) -> bool:
        """Whether a plug-in is built in."""
        return name in plugins.names(self.folder)

    def missing_packages(self, name: str, plugin: Any) -> str:
        """Say which packages of a plug-in are not installed, with the remedy; empty: none."""
        packages = getattr(plugin, "packages", ())
        if not (missing := [package for package in packages if find_spec(package) is None]):
            return ""
        remedy = f"run `pip install 'tokamake[{self.extra}]'`" if self.has(name) else "install it"
        named = ", ".join(missing)
        return f"{name}: needs {named}, which this Python environment lacks; {remedy}"

    def source(self, name: str, plugin: Any) -> list[Path]:
        """Source file of a plug-in outside the package; empty for a built-in one."""
        if self.has(name):
            return []
        module = inspect.getmodule(plugin)
        return [Path(name if name.endswith(".py") else getattr(module, "__file__", name))]

    def check_entry(
        self,
        value: Any,
        *,
        find: Callable[[str], Any],
        check: Callable[[str, dict[str, Any]], dict[str, Any]],
    ) -> dict[str, dict[str, Any]]:
        """Check an entry of the config: {NAME: {OPTION: VALUE}}, {NAME: VALUE}, or a name alone.

        Args:
            find: returns the plug-in of a name.
            check: checks the options, and returns them.
        """
        value = {value: None} if isinstance(value, str) else value
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ValueError(f"{value!r}: give a {self.noun} as NAME: {{OPTION: VALUE}}")
        ((name, options),) = value.items()
        name, options = str(name), {} if options is None else options
        try:
            if not isinstance(options, Mapping):
                if not (bare := getattr(find(name), "bare_option", "")):
                    raise ValueError(f"{name}: {options!r}: give options as {{OPTION: VALUE}}")
                options = {bare: options}
            return {name: check(name, dict(options))}
        except UserError as error:
            raise ValueError(str(error).replace("\n", "; ")) from None


@cache
def import_file(path: str, *, noun: str) -> Any:
    """Import a Python file. Its folder stays out of the search path. `noun`: for messages."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; paths of {noun} start from {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(f"tokamake_{noun}_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic resolves annotations there
    try:
        spec.loader.exec_module(module)
    except SignalExit:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{path}: cannot be imported ({type(error).__name__}: {error}); fix the file, or "
            "install what it imports"
        ) from None
    return module


def file_hash(path: Path) -> str:
    """Hash a file; a dry run asks for each job batch, so keep the hash of a version of it."""
    try:
        status = path.stat()
        return _hash_of_version(path, modified=status.st_mtime_ns, size=status.st_size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix the path") from None


@cache
def _hash_of_version(path: Path, *, modified: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
