"""Opens a checkpoint of whatever format its files are in."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokamake import plugins
from tokamake.checkpoint.latest import pointed
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.errors import UserError

KIND = "checkpoint/**/format"
"""Plug-ins that are formats."""
_STEP = re.compile(r"(?:global_step|iter_)(\d+)(?:_universal)?")
"""Name of a checkpoint's folder beside those of other steps."""

_DISTRIBUTED = "metadata.json"
"""File by which Megatron-LM knows its distributed checkpoints."""


def open_any(path: Path) -> Checkpoint:
    """Tell a checkpoint's format from its files, and open it.

    Args:
        path: folder of the checkpoint, or one whose `latest` names it.

    Raises:
        UserError: there is none, or it is damaged; the message names another one beside it that is
            complete, if there is one.
    """
    with offering_another(path):
        return _open(path)


@contextmanager
def offering_another(path: Path, damaged: Path | None = None) -> Iterator[None]:
    """Add to an error which other checkpoint is there.

    Args:
        path: what the user has named.
        damaged: the checkpoint that it stands for; None: it could not be opened.

    Raises:
        UserError: the error, with the name of the newest checkpoint beside it that is complete, if
            there is one.
    """
    try:
        yield
    except UserError as error:
        if other := _complete_beside(path, damaged):
            raise UserError(f"{error}, or give {other}, which is complete") from None
        raise


def _complete_beside(path: Path, damaged: Path | None) -> Path | None:
    """The newest checkpoint of another step that is complete, as far as names and sizes tell."""
    root = path.parent if _STEP.fullmatch(path.name) else path
    steps = {each: m for each in root.glob("*/") if (m := _STEP.fullmatch(each.name))}
    for folder in sorted(steps, key=lambda each: int(steps[each][1]), reverse=True):
        try:
            found = _open(folder).path
        except (UserError, OSError):
            continue
        if found != damaged:
            return found
    return None


def _open(path: Path) -> Checkpoint:
    for name in plugins.names(KIND):
        plug_in = plugins.load(KIND, name)
        if folder := plug_in.find(path):
            found: Checkpoint = plug_in.opened(folder)
            return found
    if not path.is_dir():
        problem = "is a file" if path.exists() else "no such folder"
        raise UserError(f"{path}: {problem}; give the folder of a checkpoint")
    folder = pointed(path)[1]
    if (folder / _DISTRIBUTED).is_file() and any(folder.glob("*.distcp")):
        raise UserError(
            f"{folder}: Megatron-LM's distributed checkpoint, which is not read; have Megatron-LM "
            "write it with --ckpt-convert-format torch"
        )
    if (path / "config.json").is_file():
        raise UserError(
            f"{path}: has config.json but no weights (*.safetensors or pytorch_model*); "
            "fetch them, too"
        )
    known = ", ".join(name.replace("_", "-") for name in plugins.names(KIND))
    raise UserError(
        f"{path}: no checkpoint of a format that is known ({known}); give its folder, or one whose "
        f"file latest names it{_named(path)}"
    )


def _named(path: Path) -> str:
    """What a file such as `latest` names that is none."""
    pointer, folder = pointed(path)
    if pointer is None:
        return ""
    problem = "in which no rank has its first file" if folder.is_dir() else "which is missing"
    return f" (here {pointer.name} names {folder.name}, {problem})"


def title(name: str) -> str:
    """What a format is called."""
    found: str = plugins.constant(KIND, name, "TITLE")
    return found
