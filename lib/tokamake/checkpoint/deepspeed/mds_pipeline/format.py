"""Megatron-DeepSpeed's checkpoint with pipeline parallelism: a file per layer and tensor rank.

global_step<N>/layer_<I>-model_<T>-model_states.pt holds the weights of a layer; the files
mp_rank_<M>_model_states.pt hold none. Forks number the layers differently, thus the order of the
numbers decides which layer a file holds.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.folder import REMEDY, model_states_path
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
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

TITLE = "Megatron-DeepSpeed, with pipeline"
PRIORITY = 30
SIZES: tuple[str, ...] = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "zero_stage",
)
IN_ROOT = True
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")


def find(path: Path) -> Path | None:
    """Return the folder of the checkpoint, or None if it has another format."""
    folder = deepspeed_folder.find(path)
    return folder if folder is not None and any(folder.glob("layer_*-model_*")) else None


def list_files(path: Path) -> list[Path]:
    return pointed_files(path, "latest")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint in a folder that `find` returned.

    Raises:
        UserError: a file is missing or damaged, or tokamake has no such model.
    """
    numbers = _layer_numbers(folder)
    first_layer = re.compile(rf"layer_{numbers[0]:02d}-model_(\d+)-model_states\.pt")
    tensor = deepspeed_folder.count_ranks(folder, first_layer)
    num_ranks = deepspeed_folder.count_ranks(folder)
    stages = max(1, num_ranks // tensor)
    file = model_states_path(folder, 0)
    state = deepspeed_folder.read(file)
    for path in (model_states_path(folder, rank) for rank in range(1, num_ranks)):
        deepspeed_folder.check_same_step(path, deepspeed_folder.read(path), file, state)
    args = deepspeed_folder.megatron_args(state)
    embedding = folder / _file_name(numbers[0], 0)
    rows = megatron_module.vocabulary_rows(embedding, deepspeed_folder.read(embedding)) * tensor
    architecture = architecture_of(args, file, padded_vocab_size=rows)
    check_rank_counts(args, folder, tensor=tensor, pipeline=stages)
    version = version_of(state, file, default=3.0)
    ranks = [Rank(architecture, Axis(number, tensor), rows, version) for number in range(tensor)]
    weights = [extent for rank in ranks for extent in _locate(folder, rank, numbers)]
    # Each stage may have any parameter: the files of its optimizer states name those it has.
    slices = [deepspeed_names(rank, numbers) for rank in ranks] * stages
    states = read_states(folder, slices, tensor_parallel_size=tensor, weights=weights)
    return Checkpoint(
        "mds_pipeline",
        folder,
        architecture,
        states.source(weights, megatron_module.weight_shapes(architecture)),
        ParallelLayout(
            tensor,
            stages,
            data_parallel_size=(
                states.data_parallel_size or deepspeed_folder.data_parallel_size(state)
            ),
            zero_stage=states.zero_stage,
        ),
        progress_of(state, file),
        rows,
        deepspeed_folder.unread_states(state, states.zero_stage),
        eos_note(args) | states.notes | deepspeed_folder.scheduler_note(state),
        is_padding_unknown=is_padding_unknown(args, file, padded_vocab_size=rows),
    )


def _locate(folder: Path, rank: Rank, numbers: Sequence[int]) -> Iterator[Extent]:
    """Yield the extents of a rank's weights.

    Raises:
        UserError: the number of files does not fit the model, or a file is damaged.
    """
    trees = [*_trees(rank)]
    if len(trees) != len(numbers):
        raise UserError(
            f"{folder}: has {len(numbers)} files layer_*-model_{rank.axis.rank:02d}, a model of "
            f"{rank.architecture.num_hidden_layers} layers has {len(trees)}; {REMEDY}"
        )
    for number, tree in zip(numbers, trees, strict=True):
        file = folder / _file_name(number, rank.axis.rank)
        yield from megatron_module.locate(file, deepspeed_folder.read(file), tree)


def _layer_numbers(folder: Path) -> list[int]:
    """Return the layer numbers in the names of the files.

    Raises:
        UserError: no file has such a name.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    if numbers := sorted({int(m[1]) for name in names if (m := _LAYER.fullmatch(name))}):
        return numbers
    name = next(name for name in names if name.startswith("layer_"))
    raise UserError(f"{folder}: has no {_file_name(0, 0).replace('00', '*')}, but {name}; {REMEDY}")


def _file_name(layer: int, rank: int) -> str:
    return f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


def deepspeed_names(rank: Rank, numbers: Iterable[int]) -> dict[str, TensorSlice]:
    """Return a rank's tensors by the parameter names of DeepSpeed's pipeline.

    Args:
        rank: tensor-parallel rank.
        numbers: layer numbers in the names of its files.
    """
    slices: dict[str, TensorSlice] = {}
    for index, (number, tree) in enumerate(zip(numbers, _trees(rank), strict=False)):
        # DeepSpeed names a tied layer after the tie, not after its number.
        is_tied = index == 0 and rank.architecture.tie_word_embeddings
        prefix = "tied_modules.embed" if is_tied else f"{number}"
        slices |= {f"{prefix}.{name}": tensor for name, tensor in tree.items()}
    return slices


def _trees(rank: Rank) -> Iterator[dict[str, TensorSlice]]:
    """Yield the tensors of each of a rank's files, in order."""
    yield rank.embedding()
    for number in range(rank.architecture.num_hidden_layers):
        yield rank.layer(number)
    yield rank.norm()
    if output := rank.output_layer():
        yield {f"lm_head.{name}": tensor for name, tensor in output.items()}


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target) -> list[Extent]:
    """Write the files without the data of their tensors; number layers from 1 without gaps.

    Args:
        folder: empty folder to write to.
        checkpoint: checkpoint to write.
        target: number of ranks and dtype.

    Returns:
        The extents to fill.

    Raises:
        UserError: Megatron cannot divide the model among the ranks, there are more stages than
            layers, or DeepSpeed cannot resume from the optimizer states.
    """
    layout, architecture = target.layout, checkpoint.architecture
    size, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    if stages > (layers := architecture.num_hidden_layers):
        raise UserError(
            f"--pipeline-parallel-size {stages}: more than the model's {layers} layers; give "
            f"{layers} or less"
        )
    rows = padded(architecture, target.make_vocab_size_divisible_by, size)
    ranks = [Rank(architecture, Axis(number, size), rows) for number in range(size)]
    extents: list[Extent] = []
    for number, rank in enumerate(ranks):
        for layer, tree in enumerate(_trees(rank), 1):
            content: Any = megatron_module.planned_tree(tree, checkpoint, target)
            extents += torch_archive.lay_out(folder / _file_name(layer, number), content)
    client_state = deepspeed_folder.client_state(checkpoint, layout, rows)
    partitions = _partition_writer(checkpoint, target)
    for model_rank in range(size * stages):
        stage, number = divmod(model_rank, size)
        shapes: dict[str, Any] = {}
        if partitions:
            slices = stage_slices(ranks[number], stage, stages)
            shapes, partition_extents = partitions.lay_out(folder, model_rank, slices)
            extents += partition_extents
        content = {"module": None, **client_state, **shapes}
        torch_archive.lay_out(model_states_path(folder, model_rank), content)
    return extents


