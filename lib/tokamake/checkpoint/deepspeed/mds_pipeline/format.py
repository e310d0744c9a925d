"""Megatron-DeepSpeed's checkpoint with pipelining: a file a layer and tensor-parallel rank.

global_step<N>/layer_<I>-model_<T>-model_states.pt has a layer's weights, mp_rank_<M> none.
Numbers of layers differ between forks, so that what is in a file tells what it is.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed import zero_reader as zero_shards
from tokamake.checkpoint.deepspeed.folder import REMEDY, states
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
    """Folder of the checkpoint, if it is one."""
    folder = deepspeed_folder.find(path)
    return folder if folder is not None and any(folder.glob("layer_*-model_*")) else None


def list_files(path: Path) -> list[Path]:
    return pointed_files(path, "latest")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint that `find` has found.

    Raises:
        UserError: a file is missing or damaged, or the model is none that we have.
    """
    numbers = _numbers(folder)
    of_first = re.compile(rf"layer_{numbers[0]:02d}-model_(\d+)-model_states\.pt")
    tensor = deepspeed_folder.ranks(folder, of_first)
    ranks = deepspeed_folder.ranks(folder)
    stages = max(1, ranks // tensor)
    first_states = states(folder, 0)
    state = deepspeed_folder.read(first_states)
    for other in (states(folder, number) for number in range(1, ranks)):
        deepspeed_folder.check_step(other, deepspeed_folder.read(other), first_states, state)
    args = deepspeed_folder.args_of(state)
    first = folder / _file(numbers[0], 0)
    rows = megatron_module.vocabulary_rows(first, deepspeed_folder.read(first)) * tensor
    architecture = architecture_of(args, first_states, padded_vocab_size=rows)
    check_sizes(args, folder, tensor=tensor, pipeline=stages)
    version = version_of(state, first_states, missing=3.0)
    regions, named = list[Extent](), list[dict[str, TensorSlice]]()
    for number in range(tensor):
        rank = Rank(architecture, Axis(number, tensor), rows, version)
        parts = [*_parts(rank)]
        if len(parts) != len(numbers):
            raise UserError(
                f"{folder}: has {len(numbers)} files layer_*-model_{number:02d}, a model of "
                f"{architecture.num_hidden_layers} layers has {len(parts)}; {REMEDY}"
            )
        for layer, tree in zip(numbers, parts, strict=True):
            file = folder / _file(layer, number)
            regions += megatron_module.found(file, deepspeed_folder.read(file), tree)
        named.append(by_deepspeed(rank, numbers))
    shards = zero_shards.read(folder, named * stages, tensor_parallel_size=tensor, beside=regions)
    return Checkpoint(
        "mds_pipeline",
        folder,
        architecture,
        shards.source(regions, megatron_module.shapes_of(architecture)),
        ParallelLayout(
            tensor,
            stages,
            data_parallel_size=shards.data_parallel_size or deepspeed_folder.data_ranks(state),
            zero_stage=shards.zero_stage,
        ),
        progress_of(state, first_states),
        rows,
        deepspeed_folder.unread(state, shards.zero_stage),
        notes_of(args) | shards.notes | deepspeed_folder.schedule_of(state),
        is_padding_unknown=is_padding_unknown(args, first_states, padded_vocab_size=rows),
    )


def _numbers(folder: Path) -> list[int]:
    """Numbers of the files' layers.

    Raises:
        UserError: no file has the name of one.
    """
    names = sorted(each.name for each in folder.iterdir())
    if found := sorted({int(m[1]) for name in names if (m := _LAYER.fullmatch(name))}):
        return found
    other = next(name for name in names if name.startswith("layer_"))
    raise UserError(f"{folder}: has no {_file(0, 0).replace('00', '*')}, but {other}; {REMEDY}")


def _file(layer: int, rank: int) -> str:
    return f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


def by_deepspeed(rank: Rank, numbers: Iterable[int]) -> dict[str, TensorSlice]:
    """What a rank has, by the names that DeepSpeed's pipeline has for parameters.

    Args:
        rank: of tensor parallelism.
        numbers: of its files.
    """
    return {
        # What stages tie is called after the tie.
        f"tied_modules.embed.{name}"
        if place == 0 and rank.architecture.tie_word_embeddings
        else f"{number}.{name}": part
        for place, (number, tree) in enumerate(zip(numbers, _parts(rank), strict=False))
        for name, part in tree.items()
    }


def _parts(rank: Rank) -> Iterator[dict[str, TensorSlice]]:
    """What is in a rank's files, in their order."""
    yield rank.embedding()
    for number in range(rank.architecture.num_hidden_layers):
        yield rank.layer(number)
    yield rank.norm()
    if output := rank.output_layer():
        yield {f"lm_head.{name}": part for name, part in output.items()}


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target) -> list[Extent]:
    """Write the files without their tensors; layers are numbered from 1 without gaps.

    Args:
        folder: to write, empty.
        checkpoint: whose description the files get.
        target: how many ranks, and the number format.

    Returns:
        Where the tensors are to go.

    Raises:
        UserError: Megatron cannot share such a model so, there are more stages than layers, or
            DeepSpeed cannot share its optimizer states.
    """
    size, stages = target.layout.tensor_parallel_size, target.layout.pipeline_parallel_size
    if stages > (layers := checkpoint.architecture.num_hidden_layers):
        raise UserError(
            f"--pipeline-parallel-size {stages}: more than the model's {layers} layers; give "
            f"{layers} or less"
        )
    rows = padded(checkpoint.architecture, target.make_vocab_size_divisible_by, size)
    regions: list[Extent] = []
    for number in range(size):
        rank = Rank(checkpoint.architecture, Axis(number, size), rows)
        for layer, tree in enumerate(_parts(rank), 1):
            content: Any = megatron_module.planned(tree, checkpoint, target)
            regions += torch_archive.lay_out(folder / _file(layer, number), content)
    rest = deepspeed_folder.client_state(checkpoint, target.layout, rows)
    partitions = _partitions(checkpoint, target)
    for number in range(size * stages):
        stage, place = divmod(number, size)
        more: dict[str, Any] = {}
        if partitions:
            rank = Rank(checkpoint.architecture, Axis(place, size), rows)
            more, shards = partitions.lay_out(folder, number, of_stage(rank, stage, stages))
            regions += shards
        torch_archive.lay_out(states(folder, number), {"module": None, **rest, **more})
    return regions


