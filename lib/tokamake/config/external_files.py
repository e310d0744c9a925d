"""Python files of users that are plug-ins, and files whose contents decide reruns."""

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tokamake.errors import UserError


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
    except Exception as error:
        raise UserError(f"{path}: cannot be imported ({type(error).__name__}: {error})") from None
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
