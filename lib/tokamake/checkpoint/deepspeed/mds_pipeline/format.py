"""Megatron-DeepSpeed's checkpoint with pipeline parallelism: a file per layer and tensor rank.

global_step<N>/layer_<I>-model_<T>-model_states.pt holds the weights of a layer; the files
mp_rank_<M>_model_states.pt hold none. Forks number the layers differently, thus the order of the
numbers decides which layer a file holds.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.folder import model_states_path
from tokamake.checkpoint.deepspeed.folder import warnings as warnings
from tokamake.checkpoint.deepspeed.zero_reader import read_states
from tokamake.checkpoint.deepspeed.zero_writer import PartitionWriter
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.megatron_model import module_tree, rank_file
from tokamake.checkpoint.megatron_model.args_reader import Description, check_rank_counts
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    target_ranks,
)
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout, Target
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.torch_archive import archives as archives
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

TITLE = "Megatron-DeepSpeed, with pipeline"
SUMMARY = "Megatron-DeepSpeed with pipeline; with optimizer states of Adam if --zero-stage is set"
PRIORITY = 30
SIZES = {
    "tensor_parallel_size": None,
    "pipeline_parallel_size": None,
    "data_parallel_size": None,
    "zero_stage": 1,  # DeepSpeed itself refuses stages 2 and 3 with pipelines
}
IN_ROOT = True
STEP_FOLDER = r"global_step(\d+)"
POINTER = "latest"
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")


def find(path: Path) -> Path | None:
    """Return the folder of the checkpoint, or None if it has another format."""
    folder = deepspeed_folder.find(path)
    return folder if folder is not None and any(folder.glob("layer_*-model_*")) else None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint in a folder that `find` returned."""
    numbers = _layer_numbers(folder)
    first_layer = re.compile(rf"layer_{numbers[0]:02d}-model_(\d+)-model_states\.pt")
    tensor = deepspeed_folder.count_ranks(folder, first_layer)
    num_ranks = deepspeed_folder.count_ranks(folder)
    stages = max(1, num_ranks // tensor)
    file = model_states_path(folder, 0)
    state = rank_file.read(file)
    for path in (model_states_path(folder, rank) for rank in range(1, num_ranks)):
        rank_file.check_same_step(path, rank_file.read(path), first_file=file, first_state=state)
    args = deepspeed_folder.megatron_args(state, file)
    embedding = folder / _file_name(numbers[0], 0)
    rows = module_tree.vocabulary_rows(embedding, rank_file.read(embedding)) * tensor
    description = Description(file, state, args, rows)
    architecture = description.architecture
    check_rank_counts(args, folder, tensor=tensor, pipeline=stages)
    version = rank_file.version_of(state, file, default=3.0)
    ranks = [
        TensorParallelRank(architecture, Axis(number, tensor), rows, version)
        for number in range(tensor)
    ]
    weights = [extent for rank in ranks for extent in _locate(folder, rank, numbers=numbers)]
    # Each stage may have any parameter: the files of its optimizer states name its parameters.
    slices = [deepspeed_folder.pipeline_parameters(rank, numbers) for rank in ranks] * stages
    states = read_states(folder, slices, tensor_parallel_size=tensor, weights=weights)
    return deepspeed_folder.opened(
        "mds_pipeline", folder, description, weights, states, ranks=(tensor, stages)
    )


def _locate(folder: Path, rank: TensorParallelRank, *, numbers: Sequence[int]) -> Iterator[Extent]:
    trees = [*deepspeed_folder.pipeline_layers(rank)]
    if len(trees) != len(numbers):
        raise UserError(
            f"{folder}: has {len(numbers)} files layer_*-model_{rank.axis.rank:02d}, a model of "
            f"{rank.architecture.num_hidden_layers} layers has {len(trees)}; {REMEDY}"
        )
    for number, tree in zip(numbers, trees, strict=True):
        file = folder / _file_name(number, rank.axis.rank)
        yield from module_tree.locate(file, rank_file.read(file), tree)


def _layer_numbers(folder: Path) -> list[int]:
    names = sorted(entry.name for entry in folder.iterdir())
    if numbers := sorted({int(m[1]) for name in names if (m := _LAYER.fullmatch(name))}):
        return numbers
    name = next(name for name in names if name.startswith("layer_"))
    raise UserError(f"{folder}: has no {_file_name(0, 0).replace('00', '*')}, but {name}; {REMEDY}")


def _file_name(layer: int, rank: int) -> str:
    return f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write the files without the data of their tensors; number layers from 1 without gaps."""
    deepspeed_folder.check_model(checkpoint.architecture)
    layout = target.layout
    ranks, stages = target_ranks(checkpoint.architecture, target), layout.pipeline_parallel_size
    _check(checkpoint, layout)
    extents: list[Extent] = []
    for number, rank in enumerate(ranks):
        for layer, tree in enumerate(deepspeed_folder.pipeline_layers(rank), 1):
            content: Any = module_tree.planned_tree(tree, checkpoint, target=target)
            extents += torch_archive.lay_out(folder / _file_name(layer, number), content)
    client_state = deepspeed_folder.client_state(checkpoint, layout, ranks[0].padded_vocab_size)
    partitions = PartitionWriter(checkpoint, target)
    for model_rank in range(len(ranks) * stages):
        stage, number = divmod(model_rank, len(ranks))
        slices = deepspeed_folder.stage_parameters(ranks[number], stage, stages=stages)
        shapes, partition_extents = partitions.lay_out(folder, model_rank, slices=slices)
        extents += partition_extents
        content = {"module": None, **client_state, **shapes}
        torch_archive.lay_out(model_states_path(folder, model_rank), content)
    return extents


def _check(checkpoint: Checkpoint, layout: ParallelLayout) -> None:
    stages, num_layers = layout.pipeline_parallel_size, checkpoint.architecture.num_hidden_layers
    if stages > num_layers:
        raise UserError(
            f"--pipeline-parallel-size {stages}: more than the model's {num_layers} layers; give "
            f"{num_layers} or less"
        )
    if layout.zero_stage > 1:
        raise UserError(
            f"--zero-stage {layout.zero_stage}: DeepSpeed itself refuses stages 2 and 3 with "
            "pipelines; give 1, or --format mds, which has no pipeline"
        )


if TYPE_CHECKING:
    from tokamake.checkpoint.deepspeed.mds_pipeline import format as this_module

    _: CheckpointFormat = this_module
