"""Writes a checkpoint in a format: files are laid out, filled, sealed, and renamed last.

What is done already is noted beside the files that grow, on disk, so that the same conversion goes
on where it was cut off.
"""

import errno
import fcntl
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from tokamake import __version__, files
from tokamake.checkpoint.detect import load_format
from tokamake.checkpoint.native import dcp_metadata
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.copy import fill
from tokamake.checkpoint.tensors.extents import Chunk, Extent
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.errors import UserError
from tokamake.runtime.console import progress

_PLAN, _DONE = "plan.json", "done.txt"
_UNSOUND = "unsound "
"""What a line on a tensor begins with that holds NaN or infinity."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What writing on a full disk fails with."""
_NOTED_BYTES = 2**27
"""Size of tensors that are brought to disk, and noted as done, at once."""


class WriteResult(NamedTuple):
    """What is told of a checkpoint that was written."""

    left: list[str]
    """Kinds of tensors that the format does not hold, and which were left."""
    unsound: list[str]
    """Keys of tensors that hold NaN or infinity."""


def write(
    path: Path, checkpoint: Checkpoint, name: str, target: Target, *, workers: int = 1
) -> WriteResult:
    """Write a checkpoint, whole or not at all.

    Args:
        path: folder to make.
        checkpoint: what to write.
        name: of the format's plug-in.
        target: layout and number format.
        workers: threads.

    Raises:
        UserError: something is in the way, or the format cannot hold the model so: nothing is left
            then; or the disk is full: what was done is kept.
    """
    refuse_other(path)
    whole = path.absolute()
    growing = whole.with_name(f".{whole.name}.converting")
    with _alone(growing, path):
        refuse_other(path)  # which another conversion may have made meanwhile
        try:
            return _write(growing, checkpoint, name, target, workers)
        except UserError:
            shutil.rmtree(growing, ignore_errors=True)
            raise
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise UserError(
                f"{path}: {error.strerror} while it was written; make room, and the same command "
                f"goes on, or remove {growing}"
            ) from None


def refuse_other(path: Path) -> None:
    """See that nothing is in the way.

    Raises:
        UserError: something is.
    """
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise UserError(f"{path}: is there already; name another folder, or remove it")
    for folder in path.absolute().parents:
        if folder.exists():
            if not folder.is_dir():
                raise UserError(f"{path}: {folder} is a file, not a folder; name another folder")
            break


@contextmanager
def _alone(growing: Path, path: Path) -> Iterator[None]:
    """Keep other conversions out.

    Raises:
        UserError: one writes there.
    """
    lock = growing.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{path}: another conversion writes it; wait for its end") from None
            except OSError:
                pass  # Some parallel file systems are mounted without locks.
            if not _is_at(stream, lock):
                continue  # Whoever had it has removed it since: others lock the one that is there.
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_at(stream: IO[str], path: Path) -> bool:
    """Whether an open file is the one that a path names."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(
    growing: Path, checkpoint: Checkpoint, name: str, target: Target, workers: int
) -> WriteResult:
    path = growing.with_name(growing.name.removeprefix(".").removesuffix(".converting"))
    content, notes = growing / "content", growing / "notes"
    regions = _planned(content, notes, checkpoint, name, target)
    wanted = {block.key for region in regions for block in region.blocks}
    done = _noted(notes)
    keys = [key for key in checkpoint.source if key in wanted and key not in done]
    unsound = {key for key, is_unsound in done.items() if is_unsound}
    _fill(notes, checkpoint, regions, keys, unsound, workers)
    for file in target.tokenizer:
        shutil.copyfile(file, content / file.name)
    _sync([*content.rglob("*"), content])
    if path.exists():
        path.rmdir()
    (notes / _PLAN).unlink()  # from here on there is nothing to go on with
    content.rename(path)
    files.sync(path.parent)
    _remove(growing)
    # One step stands for all parameters that are stored in one.
    left = {_kind(key) for key in checkpoint.source} - {_kind(key) for key in wanted}
    return WriteResult(
        sorted(left - {"model"}), [key for key in checkpoint.source if key in unsound]
    )


def _kind(key: str) -> str:
    """optimizer.exp_avg of optimizer.exp_avg.model.norm.weight."""
    return ".".join(key.split(".")[: 2 if key.startswith("optimizer.") else 1])


def _planned(
    content: Path, notes: Path, checkpoint: Checkpoint, name: str, target: Target
) -> list[Extent]:
    """Lay the files out, or find them as an earlier process has left them."""
    told = [repr(each) for each in (target, checkpoint.notes, checkpoint.progress)]
    shape = checkpoint.architecture.model_dump(mode="json")
    digest = files.digest([__version__, name, *told, shape, _identity(checkpoint)])
    plan = notes / _PLAN
    if plan.is_file() and content.is_dir():
        known = files.read_json(plan, "")
        if known["digest"] == digest:
            return [_region(content, each) for each in known["regions"]]
    if content.parent.exists():
        _remove(content.parent)
    content.mkdir(parents=True)
    notes.mkdir()
    inside = content
    if load_format(name).IN_ROOT:
        step = checkpoint.progress.iteration
        inside = content / f"global_step{step}"
        inside.mkdir()
        files.write_text(content / "latest_checkpointed_iteration.txt", f"{step}")
        files.write_text(content / "latest", inside.name)
    regions = load_format(name).lay_out(inside, checkpoint, target)
    _refuse_small_disk(content, regions)
    files.write_text(notes / _DONE, "")
    described = [_described(content, region) for region in regions]
    _sync([*content.rglob("*"), content])  # the plan vouches for what is laid out
    files.write_text(plan, json.dumps({"digest": digest, "regions": described}))
    return regions


def _refuse_small_disk(content: Path, regions: list[Extent]) -> None:
    """See that there is room for what is laid out with holes.

    Raises:
        UserError: there is not.
    """
    wanted = sum(region.num_bytes for region in regions)
    if wanted > (free := shutil.disk_usage(content).free):
        raise UserError(
            f"{content.parent.parent}: {wanted:,} bytes are wanted there and {free:,} are free; "
            "make room, or name a folder on another disk"
        )


def _identity(checkpoint: Checkpoint) -> Any:
    """What tells a checkpoint's files from others, without reading them."""
    found = {str(region.file) for region in checkpoint.source.regions}
    states = ((file, Path(file).stat()) for file in sorted(found))
    return [[file, state.st_size, state.st_mtime_ns] for file, state in states]


