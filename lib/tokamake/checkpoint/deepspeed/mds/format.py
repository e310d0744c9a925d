"""Megatron-DeepSpeed's checkpoint without pipelining: a file a tensor-parallel rank.

global_step<N>/mp_rank_<T>_model_states.pt has that rank's weights in `module`.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed import zero_reader as zero_shards
from tokamake.checkpoint.deepspeed.folder import states
from tokamake.checkpoint.deepspeed.zero_writer import Partitions
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import pointed_files
from tokamake.checkpoint.megatron_model import module as megatron_module
from tokamake.checkpoint.megatron_model.arguments import (
    architecture_of,
    check_sizes,
    is_padding_unknown,
    notes_of,
    progress_of,
    version_of,
)
from tokamake.checkpoint.megatron_model.rank_tensors import Rank, TensorSlice, padded
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout, Target
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.parallel.axis import Axis

TITLE = "Megatron-DeepSpeed, without pipeline"
PRIORITY = 20
SIZES: tuple[str, ...] = ("tensor_parallel_size", "data_parallel_size", "zero_stage")
IN_ROOT = True


def find(path: Path) -> Path | None:
    """Folder of the checkpoint, if it is one."""
    folder = deepspeed_folder.find(path)
    return None if folder is None or any(folder.glob("layer_*-model_*")) else folder


def list_files(path: Path) -> list[Path]:
    return pointed_files(path, "latest")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint that `find` has found.

    Raises:
        UserError: a file is missing or damaged, or the model is none that we have.
    """
    size = deepspeed_folder.ranks(folder)
    files = [states(folder, number) for number in range(size)]
    first = deepspeed_folder.read(files[0])
    rows = deepspeed_folder.vocabulary_rows(files[0], first) * size
    args = deepspeed_folder.args_of(first)
    is_core = megatron_module.is_core(first.get("module"))
    architecture = architecture_of(args, files[0], padded_vocab_size=rows, is_core=is_core)
    check_sizes(args, folder, tensor=size, pipeline=1)
    layers = range(architecture.num_hidden_layers)
    regions, parts = list[Extent](), list[dict[str, TensorSlice]]()
    for number, file in enumerate(files):
        state = first if number == 0 else deepspeed_folder.read(file)
        deepspeed_folder.check_step(file, state, files[0], first)
        rank = Rank(architecture, Axis(number, size), rows, version_of(state, file, missing=3.0))
        tree = megatron_module.nested(rank, layers)
        if not deepspeed_folder.is_sliced(file):
            regions += megatron_module.found(file, state.get("module"), tree)
        parts.append(dict(megatron_module.named(tree)))
    shards = zero_shards.read(folder, parts, tensor_parallel_size=size, beside=regions)
    return Checkpoint(
        "mds",
        folder,
        architecture,
        shards.source(regions, megatron_module.shapes_of(architecture)),
        ParallelLayout(
            tensor_parallel_size=size,
            data_parallel_size=shards.data_parallel_size or deepspeed_folder.data_ranks(first),
            zero_stage=shards.zero_stage,
        ),
        progress_of(first, files[0]),
        rows,
        deepspeed_folder.unread(first, shards.zero_stage),
        notes_of(args) | shards.notes | deepspeed_folder.schedule_of(first),
        is_padding_unknown=is_padding_unknown(args, files[0], padded_vocab_size=rows),
    )


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target) -> list[Extent]:
    """Write the files without their tensors.

    Args:
        folder: to write, empty.
        checkpoint: whose description the files get.
        target: how many ranks, and the number format.

    Returns:
        Where the tensors are to go.

    Raises:
        UserError: Megatron cannot share such a model so, or DeepSpeed not its optimizer states.
    """
    size = target.layout.tensor_parallel_size
    rows = padded(checkpoint.architecture, target.make_vocab_size_divisible_by, size)
    layers = range(checkpoint.architecture.num_hidden_layers)
    regions: list[Extent] = []
    partitions = Partitions(checkpoint, target) if target.layout.zero_stage else None
    for number in range(size):
        rank = Rank(checkpoint.architecture, Axis(number, size), rows)
        tree = megatron_module.nested(rank, layers)
        module = megatron_module.planned(tree, checkpoint, target)
        if target.layout.zero_stage == 3:
            module = megatron_module.emptied(module)
        rest = deepspeed_folder.client_state(checkpoint, target.layout, rows)
        if partitions:
            parts = dict(megatron_module.named(tree))
            shapes, shards = partitions.lay_out(folder, number, parts)
            regions += shards
            rest |= shapes
        first, *others = deepspeed_folder.new_states(folder, number, target.layout)
        regions += torch_archive.lay_out(first, {"module": module, **rest})
        for other in others:  # which hold no elements either
            shutil.copyfile(first, other)
    return regions


if TYPE_CHECKING:
    from tokamake.checkpoint.deepspeed.mds import format as this_module

    _: CheckpointFormat = this_module
