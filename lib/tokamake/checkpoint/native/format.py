"""tokamake's own checkpoints, which are torch's distributed ones (DCP): see `checkpoint.native`.

Their files are little archives of torch.save, one after the other, a box of a tensor in each;
`.metadata` says which. Where data begins in an archive is learnt once for all that begin alike.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake import files
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import pointed_files
from tokamake.checkpoint.native import dcp_metadata
from tokamake.checkpoint.native.dcp_metadata import StorageLocation, StoredChunk, WholeTensor
from tokamake.checkpoint.native.folder import DESCRIPTION, VERSION, read_description, read_model
from tokamake.checkpoint.native.folder import find as find
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint, Progress, Target
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor, TensorSource
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.errors import UserError

TITLE = "tokamake (torch distributed checkpoint)"
PRIORITY = 50
SIZES: tuple[str, ...] = ()
IN_ROOT = True

_REMEDY = "name another checkpoint"
_WEIGHTS, _STATES = "model.", "optimizer."
_NOTES = ("world_size", "optimizer", OPTIMIZER_SETTINGS, "loss_scale", "eos_token_id")
"""What a checkpoint says of itself besides."""
_OPTIMIZER = ("optimizer", OPTIMIZER_SETTINGS)
"""What there is of these goes along."""
_ALIGNMENT = 64
"""Bytes of which the begin of each archive is a multiple, as that of data within it is."""
_NO_RANKS = 0
"""World size of what no ranks have saved, so that none looks for what it alone would know."""


def list_files(path: Path) -> list[Path]:
    return pointed_files(path, "latest")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint; of its files, only the beginnings of archives are read.

    Raises:
        UserError: it is missing, or damaged as far as that can be seen.
    """
    architecture, iteration = read_model(path)
    described, known = read_description(path), dcp_metadata.read(path)
    kept = (_WEIGHTS, _STATES)
    whole = {key: tensor for key, tensor in known.items() if key.startswith(kept)}
    _check_files(path, [box.place for tensor in known.values() for box in tensor.boxes])
    shapes = {key: tensor.size for key, tensor in whole.items()}
    progress = Progress(
        iteration, described.get("consumed_samples", 0), described.get("consumed_tokens", 0)
    )
    return Checkpoint(
        format="native",
        path=path,
        architecture=architecture,
        source=TensorSource(_regions(path, whole), shapes),
        progress=progress,
        notes={key: described[key] for key in _NOTES if described.get(key) is not None},
    )


class _Stored(NamedTuple):
    """A box of a tensor in a file."""

    key: str
    box: StoredChunk
    place: StorageLocation


class _Archive(NamedTuple):
    """How torch.save has written a tensor."""

    head: bytes
    """All that goes before its data."""
    elements: int
    """Of the data."""
    dtype: Dtype
    start: int
    """Element that the tensor begins with."""
    stride: tuple[int, ...]


