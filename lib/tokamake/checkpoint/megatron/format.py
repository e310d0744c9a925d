"""Megatron-LM's classic checkpoint: a folder for each model-parallel rank.

iter_<N>/mp_rank_<T>[_<P>][_<E>]/model_optim_rng.pt holds the weights of the rank's pipeline stage
in `model`, or virtual stages in `model0`, `model1`, ... Each stage numbers its layers, and each
expert-parallel rank its experts, from 0. `optimizer` holds the optimizer states
(`optimizer_reader`); states of the distributed optimizer, ZeRO stage 1 here, are in
distrib_optim.pt.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake import files
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import candidates
from tokamake.checkpoint.megatron import optimizer_writer
from tokamake.checkpoint.megatron.optimizer_reader import (
    DISTRIBUTED,
    OptimizerParameter,
    OptimizerReader,
)
from tokamake.checkpoint.megatron_model import (
    adam,
    core_names,
    grouped_experts,
    module_tree,
    rank_file,
)
from tokamake.checkpoint.megatron_model.args_reader import (
    Description,
    arguments_from_shapes,
    check_rank_counts,
)
from tokamake.checkpoint.megatron_model.args_writer import (
    argument_warnings,
    as_megatron_lm,
    megatron_arguments,
)
from tokamake.checkpoint.megatron_model.optimizer_states import scheduler_note
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    target_ranks,
)
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout, Target
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.torch_archive import archives as archives
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis
from tokamake.runtime.console import counted

TITLE = "Megatron-LM, classic"
SUMMARY = "Megatron-LM, classic; with optimizer states of Adam"
PRIORITY = 40
SIZES = {
    "tensor_parallel_size": None,
    "pipeline_parallel_size": None,
    "virtual_pipeline_size": None,
    "expert_parallel_size": None,
    "zero_stage": 1,
}
EQUAL_STAGES = True
STEP_FOLDER = r"iter_(\d+)"
POINTER = "latest_checkpointed_iteration.txt"
NUMBERED_FOLDER = "iter_{:07d}"  # The file may also hold a name, such as `release`.
_FILE = "model_optim_rng.pt"
_FIRST_VERSION = 0.0
"""The first versions of Megatron wrote no version."""
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")


class _RankFiles(NamedTuple):
    """The files of a checkpoint, one for each model-parallel rank."""

    folder: Path
    tensor: int
    pipeline: int
    experts: int = 1
    """Number of expert-parallel ranks."""

    def file(self, tensor: int, stage: int, expert: int = 0) -> Path:
        # Names have the pipeline and expert-parallel rank only if there are several.
        pipeline = f"_{stage:03d}" * (self.pipeline > 1)
        of_experts = f"_{expert:03d}" * (self.experts > 1)
        return self.folder / f"mp_rank_{tensor:02d}{pipeline}{of_experts}" / _FILE


def find(path: Path) -> Path | None:
    """Return the folder of the checkpoint, or None if it has another format."""
    return next(
        (folder for folder in candidates(path, POINTER, NUMBERED_FOLDER) if _rank_folders(folder)),
        None,
    )


def _is_model(key: Any) -> bool:
    return bool(re.fullmatch(r"model\d*", str(key)))


def _arguments(file: Path, state: Mapping[str, Any], *, tensor: int, pipeline: int) -> Any:
    """Megatron's arguments in the file of the first rank; its first versions wrote none."""
    args: Any = state.get("args")
    if args is not None:
        return args
    (model, *more) = (state[name] for name in state if _is_model(name))
    version = rank_file.version_of(state, file, default=_FIRST_VERSION)
    if module_tree.is_core(model) or more or pipeline > 1 or version >= 2:
        raise UserError(
            f"{file}: has no args, which describe the model; give the checkpoint that Megatron "
            "wrote"
        )
    shapes = module_tree.current_shapes(model)
    return arguments_from_shapes(shapes, file, tensor_parallel_size=tensor)


