"""Megatron-DeepSpeed's checkpoint without pipeline parallelism: a file per tensor-parallel rank.

global_step<N>/mp_rank_<T>_model_states.pt holds the weights of rank T in `module`.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.zero_reader import read_states
from tokamake.checkpoint.deepspeed.zero_writer import PartitionWriter
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import pointed_files
from tokamake.checkpoint.megatron_model import module as megatron_module
from tokamake.checkpoint.megatron_model.arguments import (
    architecture_of,
    check_rank_counts,
    eos_note,
    is_padding_unknown,
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
    """Return the folder of the checkpoint, or None if it has another format."""
    folder = deepspeed_folder.find(path)
    return None if folder is None or any(folder.glob("layer_*-model_*")) else folder


def list_files(path: Path) -> list[Path]:
    return pointed_files(path, "latest")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint in a folder that `find` returned.

    Raises:
        UserError: a file is missing or damaged, or tokamake has no such model.
    """
    size = deepspeed_folder.count_ranks(folder)
    files = [deepspeed_folder.model_states_path(folder, rank) for rank in range(size)]
    first = deepspeed_folder.read(files[0])
    rows = deepspeed_folder.vocabulary_rows(files[0], first) * size
    args = deepspeed_folder.megatron_args(first)
    is_core = megatron_module.is_core(first.get("module"))
    architecture = architecture_of(args, files[0], padded_vocab_size=rows, is_core=is_core)
    check_rank_counts(args, folder, tensor=size, pipeline=1)
    layers = range(architecture.num_hidden_layers)
    weights, slices = list[Extent](), list[dict[str, TensorSlice]]()
    for number, file in enumerate(files):
        state = first if number == 0 else deepspeed_folder.read(file)
        deepspeed_folder.check_same_step(file, state, files[0], first)
        version = version_of(state, file, default=3.0)
        tree = megatron_module.stage_tree(
            Rank(architecture, Axis(number, size), rows, version), layers
        )
        if not deepspeed_folder.has_no_weights(file):
            weights += megatron_module.locate(file, state.get("module"), tree)
        slices.append(dict(megatron_module.named_slices(tree)))
    states = read_states(folder, slices, tensor_parallel_size=size, weights=weights)
    return Checkpoint(
        "mds",
        folder,
        architecture,
        states.source(weights, megatron_module.weight_shapes(architecture)),
        ParallelLayout(
            tensor_parallel_size=size,
            data_parallel_size=(
                states.data_parallel_size or deepspeed_folder.data_parallel_size(first)
            ),
            zero_stage=states.zero_stage,
        ),
        progress_of(first, files[0]),
        rows,
        deepspeed_folder.unread_states(first, states.zero_stage),
        eos_note(args) | states.notes | deepspeed_folder.scheduler_note(first),
        is_padding_unknown=is_padding_unknown(args, files[0], padded_vocab_size=rows),
    )


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target) -> list[Extent]:
    """Write the files without the data of their tensors.

    Args:
        folder: empty folder to write to.
        checkpoint: checkpoint to write.
        target: number of ranks and dtype.

    Returns:
        The extents to fill.

    Raises:
        UserError: Megatron cannot divide the model among the ranks, or DeepSpeed cannot resume
            from the optimizer states.
    """
    layout = target.layout
    size, architecture = layout.tensor_parallel_size, checkpoint.architecture
    rows = padded(architecture, target.make_vocab_size_divisible_by, size)
    extents: list[Extent] = []
    partitions = PartitionWriter(checkpoint, target) if layout.zero_stage else None
    for number in range(size):
        rank = Rank(architecture, Axis(number, size), rows)
        tree = megatron_module.stage_tree(rank, range(architecture.num_hidden_layers))
        module = megatron_module.planned_tree(tree, checkpoint, target)
        if layout.zero_stage == 3:
            module = megatron_module.without_elements(module)
        content = {"module": module, **deepspeed_folder.client_state(checkpoint, layout, rows)}
        if partitions:
            slices = dict(megatron_module.named_slices(tree))
            shapes, partition_extents = partitions.lay_out(folder, number, slices)
            extents += partition_extents
            content |= shapes
        first, *copies = deepspeed_folder.new_model_states_paths(folder, number, layout)
        extents += torch_archive.lay_out(first, content)
        # Only ZeRO 3 has several files. They hold no elements, so the contents are final.
        for path in copies:
            shutil.copyfile(first, path)
    return extents


if TYPE_CHECKING:
    from tokamake.checkpoint.deepspeed.mds import format as this_module

    _: CheckpointFormat = this_module