def _described(content: Path, region: Extent) -> list[Any]:
    blocks = [
        [
            block.key,
            [[at.start, at.stop] for at in block.place],
            block.start,
            block.stride,
            block.is_mean,
        ]
        for block in region.blocks
    ]
    where = str(region.file.relative_to(content))
    return [where, region.name, region.offset, region.shape, region.dtype.name, blocks]


def _region(content: Path, described: list[Any]) -> Extent:
    where, name, offset, shape, dtype, blocks = described
    found = (
        Chunk(
            key,
            tuple(slice(*at) for at in place),
            start,
            None if stride is None else tuple(stride),
            is_mean,
        )
        for key, place, start, stride, is_mean in blocks
    )
    kind = dtypes.named(dtype)
    assert kind is not None, "the plan is of the same version"
    return Extent(content / where, name, offset, tuple(shape), kind, (*found,))


def _fill(
    notes: Path,
    checkpoint: Checkpoint,
    regions: list[Extent],
    keys: list[str],
    unsound: set[str],
    workers: int,
) -> None:
    """Fill and seal the files; meanwhile what is done goes to disk, and is noted."""
    source, waiting, size = checkpoint.source, list[str](), 0
    files_of: dict[str, set[Path]] = defaultdict(set)
    for region in regions:
        for block in region.blocks:
            files_of[block.key].add(region.file)
    moved = fill(regions, source, keys=keys, workers=workers, unsound=unsound)
    with ThreadPoolExecutor(1) as pool:
        noted = []
        label = f"writing {notes.parent.name}"
        for key in progress(moved, label=label, total=len(keys)):
            waiting.append(key)
            size += math.prod(source.shapes[key]) * source.dtype(key).itemsize
            if size >= _NOTED_BYTES:
                written = {file for each in waiting for file in files_of[each]}
                found = {key: key in unsound for key in waiting}
                noted.append(pool.submit(_note, notes, found, sorted(written)))
                waiting, size = [], 0
        every = sorted({region.file for region in regions})
        rest = pool.submit(_sync, every)
        _seal(every, workers)
        for each in (*noted, rest):
            each.result()


def _seal(every: list[Path], workers: int) -> None:
    """Give files of torch.save their checksums."""
    folders = {file.parent for file in every if file.suffix == dcp_metadata.SUFFIX}
    parts = {file: some for each in folders for file, some in dcp_metadata.archives(each).items()}
    for file in every:
        if file.suffix in (".pt", dcp_metadata.SUFFIX):
            torch_archive.seal(file, archives=parts.get(file), workers=workers)


def _note(notes: Path, found: dict[str, bool], written: list[Path]) -> None:
    """Note tensors, which are brought to disk first, and whether they are unsound."""
    _sync(written)
    with (notes / _DONE).open("a") as stream:
        stream.writelines(f"{_UNSOUND * bad}{key}\n" for key, bad in found.items())
        stream.flush()
        os.fsync(stream.fileno())


def _noted(notes: Path) -> dict[str, bool]:
    """Tensors that are done, and whether they are unsound; a line that was cut off says nothing."""
    text = (notes / _DONE).read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return {line.removeprefix(_UNSOUND): line.startswith(_UNSOUND) for line in lines}


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        files.sync(path)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)