def _partitions(checkpoint: Checkpoint, target: Target) -> Partitions | None:
    """What writes optimizer states, if they are asked for.

    Raises:
        UserError: DeepSpeed could not continue with them.
    """
    if (stage := target.layout.zero_stage) > 1:
        raise UserError(
            f"--zero-stage {stage}: DeepSpeed itself refuses stages 2 and 3 with pipelines; give "
            "1, or --format mds, which has none"
        )
    return Partitions(checkpoint, target) if target.layout.zero_stage else None


def of_stage(rank: Rank, stage: int, stages: int) -> dict[str, TensorSlice]:
    """What a stage trains, in its model's order, by the names in files that are written here.

    DeepSpeed gives each stage as many layers (type:transformer), the first ones one more where
    they do not divide; what comes before and after goes to the first and the last.
    """
    each, more = divmod(layers := rank.architecture.num_hidden_layers, stages)
    begin, end = (2 + at * each + min(at, more) for at in (stage, stage + 1))
    own = range(begin if stage else 1, end if stage < stages - 1 else layers + 4)
    found: dict[str, TensorSlice] = {}
    for name, part in by_deepspeed(rank, count(1)).items():
        number = name.partition(".")[0]
        # What the first stage and the last tie comes first on both.
        is_own = int(number) in own if number.isdecimal() else stage in (0, stages - 1)
        if is_own:
            found[name] = part
    return found


if TYPE_CHECKING:
    from tokamake.checkpoint.deepspeed.mds_pipeline import format as this_module

    _: CheckpointFormat = this_module