def _tensor_names(state: Mapping[str, Any]) -> frozenset[str]:
    models = [state[key] for key in state if _is_model(key)]
    return frozenset[str]().union(*map(module_tree.current_names, models))


def _rank_folders(folder: Path) -> list[re.Match[str]]:
    names = (file.parent.name for file in folder.glob(f"mp_rank_*/{_FILE}"))
    return [match for name in names if (match := _RANK.fullmatch(name))]


def _ranks(
    folder: Path, numbers: list[re.Match[str]], first: Mapping[str, Any], *, file: Path
) -> _RankFiles:
    """Files of the ranks; the arguments tell a pipeline rank from an expert-parallel one."""
    tensor, second, third = (max(int(match[n] or 0) for match in numbers) + 1 for n in (1, 2, 3))
    args, name = first.get("args"), "expert_model_parallel_size"
    experts = rank_file.whole_number(getattr(args, name, None) or 1, f"{file}: args.{name}")
    if experts == 1:
        return _RankFiles(folder, tensor, second)
    is_pipeline = (getattr(args, "pipeline_model_parallel_size", None) or 1) > 1
    if (count := third if is_pipeline else second) != experts:
        raise UserError(
            f"{folder}: has files of {counted(count, 'expert-parallel rank')}, its arguments say "
            f"{experts}; fetch or write all files of the checkpoint again"
        )
    of_experts = getattr(args, "expert_tensor_parallel_size", None) or tensor
    if of_experts != tensor:
        raise UserError(
            f"{file}: args.expert_tensor_parallel_size: {of_experts}: other "
            f"ranks divide experts than divide attention, {tensor}; save with --ckpt-format "
            "torch_dist"
        )
    return _RankFiles(folder, tensor, second if is_pipeline else 1, experts)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint in a folder that `find` returned."""
    numbers = _rank_folders(folder)
    first_file = folder / min(match[0] for match in numbers) / _FILE
    first = rank_file.read(first_file)
    ranks = _ranks(folder, numbers, first, file=first_file)
    rows = module_tree.vocabulary_rows(first_file, first) * ranks.tensor
    models = [first[name] for name in first if _is_model(name)]
    args = _arguments(first_file, first, tensor=ranks.tensor, pipeline=ranks.pipeline)
    check_rank_counts(args, folder, tensor=ranks.tensor, pipeline=ranks.pipeline)
    # The layers of all stages must be known before tensors are located. Keep the contents of these
    # files, because reading them again is slow.
    contents = {first_file: first}
    for stage in range(ranks.pipeline):
        file = ranks.file(0, stage)
        contents[file] = contents.get(file) or rank_file.read(file)
    names = _tensor_names(contents[ranks.file(0, ranks.pipeline - 1)])
    is_core = any(map(module_tree.is_core, models))
    description = Description(first_file, first, args, rows, is_core, names)
    architecture = description.architecture
    is_distributed = first_file.with_name(DISTRIBUTED).is_file()
    layout = ParallelLayout(
        *(ranks.tensor, ranks.pipeline, max(1, len(models))),
        zero_stage=int(is_distributed),
        expert_parallel_size=ranks.experts,
    )
    if architecture.several_stacks and ranks.pipeline > 1:
        raise UserError(
            f"{folder}: is of {ranks.pipeline} pipeline ranks; stages of a model with "
            f"{architecture.several_stacks} are not supported: give a checkpoint without a pipeline"
        )
    layers = _stored_layers(ranks, contents, architecture=architecture, layout=layout)
    weights, reader = _read_ranks(
        ranks, contents, description=description, layers=layers, layout=layout
    )
    version = rank_file.version_of(first, first_file, default=_FIRST_VERSION)
    return description.checkpoint(
        "megatron",
        folder,
        reader.states.source(weights, model_tensors.weight_shapes(architecture)),
        layout=layout,
        unread=reader.unread,
        notes={
            "version": f"{version} of Megatron's checkpoints",
            **reader.states.notes,
            **scheduler_note(first),
        },
    )


def _read_ranks(
    ranks: _RankFiles,
    contents: Mapping[Path, dict[str, Any]],
    *,
    description: Description,
    layers: Sequence[range],
    layout: ParallelLayout,
) -> tuple[list[Extent], OptimizerReader]:
    """Locate weights and optimizer states of all ranks; `contents`: of files that were read."""
    weights, reader = list[Extent](), OptimizerReader()
    first_file, first, rows = description.file, description.state, description.padded_vocab_size
    for stage, number, expert in product(
        range(ranks.pipeline), range(ranks.tensor), range(ranks.experts)
    ):
        file = ranks.file(number, stage, expert)
        state = contents.get(file) or rank_file.read(file)
        rank_file.check_same_step(file, state, first_file=first_file, first_state=first)
        version = rank_file.version_of(state, file, default=_FIRST_VERSION)
        rank = TensorParallelRank(
            *(description.architecture, Axis(number, ranks.tensor), rows, version),
            experts=Axis(expert, ranks.experts),
        )
        stages: list[list[OptimizerParameter]] = []
        for name, tree in _trees(rank, layout, pipeline_rank=stage, layers=layers):
            in_file = grouped_experts.as_in_file(tree, state.get(name))
            extents = [*module_tree.locate(file, state.get(name), in_file)]
            weights += extents
            stages.append([*_parameters(state.get(name), in_file, weights=extents)])
        reader.add(file, state, stages)
    return weights, reader


def _parameters(
    module: Any, tree: Any, *, weights: Iterable[Extent]
) -> Iterator[OptimizerParameter]:
    """Yield the parameters of a stage in the order of its file."""
    dtypes = {extent.name: extent.dtype for extent in weights}
    for name, tensor in module_tree.in_file_order(module, tree).items():
        if tensor.is_trained:
            yield OptimizerParameter(name, tensor, dtypes[name])


def _trees(
    rank: TensorParallelRank, layout: ParallelLayout, *, pipeline_rank: int, layers: Sequence[range]
) -> Iterator[tuple[str, Any]]:
    """Yield the key and the tensors of each (virtual) stage in a rank's file."""
    trees = module_tree.rank_trees(rank, layout, pipeline_rank=pipeline_rank, layers=layers)
    for number, tree in enumerate(trees):
        yield _model_key(number, layout), tree


