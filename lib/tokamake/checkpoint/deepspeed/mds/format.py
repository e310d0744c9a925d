"""Megatron-DeepSpeed's checkpoint without pipeline parallelism: a file per tensor-parallel rank.

global_step<N>/mp_rank_<T>_model_states.pt holds the weights of rank T in `module`.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.checkpoint.deepspeed import experts
from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.zero_reader import read_states
from tokamake.checkpoint.deepspeed.zero_writer import PartitionWriter
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.megatron_model import module_tree, rank_file
from tokamake.checkpoint.megatron_model.args_reader import Description, check_rank_counts
from tokamake.checkpoint.megatron_model.optimizer_states import OptimizerStates
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    TensorSlice,
    target_ranks,
)
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.torch_archive import archives as archives
from tokamake.parallel.axis import Axis

TITLE = "Megatron-DeepSpeed, without pipeline"
SUMMARY = (
    "Megatron-DeepSpeed without pipeline; with optimizer states of Adam if --zero-stage is set"
)
PRIORITY = 20
SIZES = {
    "tensor_parallel_size": None,
    "data_parallel_size": None,
    "zero_stage": 3,
}
IN_ROOT = True
STEP_FOLDER = r"global_step(\d+)"
POINTER = "latest"


def find(path: Path) -> Path | None:
    """Return the folder of the checkpoint, or None if it has another format."""
    folder = deepspeed_folder.find(path)
    return None if folder is None or any(folder.glob("layer_*-model_*")) else folder


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint in a folder that `find` returned."""
    size = deepspeed_folder.count_ranks(folder)
    files = [deepspeed_folder.model_states_path(folder, rank) for rank in range(size)]
    first = rank_file.read(files[0])
    rows = deepspeed_folder.vocabulary_rows(files[0], first) * size
    args = deepspeed_folder.megatron_args(first, files[0], reads_experts=True)
    layout = experts.NO_EXPERTS
    if has_experts := deepspeed_folder.has_experts(args):
        experts.translate(args, files[0])
    is_core = module_tree.is_core(first.get("module"))
    names = module_tree.current_names(first.get("module"))
    description = Description(files[0], first, args, rows, is_core, names)
    architecture = description.architecture
    check_rank_counts(args, folder, tensor=size, pipeline=1)
    layers = range(architecture.num_hidden_layers)
    weights, slices = list[Extent](), list[dict[str, TensorSlice]]()
    for number, file in enumerate(files):
        state = first if number == 0 else rank_file.read(file)
        rank_file.check_same_step(file, state, first_file=files[0], first_state=first)
        version = rank_file.version_of(state, file, default=3.0)
        rank = TensorParallelRank(architecture, Axis(number, size), rows, version)
        if has_experts:
            slices.append(experts.slices_of(rank, args))
            weights += experts.locate_others(file, state, slices=slices[-1])
            continue
        tree = module_tree.stage_tree(rank, layers)
        if not deepspeed_folder.has_no_weights(file):
            weights += module_tree.locate(file, state.get("module"), tree)
        slices.append(dict(module_tree.named_slices(tree)))
    if has_experts:
        weights += experts.locate(folder, args, slices=slices)
        layout = experts.expert_ranks(args, first)
    unread: tuple[str, ...] = ()
    if has_experts and size > 1:
        states = OptimizerStates()
        if any(folder.glob("*optim_states.pt")):
            unread = ("optimizer states of experts beside several tensor-parallel ranks",)
    else:
        states = read_states(
            *(folder, slices), tensor_parallel_size=size, weights=weights, experts=layout
        )
    return deepspeed_folder.opened(
        *("mds", folder, description, weights, states), ranks=(size, 1), unread=unread
    )


def warnings(checkpoint: Checkpoint) -> list[str]:
    """Return warnings about settings for which Megatron-DeepSpeed has no argument."""
    return [*deepspeed_folder.warnings(checkpoint), *experts.warnings(checkpoint)]


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write the files without the data of their tensors; see `CheckpointFormat`."""
    deepspeed_folder.check_model(checkpoint.architecture, writes_experts=True)
    if checkpoint.architecture.has_routers:
        return experts.lay_out(folder, checkpoint, target=target)
    layout, layers = target.layout, range(checkpoint.architecture.num_hidden_layers)
    extents: list[Extent] = []
    partitions = PartitionWriter(checkpoint, target)
    for number, rank in enumerate(target_ranks(checkpoint.architecture, target)):
        tree = module_tree.stage_tree(rank, layers)
        module = module_tree.planned_tree(tree, checkpoint, target=target)
        if layout.zero_stage == 3:
            module = module_tree.without_elements(module)
        slices = dict(module_tree.named_slices(tree))
        shapes, partition_extents = partitions.lay_out(folder, number, slices=slices)
        client_state = deepspeed_folder.client_state(checkpoint, layout, rank.padded_vocab_size)
        first, *copies = deepspeed_folder.new_model_states_paths(folder, number, layout=layout)
        extents += partition_extents
        extents += torch_archive.lay_out(first, {"module": module, **client_state, **shapes})
        # Only ZeRO 3 has several files. They hold no elements, so the contents are final.
        for path in copies:
            shutil.copyfile(first, path)
    return extents


if TYPE_CHECKING:
    from tokamake.checkpoint.deepspeed.mds import format as this_module

    _: CheckpointFormat = this_module
