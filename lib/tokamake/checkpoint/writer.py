"""Write a checkpoint in a format: lay the files out, fill and seal them, rename the folder last.

The files grow in a folder beside the target. A plan and a list of finished tensors lie beside
them, so that the same conversion continues after an interruption.
"""

import errno
import fcntl
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from tokamake import __version__, files, plugins
from tokamake.checkpoint.checkpoint_tokenizer import (
    TOKENIZER_CONFIG,
    exported_config,
    exported_name,
)
from tokamake.checkpoint.detect import load_format
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import CHAT_TEMPLATES, Checkpoint, Target
from tokamake.checkpoint.tensors.copy import fill
from tokamake.checkpoint.tensors.extents import Chunk, Extent
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.config.model import FORMATS
from tokamake.errors import TemporaryError, UserError
from tokamake.runtime.console import progress

_PLAN, _DONE = "plan.json", "done.txt"
_NOT_FINITE = "unsound "
"""Prefix of a line in `done.txt` for a tensor that holds NaN or infinity."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_SYNC_BYTES = 2**27
"""Bytes of finished tensors after which they are synced to disk and listed in `done.txt`."""


class WriteResult(NamedTuple):
    """Facts about a written checkpoint that a caller reports."""

    left: list[str]
    """Kinds of tensors that the format does not hold."""
    not_finite: list[str]
    """Keys of tensors that hold NaN or infinity."""
    checked: str
    """Result of the check; empty without one."""


def write(
    path: Path,
    checkpoint: Checkpoint,
    name: str,
    target: Target,
    *,
    workers: int = 1,
    check: Callable[[Path], str] | None = None,
) -> WriteResult:
    """Write a checkpoint atomically.

    Args:
        check: gets the complete folder before it gets its name.

    Raises:
        UserError: `path` exists, the format cannot hold the model in this layout, or the check
            fails (nothing is left then), or the disk is full (finished work is kept).
    """
    refuse_existing(path)
    absolute = path.absolute()
    growing = absolute.with_name(f".{absolute.name}.converting")
    with _locked(growing, path):
        refuse_existing(path)  # another conversion may have finished since the first check
        try:
            return _write(
                growing, checkpoint, name=name, target=target, workers=workers, check=check
            )
        except UserError:
            shutil.rmtree(growing, ignore_errors=True)
            raise
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            raise UserError(
                f"{path}: {os.strerror(error.errno)} while writing; free some space and run the "
                f"same command again to continue, or remove {growing}"
            ) from None


def refuse_existing(path: Path) -> None:
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise UserError(f"{path}: already exists; name another folder, or remove it")
    for folder in path.absolute().parents:
        if folder.exists():
            if not folder.is_dir():
                raise UserError(f"{path}: {folder} is a file, not a folder; name another folder")
            break


@contextmanager
def _locked(growing: Path, path: Path) -> Iterator[None]:
    lock = growing.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TemporaryError(
                    f"{path}: another conversion writes it; wait for its end"
                ) from None
            except OSError:
                pass  # some parallel file systems are mounted without locks
            if not _is_at(stream, lock):
                # The previous holder removed its file after we opened it, so our lock excludes
                # nobody. Lock the current file instead.
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_at(stream: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(
    growing: Path,
    checkpoint: Checkpoint,
    *,
    name: str,
    target: Target,
    workers: int,
    check: Callable[[Path], str] | None,
) -> WriteResult:
    path = growing.with_name(growing.name.removeprefix(".").removesuffix(".converting"))
    content, notes = growing / "content", growing / "notes"
    extents = _plan(content, notes, checkpoint=checkpoint, name=name, target=target)
    stored = {chunk.key for extent in extents for chunk in extent.chunks}
    done = _read_done(notes)
    keys = [key for key in checkpoint.source if key in stored and key not in done]
    not_finite = {key for key, is_not_finite in done.items() if is_not_finite}
    _fill(
        notes,
        checkpoint,
        name=name,
        extents=extents,
        keys=keys,
        not_finite=not_finite,
        workers=workers,
    )
    for file in target.tokenizer:
        # transformers keeps further chat templates in a folder of their own.
        is_template = file.parent.name == CHAT_TEMPLATES
        place = content / (CHAT_TEMPLATES if is_template else "") / exported_name(file)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)
        if file.name == TOKENIZER_CONFIG:
            config = files.read_json(file, "fetch the tokenizer again")
            exported = exported_config(config, checkpoint.architecture)
            if exported != config:
                files.write_json(place, exported)
    if target.model_card:
        shutil.copyfile(target.model_card, content / "README.md")
    _sync([*content.rglob("*"), content])
    checked = check(content) if check else ""
    if path.exists():
        path.rmdir()
    (notes / _PLAN).unlink()  # the content is about to move, so nothing can be continued
    content.rename(path)
    files.sync(path.parent)
    shutil.rmtree(growing)
    # Compare kinds, not keys: some formats store one step count for all parameters.
    left = {_kind(key) for key in checkpoint.source} - {_kind(key) for key in stored}
    bad_keys = [key for key in checkpoint.source if key in not_finite]
    return WriteResult(sorted(left - {"model"}), bad_keys, checked)


def _kind(key: str) -> str:
    """Return e.g. optimizer.exp_avg for optimizer.exp_avg.model.norm.weight."""
    return ".".join(key.split(".")[: 2 if key.startswith("optimizer.") else 1])


def _plan(
    content: Path, notes: Path, *, checkpoint: Checkpoint, name: str, target: Target
) -> list[Extent]:
    """Lay the files out, or reuse the files of an interrupted process."""
    options = [repr(value) for value in (target, checkpoint.notes, checkpoint.progress)]
    shape = checkpoint.architecture.model_dump(mode="json")
    digest = files.digest([__version__, name, *options, shape, _file_states(checkpoint)])
    plan = notes / _PLAN
    if plan.is_file() and content.is_dir():
        saved = files.read_json(plan, "")
        if saved["digest"] == digest and "extents" in saved:  # older versions: another key
            return [_from_json(content, entry) for entry in saved["extents"]]
    if content.parent.exists():
        shutil.rmtree(content.parent)
    content.mkdir(parents=True)
    notes.mkdir()
    extents = _lay_out(content, checkpoint, name=name, target=target)
    _check_complete(extents, checkpoint, name=name)
    _check_free_space(content, extents)
    files.write_text(notes / _DONE, "")
    # Sync before the plan: a plan promises that its files are complete.
    _sync([*content.rglob("*"), content])
    entries = [_to_json(content, extent) for extent in extents]
    files.write_text(plan, json.dumps({"digest": digest, "extents": entries}))
    return extents


def _lay_out(content: Path, checkpoint: Checkpoint, *, name: str, target: Target) -> list[Extent]:
    folder = content
    if plugins.constant(FORMATS, name, "IN_ROOT", default=False):
        step = checkpoint.progress.iteration
        folder = content / f"global_step{step}"
        folder.mkdir()
        files.write_text(content / "latest_checkpointed_iteration.txt", f"{step}")
        files.write_text(content / "latest", folder.name)
    return load_format(name).lay_out(folder, checkpoint, target=target)


def _check_complete(extents: list[Extent], checkpoint: Checkpoint, *, name: str) -> None:
    """Check that the files hold all weights: an error in a format's names would lose some."""
    # Some formats store the master weights in place of the weights.
    keys = (chunk.key.partition(".") for extent in extents for chunk in extent.chunks)
    stored = {tensor for kind, _, tensor in keys if kind in ("model", "master")}
    weights = {key.removeprefix("model.") for key in checkpoint.source if key.startswith("model.")}
    if lost := sorted(weights - stored):
        raise AssertionError(f"format {name} has no place for the weights {', '.join(lost[:3])}")


