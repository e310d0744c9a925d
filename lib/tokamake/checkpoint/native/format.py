"""Format `native`: tokamake's own checkpoint, which is torch's distributed checkpoint (DCP).

Its files are concatenated archives of torch.save; each archive holds one chunk of a tensor.
`.metadata` says which. Where the data begins in an archive is parsed once for all archives that
begin with the same bytes.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

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
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor, whole_slices
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.errors import UserError

TITLE = "tokamake (torch distributed checkpoint)"
SUMMARY = "tokamake's own, for any number of ranks; with all optimizer states"
PRIORITY = 50
SIZES: Mapping[str, int | None] = {}
EQUAL_STAGES = False
DTYPE: str | None = None
TOKENIZER_CONFIG: str | None = None
IN_ROOT = True
STEP_FOLDER: str | None = r"global_step(\d+)"
POINTER: str | None = "latest"
NUMBERED_FOLDER: str | None = None
NEAR_MISSES: Mapping[tuple[str, ...], str] = {}

_REMEDY = "name another checkpoint"
_WEIGHTS, _STATES = "model.", "optimizer."
_NOTES = ("world_size", "optimizer", OPTIMIZER_SETTINGS, "loss_scale", "eos_token_id")
"""Fields of the description that are notes of the open checkpoint."""
_OPTIMIZER_NOTES = ("optimizer", OPTIMIZER_SETTINGS)
_ALIGNMENT = 64
"""Each archive begins at a multiple of it, in bytes, as its data does within the archive."""
_NO_RANKS = 0
"""World size of a converted checkpoint: no number of ranks finds its own rank state in it."""


def list_files(path: Path) -> list[Path]:
    return pointed_files(path, POINTER)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint. Only the beginnings of archives are read.

    Raises:
        UserError: it is missing, or damaged as far as names, sizes and beginnings show.
    """
    architecture, iteration = read_model(folder)
    description, tensors = read_description(folder), dcp_metadata.read(folder)
    # Chunks of rank states count, too: a file may be truncated after the last weight.
    dcp_metadata.check_files(folder, tensors)
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith((_WEIGHTS, _STATES))}
    return Checkpoint(
        format="native",
        path=folder,
        architecture=architecture,
        source=TensorSource(
            _extents(folder, kept), {key: tensor.size for key, tensor in kept.items()}
        ),
        progress=Progress(
            iteration, description.get("consumed_samples", 0), description.get("consumed_tokens", 0)
        ),
        notes={key: description[key] for key in _NOTES if description.get(key) is not None},
    )


class _ArchivedChunk(NamedTuple):
    """A chunk of a tensor, and the archive that holds it."""

    key: str
    chunk: StoredChunk
    location: StorageLocation


class _ArchiveLayout(NamedTuple):
    """Position of a tensor in an archive of torch.save."""

    head: bytes
    """All bytes before the data."""
    num_elements: int
    dtype: Dtype
    start: int
    """First element of the tensor in the data."""
    stride: tuple[int, ...]


def _extents(folder: Path, tensors: Mapping[str, WholeTensor]) -> Iterator[Extent]:
    """Locate the chunks of tensors, without those that are in no file."""
    parts: dict[str, list[_ArchivedChunk]] = defaultdict(list)
    for key, tensor in tensors.items():
        for chunk in tensor.chunks:
            if chunk.location:
                parts[chunk.location.file].append(_ArchivedChunk(key, chunk, chunk.location))
    layouts: dict[Any, _ArchiveLayout] = {}
    for name, parts_of_file in sorted(parts.items()):
        parts_of_file.sort(key=lambda part: part.location.offset)
        yield from _read_file(folder / name, parts_of_file, layouts=layouts)


def _read_file(
    file: Path, parts: Iterable[_ArchivedChunk], *, layouts: dict[Any, _ArchiveLayout]
) -> Iterator[Extent]:
    """Locate chunks in a file; layouts of archives are read from `layouts` and added to it."""
    with file.open("rb") as stream:
        for part in parts:
            _, start, length = part.location
            layout = layouts.get(cache_key := (length, part.chunk.size))
            stream.seek(start)
            # The head holds the archive's format, and the tensor's shape, strides and dtype. So an
            # archive with the same head has the same layout, and parsing it again is needless.
            if layout is None or stream.read(len(layout.head)) != layout.head:
                layout = layouts[cache_key] = _parse_archive(file, stream, part=part)
            yield _extent(file, part, layout=layout)