def _model_key(number: int, layout: ParallelLayout) -> str:
    return f"model{number}" if layout.virtual_pipeline_size > 1 else "model"


def _stored_layers(
    files_of: _RankFiles,
    states: Mapping[Path, dict[str, Any]],
    *,
    architecture: Architecture,
    layout: ParallelLayout,
) -> list[range]:
    """Return the layers of each stage in the files; Megatron-LM may divide them unevenly."""
    ranks, virtual = layout.pipeline_parallel_size, layout.virtual_pipeline_size
    counts = [0] * ranks * virtual
    for pipeline_rank in range(ranks):
        file = files_of.file(0, pipeline_rank)
        for number in range(virtual):
            key = _model_key(number, layout)
            numbers = module_tree.layer_numbers(states[file].get(key))
            missing = rank_file.first_missing(numbers, max(numbers, default=-1) + 1)
            if missing is not None:
                raise UserError(
                    f"{file}: {key} has layers up to {max(numbers)}, but none of number "
                    f"{missing}; {REMEDY}"
                )
            counts[number * ranks + pipeline_rank] = len(numbers)
    if (total := sum(counts)) != (expected := architecture.num_hidden_layers):
        fewest = min(range(len(counts)), key=counts.__getitem__)
        file, listed = files_of.file(0, fewest % ranks), ", ".join(map(str, counts))
        stages = f" (its stages have {listed}; the fewest are in {file})" * (len(counts) > 1)
        raise UserError(
            f"{files_of.folder}: has {total} layers{stages}, its arguments say {expected}; {REMEDY}"
        )
    ends = [*accumulate(counts)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write files of version 3.0 without the data of their tensors, with Adam's states if any."""
    if target.layout.zero_stage > 1:
        raise UserError(
            f"--zero-stage {target.layout.zero_stage}: Megatron-LM's distributed optimizer shares "
            "optimizer states alone; give 1, or 0 for its other optimizers"
        )
    if target.layout.zero_stage:
        remedy = "leave --zero-stage out, and the weights are written alone"
        otherwise = f"so Megatron-LM cannot resume from its states; {remedy}"
        adam.check_states(checkpoint, target.layout.zero_stage, otherwise=otherwise)
    layout, step = target.layout, checkpoint.progress.iteration
    ranks, stages = target_ranks(checkpoint.architecture, target), layout.pipeline_parallel_size
    rows = ranks[0].padded_vocab_size
    counters = {
        "args": as_megatron_lm(megatron_arguments(checkpoint, layout, padded_vocab_size=rows)),
        "checkpoint_version": 3.0,
        "iteration": step,
    }
    extents: list[Extent] = []
    with_states = adam.has_loadable_states(checkpoint)
    layers = module_tree.even_layers(checkpoint.architecture, stages * layout.virtual_pipeline_size)
    experts = layout.expert_parallel_size
    files_of = _RankFiles(folder / f"iter_{step:07d}", len(ranks), stages, experts)
    for stage, number, expert in product(range(stages), range(len(ranks)), range(experts)):
        file = files_of.file(number, stage, expert)
        file.parent.mkdir(parents=True)
        rank = replace(ranks[number], experts=Axis(expert, experts))
        trees = {
            key: core_names.as_stored(tree, checkpoint.architecture)
            for key, tree in _trees(rank, layout, pipeline_rank=stage, layers=layers)
        }
        model = module_tree.planned_tree(trees, checkpoint, target=target)
        states: dict[str, Any] = {}
        if with_states:
            model = optimizer_writer.with_master_weights(model, checkpoint.source)
            parts = _parts(
                model, trees, has_routers=checkpoint.architecture.has_routers, ranks=experts
            )
            states = optimizer_writer.planned_states(
                checkpoint, parts, is_distributed=bool(layout.zero_stage)
            )
        rank_extents = torch_archive.lay_out(file, {**model, **counters, **states})
        if with_states and layout.zero_stage:
            buffers = [optimizer_writer.planned_buffers(checkpoint, [*p.values()]) for p in parts]
            content = [None if expert else buffers[0], *buffers[1:]]
            state = content if len(content) > 1 else content[0]
            extents += torch_archive.lay_out(file.with_name(DISTRIBUTED), state)
        adam.write_loss_scale(checkpoint, rank_extents)
        extents += rank_extents
    files.write_text(folder / POINTER, f"{step}")
    return extents


def _parts(
    model: Mapping[str, Any], trees: Mapping[str, Any], *, has_routers: bool, ranks: int
) -> list[dict[str, Any]]:
    """Return the weights of each optimizer: experts that ranks share have one of their own."""
    if not has_routers:
        return [dict(model)]
    return [
        {
            key: {
                name: weights
                for name, weights in of_stage.items()
                if trees[key][name].is_trained and of_part in (None, trees[key][name].of_stack)
            }
            for key, of_stage in model.items()
        }
        for of_part in ((False, True) if ranks > 1 else (None,))
    ]


def warnings(checkpoint: Checkpoint) -> list[str]:
    """Return warnings: states that cannot be loaded, settings that Megatron-LM lacks."""
    return [
        *adam.unloadable_states_warnings(checkpoint),
        *argument_warnings(checkpoint, is_megatron_lm=True),
    ]


if TYPE_CHECKING:
    from tokamake.checkpoint.megatron import format as this_module

    _: CheckpointFormat = this_module
