"""Megatron-LM's classic checkpoint: a folder a model-parallel rank, its weights by stages.

iter_<N>/mp_rank_<T>[_<P>]/model_optim_rng.pt has in `model` what the rank's pipeline stage has, in
model0, model1 ... where it has several. Layers are counted from 0 in each stage. In `optimizer` is
what the optimizer has of them (`classic.states`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import files
from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.folder import REMEDY
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import pointed_files
from tokamake.checkpoint.megatron import optimizer_writer
from tokamake.checkpoint.megatron.optimizer_reader import OptimizerReader, Parameter
from tokamake.checkpoint.megatron_model import module as megatron_module
from tokamake.checkpoint.megatron_model.arguments import (
    architecture_of,
    arguments,
    as_megatron_lm,
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
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

TITLE = "Megatron-LM, classic"
PRIORITY = 40
SIZES: tuple[str, ...] = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
)
IN_ROOT = False
_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_POINTER = "latest_checkpointed_iteration.txt"


def find(path: Path) -> Path | None:
    """Folder of the checkpoint, if it is one."""
    names = ["."]
    if (path / _POINTER).is_file():
        step = (path / _POINTER).read_text(encoding="utf-8", errors="replace").strip()
        names.append(f"iter_{int(step):07d}" if step.isdecimal() else "release")
    for name in names:
        if _ranks(path / name):
            return path / name
    return None


def _ranks(folder: Path) -> list[re.Match[str]]:
    """Names of ranks' folders that have a file."""
    folders = (file.parent.name for file in folder.glob(f"mp_rank_*/{_FILE}"))
    return [found for name in folders if (found := _RANK.fullmatch(name))]


def list_files(path: Path) -> list[Path]:
    return pointed_files(path, _POINTER)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint that `find` has found.

    Raises:
        UserError: a file is missing or damaged, or the model is none that we have.
    """
    found = _ranks(folder)
    tensor, pipeline = (max(int(m[n] or 0) for m in found) + 1 for n in (1, 2))
    first = folder / min(m[0] for m in found) / _FILE
    state = of_first = deepspeed_folder.read(first)
    args: Any = state.get("args")
    rows = megatron_module.vocabulary_rows(first, state) * tensor
    models = [state[name] for name in state if re.fullmatch(r"model\d*", str(name))]
    is_core = any(map(megatron_module.is_core, models))
    architecture = architecture_of(args, first, padded_vocab_size=rows, is_core=is_core)
    check_sizes(args, folder, tensor=tensor, pipeline=pipeline)
    virtual = sum(1 for name in state if re.fullmatch(r"model\d+", str(name))) or 1
    layout, regions, states = (
        ParallelLayout(tensor, pipeline, virtual),
        list[Extent](),
        OptimizerReader(),
    )
    known = {first: of_first}
    for file in (_file(folder, 0, stage, pipeline) for stage in range(pipeline)):
        known[file] = known.get(file) or deepspeed_folder.read(file)
    layers = _found_layers(folder, known, architecture, layout)
    for stage in range(pipeline):
        for number in range(tensor):
            file = _file(folder, number, stage, pipeline)
            state = known.get(file) or deepspeed_folder.read(file)
            deepspeed_folder.check_step(file, state, first, of_first)
            version = version_of(state, file, missing=0.0)  # the first ones had none
            rank = Rank(architecture, Axis(number, tensor), rows, version)
            parameters: list[Parameter] = []
            for name, tree in _stages(rank, layout, stage, layers):
                weights = [*megatron_module.found(file, state.get(name), tree)]
                regions += weights
                parameters += _parameters(state.get(name), tree, weights)
            states.add(file, state, parameters)
    return Checkpoint(
        "megatron",
        folder,
        architecture,
        states.found.source(regions, megatron_module.shapes_of(architecture)),
        layout,
        progress_of(state, file),
        rows,
        states.unread,
        {
            "checkpoint_version": version,
            **notes_of(args),
            **states.found.notes,
            **deepspeed_folder.schedule_of(of_first),
        },
        is_padding_unknown=is_padding_unknown(args, first, padded_vocab_size=rows),
    )


def _parameters(module: Any, tree: Any, weights: Iterable[Extent]) -> Iterator[Parameter]:
    """Parameters of a stage in the order of its file.

    Args:
        module: what is in the file.
        tree: of the stage.
        weights: where it lies.
    """
    dtypes = {region.name: region.dtype for region in weights}
    for name, part in megatron_module.in_order(module, tree).items():
        yield Parameter(name, part, dtypes[name])


def _file(folder: Path, tensor: int, stage: int, stages: int) -> Path:
    name = f"mp_rank_{tensor:02d}" + f"_{stage:03d}" * (stages > 1)
    return folder / name / _FILE


def _stages(
    rank: Rank, layout: ParallelLayout, pipeline_rank: int, layers: Sequence[range]
) -> Iterator[tuple[str, Any]]:
    """What a rank's file has of the model, by name.

    Args:
        rank: of tensor parallelism.
        layout: of the checkpoint.
        pipeline_rank: of the file.
        layers: of all stages.
    """
    for number in range(layout.virtual_pipeline_size):
        stage = number * layout.pipeline_parallel_size + pipeline_rank
        is_last = stage == len(layers) - 1
        tree = megatron_module.nested(rank, layers[stage], is_first=stage == 0, is_last=is_last)
        if rank.architecture.tie_word_embeddings and is_last and stage > 0:
            words = rank.embedding()["word_embeddings.weight"]
            tree["word_embeddings_for_head"] = {
                "weight": TensorSlice(words.shape, words.blocks, True)
            }
        yield _model(number, layout), tree


def _model(number: int, layout: ParallelLayout) -> str:
    """Name of a stage's weights in a file."""
    return f"model{number}" if layout.virtual_pipeline_size > 1 else "model"


