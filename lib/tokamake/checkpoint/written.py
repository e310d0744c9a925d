"""Writes a checkpoint in a format: files are laid out, filled, sealed, and renamed last.

What is done already is noted beside the files that grow, on disk, so that the same conversion goes
on where it was cut off.
"""

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
from typing import Any

from tokamake import __version__, files, plugins
from tokamake.checkpoint import dtypes
from tokamake.checkpoint.any_format import FOLDER
from tokamake.checkpoint.files import torch_files
from tokamake.checkpoint.moving import fill
from tokamake.checkpoint.opened import Opened, Target
from tokamake.checkpoint.regions import Block, Region
from tokamake.errors import UserError
from tokamake.runtime import progress

_PLAN, _DONE = "plan.json", "done.txt"
_NOTED_BYTES = 2**27
"""Size of tensors that are brought to disk, and noted as done, at once."""


def write(path: Path, checkpoint: Opened, name: str, target: Target) -> list[str]:
    """Write a checkpoint, whole or not at all.

    Args:
        path: folder to make.
        checkpoint: what to write.
        name: of the format's plug-in.
        target: layout and number format.

    Returns:
        Kinds of tensors that the format does not hold, and which were left.

    Raises:
        UserError: something is in the way, or the format cannot hold the model so.
    """
    _refuse_other(path)
    whole = path.absolute()
    growing = whole.with_name(f".{whole.name}.converting")
    with _alone(growing, path):
        _refuse_other(path)  # which another conversion may have made meanwhile
        return _write(whole, growing, checkpoint, name, target)


def _refuse_other(path: Path) -> None:
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
    with lock.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path}: another conversion writes it; wait for its end") from None
        except OSError:
            pass  # Some parallel file systems are mounted without locks.
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _write(path: Path, growing: Path, checkpoint: Opened, name: str, target: Target) -> list[str]:
    content, notes = growing / "content", growing / "notes"
    regions = _planned(content, notes, checkpoint, name, target)
    wanted = {block.key for region in regions for block in region.blocks}
    done = {*(notes / _DONE).read_text().split()}
    keys = [key for key in checkpoint.source if key in wanted and key not in done]
    _fill(notes, checkpoint, regions, keys)
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
    return sorted(left - {"model"})


def _kind(key: str) -> str:
    """optimizer.exp_avg of optimizer.exp_avg.model.norm.weight."""
    return ".".join(key.split(".")[: 2 if key.startswith("optimizer.") else 1])


def _planned(
    content: Path, notes: Path, checkpoint: Opened, name: str, target: Target
) -> list[Region]:
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
    if plugins.constant(FOLDER, name, "IN_ROOT"):
        step = checkpoint.progress.iteration
        inside = content / f"global_step{step}"
        inside.mkdir()
        files.write_text(content / "latest_checkpointed_iteration.txt", f"{step}")
        files.write_text(content / "latest", inside.name)
    try:
        regions: list[Region] = plugins.load(FOLDER, name).lay_out(inside, checkpoint, target)
    except UserError:
        _remove(content.parent)
        raise
    _refuse_small_disk(content, regions)
    files.write_text(notes / _DONE, "")
    described = [_described(content, region) for region in regions]
    _sync([*content.rglob("*"), content])  # the plan vouches for what is laid out
    files.write_text(plan, json.dumps({"digest": digest, "regions": described}))
    return regions


def _refuse_small_disk(content: Path, regions: list[Region]) -> None:
    """See that there is room for what is laid out with holes.

    Raises:
        UserError: there is not; nothing is left then.
    """
    wanted = sum(region.num_bytes for region in regions)
    if wanted > (free := shutil.disk_usage(content).free):
        _remove(content.parent)
        raise UserError(
            f"{content.parent.parent}: {wanted:,} bytes are wanted there and {free:,} are free; "
            "make room, or name a folder on another disk"
        )


def _identity(checkpoint: Opened) -> Any:
    """What tells a checkpoint's files from others, without reading them."""
    found = {str(region.file) for region in checkpoint.source.regions}
    states = ((file, Path(file).stat()) for file in sorted(found))
    return [[file, state.st_size, state.st_mtime_ns] for file, state in states]


def _described(content: Path, region: Region) -> list[Any]:
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


def _region(content: Path, described: list[Any]) -> Region:
    where, name, offset, shape, dtype, blocks = described
    found = (
        Block(
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
    return Region(content / where, name, offset, tuple(shape), kind, (*found,))


def _fill(notes: Path, checkpoint: Opened, regions: list[Region], keys: list[str]) -> None:
    """Fill and seal the files; meanwhile what is done goes to disk, and is noted."""
    source, waiting, size = checkpoint.source, list[str](), 0
    files_of: dict[str, set[Path]] = defaultdict(set)
    for region in regions:
        for block in region.blocks:
            files_of[block.key].add(region.file)
    moved = fill(regions, source, keys=keys)
    with ThreadPoolExecutor(1) as pool:
        noted = []
        label = f"writing {notes.parent.name}"
        for key in progress(moved, label=label, total=len(keys)):
            waiting.append(key)
            size += math.prod(source.shapes[key]) * source.dtype(key).itemsize
            if size >= _NOTED_BYTES:
                written = {file for each in waiting for file in files_of[each]}
                noted.append(pool.submit(_note, notes, waiting, sorted(written)))
                waiting, size = [], 0
        every = sorted({region.file for region in regions})
        rest = pool.submit(_sync, every)
        for file in every:
            if file.suffix == ".pt":
                torch_files.seal(file)
        for each in (*noted, rest):
            each.result()


def _note(notes: Path, keys: list[str], written: list[Path]) -> None:
    _sync(written)
    with (notes / _DONE).open("a") as stream:
        stream.writelines(f"{key}\n" for key in keys)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        files.sync(path)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)