def _check_free_space(content: Path, extents: list[Extent]) -> None:
    # The files have holes, so their size does not yet count as used.
    needed = sum(extent.num_bytes for extent in extents)
    if needed > (free := shutil.disk_usage(content).free):
        raise UserError(
            f"{content.parent.parent}: needs {needed:,} bytes, but {free:,} are free; "
            "free some space, or name a folder on another disk"
        )


def _file_states(checkpoint: Checkpoint) -> Any:
    """Size and modification time of the source's files: they identify it without reading it."""
    names = sorted({str(extent.file) for extent in checkpoint.source.extents})
    states = ((name, Path(name).stat()) for name in names)
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


def _to_json(content: Path, extent: Extent) -> list[Any]:
    chunks = [
        [
            chunk.key,
            [[at.start, at.stop] for at in chunk.slices],
            chunk.start,
            chunk.stride,
            chunk.is_mean,
        ]
        for chunk in extent.chunks
    ]
    file = str(extent.file.relative_to(content))
    return [file, extent.name, extent.offset, extent.shape, extent.dtype.name, chunks]


def _from_json(content: Path, entry: list[Any]) -> Extent:
    file, name, offset, shape, dtype_name, entries = entry
    chunks = (
        Chunk(
            key,
            tuple(slice(*at) for at in slices),
            start,
            None if stride is None else tuple(stride),
            is_mean,
        )
        for key, slices, start, stride, is_mean in entries
    )
    dtype = dtypes.named(dtype_name)
    assert dtype is not None, "the digest holds the version, so the same code wrote the plan"
    return Extent(content / file, name, offset, tuple(shape), dtype, (*chunks,))