def _found_layers(
    folder: Path,
    known: Mapping[Path, dict[str, Any]],
    architecture: Architecture,
    layout: ParallelLayout,
) -> list[range]:
    """Layers of each stage, as the files have them: Megatron-LM can share them unevenly.

    Args:
        folder: of the checkpoint.
        known: what is in the files of the first tensor-parallel rank.
        architecture: says how many there are.
        layout: of the checkpoint.

    Raises:
        UserError: there are others than that.
    """
    ranks, virtual = layout.pipeline_parallel_size, layout.virtual_pipeline_size
    counts = [0] * ranks * virtual
    for stage in range(ranks):
        file = _file(folder, 0, stage, ranks)
        for number in range(virtual):
            found = megatron_module.layers(known[file].get(_model(number, layout)))
            if missing := sorted({*range(max(found, default=-1) + 1)} - found):
                raise UserError(
                    f"{file}: {_model(number, layout)} has layers up to {max(found)}, but none of "
                    f"number {missing[0]}; {REMEDY}"
                )
            counts[number * ranks + stage] = len(found)
    if (has := sum(counts)) != (wanted := architecture.num_hidden_layers):
        few = min(range(len(counts)), key=counts.__getitem__)
        file, shared = _file(folder, 0, few % ranks, ranks), ", ".join(map(str, counts))
        least = f" (its stages have {shared}; the fewest are in {file})" * (len(counts) > 1)
        raise UserError(f"{folder}: has {has} layers{least}, its arguments say {wanted}; {REMEDY}")
    ends = [*accumulate(counts)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _even_layers(architecture: Architecture, stages: int) -> list[range]:
    each, rest = divmod(architecture.num_hidden_layers, stages)
    if rest:
        raise UserError(
            f"pipeline_parallel_size × virtual_pipeline_size: {stages}: does not divide "
            f"{architecture.num_hidden_layers} layers, as Megatron-LM needs; give a divisor"
        )
    return [range(stage * each, (stage + 1) * each) for stage in range(stages)]


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target) -> list[Extent]:
    """Write the files without their tensors, in version 3.0; with Adam's states if there are some.

    Args:
        folder: to write, empty.
        checkpoint: whose description the files get.
        target: how many ranks, and the number format.

    Returns:
        Where the tensors are to go.

    Raises:
        UserError: Megatron cannot share such a model so.
    """
    layout, step = target.layout, checkpoint.progress.iteration
    tensor, pipeline = layout.tensor_parallel_size, layout.pipeline_parallel_size
    rows = padded(checkpoint.architecture, target.make_vocab_size_divisible_by, tensor)
    rest = {
        "args": as_megatron_lm(arguments(checkpoint, layout, padded_vocab_size=rows)),
        "checkpoint_version": 3.0,
        "iteration": step,
    }
    regions: list[Extent] = []
    with_states = optimizer_writer.has_states(checkpoint)
    layers = _even_layers(checkpoint.architecture, pipeline * layout.virtual_pipeline_size)
    for stage in range(pipeline):
        for number in range(tensor):
            file = _file(folder / f"iter_{step:07d}", number, stage, pipeline)
            file.parent.mkdir(parents=True)
            rank = Rank(checkpoint.architecture, Axis(number, tensor), rows)
            model = {
                name: megatron_module.planned(tree, checkpoint, target)
                for name, tree in _stages(rank, layout, stage, layers)
            }
            if with_states:
                model = optimizer_writer.exact(model, checkpoint.source)
            states = optimizer_writer.planned(checkpoint, model) if with_states else {}
            own = torch_archive.lay_out(file, {**model, **rest, **states})
            optimizer_writer.write_scale(checkpoint, own)
            regions += own
    files.write_text(folder / _POINTER, f"{step}")
    return regions


if TYPE_CHECKING:
    from tokamake.checkpoint.megatron import format as this_module

    _: CheckpointFormat = this_module
