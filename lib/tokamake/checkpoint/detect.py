"""Detect the format of a checkpoint from its files, open it, and verify its checksums."""

import re
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import candidates, pointed_files
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import View
from tokamake.config.model import FORMATS
from tokamake.errors import UserError


def open_any(path: Path) -> Checkpoint:
    """Open a checkpoint: its folder, its parent with a pointer file, or a run's folder.

    Raises:
        UserError: there is no checkpoint, or it is damaged. The message names a complete checkpoint
            of another step, if the same root folder holds one.
    """
    path = _training(path)
    with suggesting_other_step(path):
        return _open(path)


def list_files(path: Path) -> list[Path]:
    """List the files of a checkpoint of any format by name; none if `open_any` would fail."""
    path = _training(path)
    try:
        for name in _names():
            plug_in = load_format(name)
            if plug_in.find(path):
                if own := getattr(plug_in, "list_files", None):
                    return [*own(path)]
                pointer, numbered_folder = _pointer(name)
                return pointed_files(path, pointer, numbered_folder=numbered_folder)
    except UserError:  # a pointer file names a missing folder: `open_any` reports it
        pass
    return []


def _training(path: Path) -> Path:
    training = path / "training"
    return training if (path / "run.yaml").is_file() and training.is_dir() else path


def load_format(name: str) -> CheckpointFormat:
    module: Any = plugins.load(FORMATS, name)
    checked: CheckpointFormat = module
    return checked


def title(name: str) -> str:
    text: str = plugins.constant(FORMATS, name, "TITLE")
    return text


def _names() -> list[str]:
    return sorted(
        plugins.names(FORMATS), key=lambda name: plugins.constant(FORMATS, name, "PRIORITY")
    )


@contextmanager
def suggesting_other_step(path: Path, damaged: Path | None = None) -> Iterator[None]:
    """Add the newest complete checkpoint of another step to a UserError raised in the block.

    `damaged`: folder of the opened checkpoint; None if it could not be opened.
    """
    try:
        yield
    except UserError as error:
        if complete := _newest_complete(path, damaged):
            raise UserError(f"{error}, or give {complete}, which is complete") from None
        raise


def _newest_complete(path: Path, damaged: Path | None) -> Path | None:
    """Newest checkpoint of another step that is complete as far as names and sizes show."""
    root = path.parent if _step(path) is not None else path
    steps = {folder: n for folder in root.glob("*/") if (n := _step(folder)) is not None}
    for folder in sorted(steps, key=lambda folder: steps[folder], reverse=True):
        try:
            checkpoint_path = _open(folder).path
        except (UserError, OSError):
            continue
        if checkpoint_path != damaged:
            return checkpoint_path
    return None


def _step(folder: Path) -> int | None:
    """Step in the name of a folder, in any format; None: it is no folder of a step."""
    patterns = {plugins.constant(FORMATS, name, "STEP_FOLDER", default="") for name in _names()}
    matches = [re.fullmatch(pattern, folder.name) for pattern in patterns if pattern]
    return next((int(match[1]) for match in matches if match), None)


def _open(path: Path) -> Checkpoint:
    for name in _names():
        plug_in = load_format(name)
        if folder := plug_in.find(path):
            return plug_in.open_checkpoint(folder)
    raise _unknown(path)


def _unknown(path: Path) -> UserError:
    if other := model_tensors.unsupported_file(path):
        return UserError(f"{path}: {other}")
    if not path.is_dir():
        problem = "is a file" if path.exists() else "no such folder"
        return UserError(f"{path}: {problem}; give the folder of a checkpoint")
    pointer, folder = _pointed(path)
    for near in dict.fromkeys((folder, path)):
        if near_miss := _near_miss(near):
            return UserError(f"{near}: {near_miss}")
    known = ", ".join(name.replace("_", "-") for name in plugins.names(FORMATS))
    hint = ""
    if pointer is not None:
        problem = "which has no file of the first rank" if folder.is_dir() else "which is missing"
        hint = f" (here {pointer.name} names {folder.name}, {problem})"
    return UserError(
        f"{path}: no checkpoint of a known format ({known}); give its folder, or the parent folder "
        f"whose file latest names it{hint}"
    )


def _pointed(path: Path) -> tuple[Path | None, Path]:
    """Return the pointer file in a folder, or None, and the folder that it names, or `path`."""
    for name in _names():
        pointer, numbered_folder = _pointer(name)
        folders = candidates(path, pointer, numbered_folder)
        if len(folders) > 1:
            return path / pointer, folders[-1]
    return None, path


def _pointer(name: str) -> tuple[str, str]:
    """POINTER and NUMBERED_FOLDER of a format; empty if it has none."""
    pointer = plugins.constant(FORMATS, name, "POINTER", default="")
    return pointer, plugins.constant(FORMATS, name, "NUMBERED_FOLDER", default="")


def _near_miss(folder: Path) -> str | None:
    """Problem of a folder that a format recognizes but does not support."""
    for name in _names():
        near_misses = plugins.constant(FORMATS, name, "NEAR_MISSES", default=())
        for patterns, problem in dict(near_misses).items():
            if all(any(map(Path.is_file, folder.glob(pattern))) for pattern in patterns):
                return problem
    return None


def check_checksums(
    checkpoint: Checkpoint, *, workers: int, rank: int = 0, world_size: int = 1
) -> None:
    """Read all files of a checkpoint, and compare the data with the checksums in them.

    Safetensors have no checksums, nor have files of torch before 1.6.
    """
    files = sorted({extent.file for extent in checkpoint.source.extents})
    archives = load_format(checkpoint.format).archives(files)
    own = files[rank::world_size]
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda file: _check(file, archives.get(file, [])), own):
            pass


def _check(file: Path, archives: Iterable[tuple[int, int]]) -> None:
    with file.open("rb") as stream:
        for start, length in archives:
            view = View(stream, start, length=length)
            if not zipfile.is_zipfile(view):
                continue
            try:
                with zipfile.ZipFile(view) as archive:
                    compute = partial(_compute, stream.fileno(), start)
                    torch_archive.check_checksums(archive, view, compute=compute)
            except ValueError as error:
                raise UserError(
                    f"{file}: damaged: {error}; fetch or write the checkpoint again"
                ) from None


def _compute(descriptor: int, archive_start: int, start: int, size: int) -> int:
    return torch_archive.checksum(descriptor, archive_start + start, size)