def _partition_writer(checkpoint: Checkpoint, target: Target) -> PartitionWriter | None:
    """Return the writer of optimizer states, or None if they are not requested.

    Raises:
        UserError: DeepSpeed cannot resume from them.
    """
    if (stage := target.layout.zero_stage) > 1:
        raise UserError(
            f"--zero-stage {stage}: DeepSpeed itself refuses stages 2 and 3 with pipelines; give "
            "1, or --format mds, which has no pipeline"
        )
    return PartitionWriter(checkpoint, target) if stage else None


def stage_slices(rank: Rank, stage: int, stages: int) -> dict[str, TensorSlice]:
    """Return the tensors of a stage in the order of its model, by their names in written files.

    DeepSpeed's `type:transformer` partition gives each stage the same number of layers. If that
    is not possible, the first stages get one more. The first stage also has the layers before
    them, and the last stage those after them.
    """
    per_stage, num_longer = divmod(layers := rank.architecture.num_hidden_layers, stages)
    # Number 1 is the embedding, layers follow from 2.
    begin, end = (2 + at * per_stage + min(at, num_longer) for at in (stage, stage + 1))
    numbers = range(begin if stage else 1, end if stage < stages - 1 else layers + 4)
    slices: dict[str, TensorSlice] = {}
    for name, tensor in deepspeed_names(rank, count(1)).items():
        number = name.partition(".")[0]
        # The tied embedding is the first parameter of both the first and the last stage.
        in_stage = int(number) in numbers if number.isdecimal() else stage in (0, stages - 1)
        if in_stage:
            slices[name] = tensor
    return slices


if TYPE_CHECKING:
    from tokamake.checkpoint.deepspeed.mds_pipeline import format as this_module

    _: CheckpointFormat = this_module
