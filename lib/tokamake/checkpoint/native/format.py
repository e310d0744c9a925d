"""Format `native`: tokamake's own checkpoint, which is torch's distributed checkpoint (DCP)."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import files
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.megatron_model.adam import master_key
from tokamake.checkpoint.megatron_model.optimizer_states import LR_SCHEDULER
from tokamake.checkpoint.model_tensors import WITHOUT_GRADIENT
from tokamake.checkpoint.native.folder import (
    DESCRIPTION,
    VERSION,
    check_files,
    read_description,
    read_model,
    seal,
)
from tokamake.checkpoint.native.folder import find as find
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import (
    EXPORT_NOTES,
    OPTIMIZER_SETTINGS,
    Checkpoint,
    Progress,
    Target,
)
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor, whole_slices
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import dcp_archives, dcp_metadata, dcp_metadata_writer
from tokamake.checkpoint.torch_files.dcp_archives import PlannedArchive

TITLE = "tokamake (torch distributed checkpoint)"
SUMMARY = "tokamake's own, for any number of ranks; with all optimizer states"
PRIORITY = 50
IN_ROOT = True
STEP_FOLDER = r"global_step(\d+)"
POINTER = "latest"

_WEIGHTS, _STATES = "model.", "optimizer."
_OPTIMIZER_NOTES = ("optimizer", OPTIMIZER_SETTINGS, LR_SCHEDULER)
_NOTES = ("world_size", *_OPTIMIZER_NOTES, "loss_scale", *EXPORT_NOTES)
"""Fields of the description that are notes of the open checkpoint."""
_NO_RANKS = 0
"""World size of a converted checkpoint: no number of ranks finds its own rank state in it."""


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint. Only the beginnings of archives are read."""
    architecture, iteration = read_model(folder)
    description, tensors = read_description(folder), dcp_metadata.read(folder)
    check_files(folder)  # rank states count, too: a file may be truncated after the last weight
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith((_WEIGHTS, _STATES))}
    return Checkpoint(
        format="native",
        path=folder,
        architecture=architecture,
        source=TensorSource(
            dcp_archives.locate(folder, kept), {key: tensor.size for key, tensor in kept.items()}
        ),
        progress=Progress(
            iteration, description.get("consumed_samples", 0), description.get("consumed_tokens", 0)
        ),
        notes={key: description[key] for key in _NOTES if description.get(key) is not None},
    )


def archives(files: Iterable[Path]) -> dict[Path, list[tuple[int, int]]]:
    """Return first byte and length of the archives in each file."""
    all_archives: dict[Path, list[tuple[int, int]]] = {}
    for folder in {file.parent for file in files}:
        all_archives |= dcp_metadata.archives(folder)
    return all_archives


def complete(folder: Path) -> None:
    seal(folder)


def warnings(checkpoint: Checkpoint) -> list[str]:
    """Return no warnings: the format holds each checkpoint."""
    return []


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write a checkpoint with holes in place of the tensors: weights, and all optimizer states.

    It has no rank states: a run that continues from it seeds its random generators again.
    """
    files.write_json(folder / DESCRIPTION, _description(checkpoint))
    planned = _plan(checkpoint.source, target=target)
    tensors, extents = dcp_archives.lay_out(folder, planned, max_shard_bytes=target.max_shard_bytes)
    dcp_metadata_writer.write(folder, tensors)
    return extents


def _description(checkpoint: Checkpoint) -> dict[str, Any]:
    written = (*_OPTIMIZER_NOTES, *EXPORT_NOTES)
    return {
        "version": VERSION,
        "world_size": _NO_RANKS,
        **vars(checkpoint.progress),
        "architecture": checkpoint.architecture.model_dump(mode="json"),
        **{key: checkpoint.notes[key] for key in written if key in checkpoint.notes},
        "loss_scale": checkpoint.notes.get("loss_scale", (1.0, 0)),
    }


def _plan(source: TensorSource, *, target: Target) -> Iterator[PlannedArchive]:
    for key, shape in source.shapes.items():
        if not key.startswith((_WEIGHTS, _STATES)):
            continue
        # Native weights are master weights, if the source has them.
        source_key = master_key(key, source) if key.startswith(_WEIGHTS) else key
        dtype = source.dtype(source_key)
        is_cast = key.startswith(_WEIGHTS) and not key.endswith(WITHOUT_GRADIENT)
        if target.dtype and is_cast:
            dtype = dtypes.OF_WEIGHTS[target.dtype]
        tensor = PlannedTensor(shape, dtype, (Chunk(source_key, whole_slices(shape)),))
        yield PlannedArchive(key, (0,) * len(shape), tensor)


if TYPE_CHECKING:
    from tokamake.checkpoint.native import format as this_module

    _: CheckpointFormat = this_module