def _fill(
    notes: Path,
    checkpoint: Checkpoint,
    *,
    name: str,
    extents: list[Extent],
    keys: list[str],
    not_finite: set[str],
    workers: int,
) -> None:
    """Fill and seal the files. A thread syncs and lists finished tensors meanwhile."""
    source, finished, num_bytes = checkpoint.source, list[str](), 0
    files_of: dict[str, set[Path]] = defaultdict(set)
    for extent in extents:
        for chunk in extent.chunks:
            files_of[chunk.key].add(extent.file)
    filled = fill(extents, source, keys=keys, workers=workers, not_finite=not_finite)
    with ThreadPoolExecutor(1) as pool:
        tasks = []
        label = f"writing {notes.parent.name}"
        for key in progress(filled, label=label, total=len(keys)):
            finished.append(key)
            num_bytes += math.prod(source.shapes[key]) * source.dtype(key).itemsize
            if num_bytes >= _SYNC_BYTES:
                written = sorted({file for key in finished for file in files_of[key]})
                states = {key: key in not_finite for key in finished}
                tasks.append(pool.submit(_add_done, notes, states, written))
                finished, num_bytes = [], 0
        all_files = sorted({extent.file for extent in extents})
        tasks.append(pool.submit(_sync, all_files))
        _seal(name, all_files, workers=workers)
        for task in tasks:
            task.result()


def _seal(name: str, written: list[Path], *, workers: int) -> None:
    """Write the checksums of the archives in files of a format, then the files that need them."""
    plug_in = load_format(name)
    for file, archives in plug_in.archives(written).items():
        torch_archive.seal(file, archives, workers=workers)
    if complete := getattr(plug_in, "complete", None):
        for folder in {file.parent for file in written}:
            complete(folder)


def _add_done(notes: Path, not_finite: dict[str, bool], written: list[Path]) -> None:
    """Sync files, then list their tensors as finished."""
    _sync(written)
    with (notes / _DONE).open("a") as stream:
        stream.writelines(f"{_NOT_FINITE * bad}{key}\n" for key, bad in not_finite.items())
        stream.flush()
        os.fsync(stream.fileno())


def _read_done(notes: Path) -> dict[str, bool]:
    """Read the finished tensors, and whether each holds NaN or infinity."""
    text = (notes / _DONE).read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # without a truncated last line
    return {line.removeprefix(_NOT_FINITE): line.startswith(_NOT_FINITE) for line in lines}


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        files.sync(path)