def _parse_archive(file: Path, stream: IO[bytes], *, part: _ArchivedChunk) -> _ArchiveLayout:
    """Parse an archive.

    Raises:
        UserError: it is damaged, or its tensor has another size than `.metadata` says.
    """
    key, chunk, (_, start, length) = part
    try:
        tensor = pickle_reader.parse(pickle_reader.View(stream, start, length=length))
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{file}: damaged at {key} ({reason}); {_REMEDY}") from None
    if not isinstance(tensor, pickle_reader.PickledTensor) or tensor.shape != chunk.size:
        raise UserError(f"{file}: damaged at {key}, not of the size {chunk.size}; {_REMEDY}")
    if tensor.end > length:
        raise UserError(f"{file}: damaged at {key}, which is truncated; {_REMEDY}")
    begin, itemsize = tensor.begin, tensor.dtype.itemsize
    first, num_elements = ((at - begin) // itemsize for at in (tensor.offset, tensor.end))
    stream.seek(start)
    return _ArchiveLayout(stream.read(begin), num_elements, tensor.dtype, first, tensor.stride)


def _extent(file: Path, part: _ArchivedChunk, *, layout: _ArchiveLayout) -> Extent:
    pairs = zip(part.chunk.offset, part.chunk.size, strict=True)
    slices = tuple(slice(first, first + size) for first, size in pairs)
    chunk = Chunk(part.key, slices, layout.start, layout.stride)
    begin = part.location.offset + len(layout.head)
    return Extent(file, part.key, begin, (layout.num_elements,), layout.dtype, (chunk,))


def archives(files: Iterable[Path]) -> dict[Path, list[tuple[int, int]]]:
    """Return first byte and length of the archives in each file."""
    all_archives: dict[Path, list[tuple[int, int]]] = {}
    for folder in {file.parent for file in files}:
        all_archives |= dcp_metadata.archives(folder)
    return all_archives


def warnings(checkpoint: Checkpoint) -> list[str]:
    """Return no warnings: the format holds each checkpoint."""
    return []


class _ArchiveFrame(NamedTuple):
    """Bytes that torch.save writes around the data of a tensor."""

    head: bytes
    data_bytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.data_bytes + len(self.tail)


class _PlannedArchive(NamedTuple):
    """A whole tensor to be written."""

    key: str
    source_key: str
    """Key of the source's tensor."""
    shape: tuple[int, ...]
    dtype: Dtype
    frame: _ArchiveFrame
    location: StorageLocation


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write a checkpoint with holes in place of the tensors: weights, and all optimizer states.

    It has no rank states: a run that continues from it seeds its random generators again.

    Args:
        folder: where to write; exists and is empty.
        checkpoint: the source.
        target: dtype of weights, and maximum size of a file.

    Returns:
        Where the tensors go.
    """
    files.write_json(folder / DESCRIPTION, _description(checkpoint))
    archives = [*_plan(folder, checkpoint.source, target=target)]
    dcp_metadata.write(folder, {archive.key: _whole_tensor(archive) for archive in archives})
    return [_write_frame(folder, archive) for archive in archives]


def _description(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "version": VERSION,
        "world_size": _NO_RANKS,
        **vars(checkpoint.progress),
        "architecture": checkpoint.architecture.model_dump(mode="json"),
        **{key: checkpoint.notes[key] for key in _OPTIMIZER_NOTES if key in checkpoint.notes},
        "loss_scale": checkpoint.notes.get("loss_scale", (1.0, 0)),
        "eos_token_id": checkpoint.notes.get("eos_token_id"),
    }


def _plan(folder: Path, source: TensorSource, *, target: Target) -> Iterator[_PlannedArchive]:
    """Place tensors, in the source's order, in files of at most `max_shard_bytes`."""
    frame_of = functools.cache(functools.partial(_frame, folder))
    file_number = end = 0
    for key, shape in source.shapes.items():
        if not key.startswith((_WEIGHTS, _STATES)):
            continue
        # Native weights are master weights, if the source has them.
        master = f"master.{key.removeprefix(_WEIGHTS)}"
        source_key = master if key.startswith(_WEIGHTS) and master in source else key
        dtype = source.dtype(source_key)
        if target.dtype and key.startswith(_WEIGHTS):
            dtype = dtypes.OF_WEIGHTS[target.dtype]
        frame = frame_of(shape, dtype)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if start and start + frame.length > target.max_shard_bytes:
            file_number, start = file_number + 1, 0
        end = start + frame.length
        # DCP names files by the rank that writes them, and a count.
        location = StorageLocation(f"__0_{file_number}{dcp_metadata.SUFFIX}", start, frame.length)
        yield _PlannedArchive(key, source_key, shape, dtype, frame, location)


def _frame(folder: Path, shape: tuple[int, ...], dtype: Dtype) -> _ArchiveFrame:
    file = folder / "archive"
    (extent,) = torch_archive.lay_out(file, PlannedTensor(shape, dtype, ()))
    with file.open("rb") as stream:
        head = stream.read(extent.offset)
        stream.seek(extent.num_bytes, os.SEEK_CUR)
        tail = stream.read()
    file.unlink()
    return _ArchiveFrame(head, extent.num_bytes, tail)


def _whole_tensor(archive: _PlannedArchive) -> WholeTensor:
    chunk = StoredChunk((0,) * len(archive.shape), archive.shape, archive.location)
    return WholeTensor(archive.shape, archive.dtype, (chunk,))


def _write_frame(folder: Path, archive: _PlannedArchive) -> Extent:
    """Write an archive with a hole in place of its data."""
    file, start = folder / archive.location.file, archive.location.offset
    with file.open("r+b" if start else "wb") as stream:
        stream.seek(start)
        stream.write(archive.frame.head)
        data_start = stream.tell()
        stream.seek(archive.frame.data_bytes, os.SEEK_CUR)
        stream.write(archive.frame.tail)
    chunk = Chunk(archive.source_key, whole_slices(archive.shape))
    return Extent(file, archive.key, data_start, archive.shape, archive.dtype, (chunk,))


if TYPE_CHECKING:
    from tokamake.checkpoint.native import format as this_module

    _: CheckpointFormat = this_module