def _check_files(folder: Path, archives: Iterable[StorageLocation | None]) -> None:
    """See that all files are as long as what they shall hold, also for ranks alone.

    Raises:
        UserError: one is not.
    """
    ends: dict[str, int] = defaultdict(int)
    for place in archives:
        if place:
            ends[place.file] = max(ends[place.file], place.offset + place.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: no such file; {_REMEDY}")
        if (size := file.stat().st_size) < end:
            raise UserError(f"{file}: damaged: has {size:,} of {end:,} bytes; {_REMEDY}")


def _regions(folder: Path, whole: Mapping[str, WholeTensor]) -> Iterator[Extent]:
    """Where the boxes of whole tensors lie; those that no file has are left out."""
    stored: dict[str, list[_Stored]] = defaultdict(list)
    for key, tensor in whole.items():
        for box in tensor.boxes:
            if box.place:
                stored[box.place.file].append(_Stored(key, box, box.place))
    known: dict[Any, _Archive] = {}
    for name, some in sorted(stored.items()):
        some.sort(key=lambda one: one.place.offset)
        yield from _in_file(folder / name, some, known)


def _in_file(file: Path, some: Iterable[_Stored], known: dict[Any, _Archive]) -> Iterator[Extent]:
    """Where boxes lie in a file; archives that are met first are added to those that are known."""
    with file.open("rb") as stream:
        for one in some:
            _, start, length = one.place
            archive = known.get(alike := (length, one.box.size))
            stream.seek(start)
            # What begins alike is alike: the beginning says format, shape, strides and dtype.
            if archive is None or stream.read(len(archive.head)) != archive.head:
                archive = known[alike] = _archive(file, stream, one)
            yield _region(file, one, archive)


def _archive(file: Path, stream: Any, one: _Stored) -> _Archive:
    """Learn how a box is stored.

    Raises:
        UserError: it is not of the size that `.metadata` tells, or damaged.
    """
    _, start, length = one.place
    try:
        tensor = pickle_reader.parse(pickle_reader.View(stream, start, length))
    # What a damaged pickle asks for can fail in any way.
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{file}: damaged at {one.key} ({reason}); {_REMEDY}") from None
    if not isinstance(tensor, pickle_reader.Located) or tensor.shape != one.box.size:
        raise UserError(f"{file}: damaged at {one.key}, not of the size {one.box.size}; {_REMEDY}")
    begin, size = tensor.begin, tensor.dtype.itemsize
    if tensor.end > length:
        raise UserError(f"{file}: damaged at {one.key}, which is not whole; {_REMEDY}")
    first, elements = (at // size for at in (tensor.offset - begin, tensor.end - begin))
    stream.seek(start)
    return _Archive(stream.read(begin), elements, tensor.dtype, first, tensor.stride)


def _region(file: Path, one: _Stored, archive: _Archive) -> Extent:
    pairs = zip(one.box.offset, one.box.size, strict=True)
    place = tuple(slice(at, at + n) for at, n in pairs)
    block = Chunk(one.key, place, archive.start, archive.stride)
    begin = one.place.offset + len(archive.head)
    return Extent(file, one.key, begin, (archive.elements,), archive.dtype, (block,))


class _Skeleton(NamedTuple):
    """What torch.save writes for a tensor, but for its data."""

    head: bytes
    num_bytes: int
    """Of the data."""
    tail: bytes

    @property
    def length(self) -> int:
        """Bytes of the archive."""
        return len(self.head) + self.num_bytes + len(self.tail)


class _Planned(NamedTuple):
    """A whole tensor that a file shall hold."""

    key: str
    wanted: str
    """Key of the source's tensor."""
    shape: tuple[int, ...]
    dtype: Dtype
    skeleton: _Skeleton
    place: StorageLocation


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target) -> list[Extent]:
    """Write a checkpoint whose data are holes yet: weights, and optimizer states if there are some.

    It is one that no ranks have saved: random generators begin anew where it is continued.

    Args:
        folder: where its files go; there, without any of them.
        checkpoint: what it is of.
        target: number format of weights, and size of files.

    Returns:
        Where its tensors are to go.
    """
    files.write_json(folder / DESCRIPTION, _description(checkpoint))
    planned = [*_plan(folder, checkpoint.source, target)]
    dcp_metadata.write(folder, {one.key: _whole(one) for one in planned})
    return [_write(folder, one) for one in planned]


def _description(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "version": VERSION,
        "world_size": _NO_RANKS,
        **vars(checkpoint.progress),
        "architecture": checkpoint.architecture.model_dump(mode="json"),
        **{key: checkpoint.notes[key] for key in _OPTIMIZER if key in checkpoint.notes},
        "loss_scale": checkpoint.notes.get("loss_scale", (1.0, 0)),
        "eos_token_id": checkpoint.notes.get("eos_token_id"),
    }


def _plan(folder: Path, source: TensorSource, target: Target) -> Iterator[_Planned]:
    """Tensors in the source's order, in files that are full at some size."""
    skeleton = functools.cache(functools.partial(_skeleton, folder))
    number = end = 0
    for key, shape in source.shapes.items():
        if not key.startswith((_WEIGHTS, _STATES)):
            continue
        # Weights from before they were rounded, if those are there.
        master = f"master.{key.removeprefix(_WEIGHTS)}"
        wanted = master if key.startswith(_WEIGHTS) and master in source else key
        dtype = source.dtype(wanted)
        if target.dtype and key.startswith(_WEIGHTS):
            dtype = dtypes.OF_WEIGHTS[target.dtype]
        made = skeleton(shape, dtype)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if start and start + made.length > target.max_shard_bytes:
            number, start = number + 1, 0
        end = start + made.length
        # DCP calls them by the rank that writes them, and count.
        place = StorageLocation(f"__0_{number}.distcp", start, made.length)
        yield _Planned(key, wanted, shape, dtype, made, place)


def _skeleton(folder: Path, shape: tuple[int, ...], dtype: Dtype) -> _Skeleton:
    file = folder / "archive"
    (region,) = torch_archive.lay_out(file, PlannedTensor(shape, dtype, ()))
    with file.open("rb") as stream:
        head = stream.read(region.offset)
        stream.seek(region.num_bytes, os.SEEK_CUR)
        tail = stream.read()
    file.unlink()
    return _Skeleton(head, region.num_bytes, tail)


def _whole(one: _Planned) -> WholeTensor:
    return WholeTensor(
        one.shape, one.dtype, (StoredChunk((0,) * len(one.shape), one.shape, one.place),)
    )


def _write(folder: Path, one: _Planned) -> Extent:
    """Write an archive but for its data."""
    file, start = folder / one.place.file, one.place.offset
    with file.open("r+b" if start else "wb") as stream:
        stream.seek(start)
        stream.write(one.skeleton.head)
        begin = stream.tell()
        stream.seek(one.skeleton.num_bytes, os.SEEK_CUR)
        stream.write(one.skeleton.tail)
    place = tuple(slice(0, size) for size in one.shape)
    return Extent(file, one.key, begin, one.shape, one.dtype, (Chunk(one.wanted, place),))


if TYPE_CHECKING:
    from tokamake.checkpoint.native import format as this_module

    _: CheckpointFormat = this_module
