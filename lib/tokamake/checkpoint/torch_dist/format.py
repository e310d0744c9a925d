"""Format `torch-dist`: Megatron-LM's distributed checkpoint, whatever layout of ranks has saved it.

iter_<N>/ holds sharded tensors in the files of torch's distributed checkpoint (DCP), `common.pt`
with Megatron's arguments and counters, and `metadata.json` with the kind of the files. Megatron
loads it at any parallel layout.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import files
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import candidates
from tokamake.checkpoint.megatron_model import adam, module_tree, rank_file
from tokamake.checkpoint.megatron_model.args_reader import Description
from tokamake.checkpoint.megatron_model.args_writer import (
    argument_warnings,
    as_megatron_lm,
    megatron_arguments,
)
from tokamake.checkpoint.megatron_model.core_names import second_keys
from tokamake.checkpoint.megatron_model.optimizer_states import (
    MODEL,
    OPT_PARAM_SCHEDULER,
    scheduler_note,
    scheduler_state,
)
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import target_ranks
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout, Target
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor
from tokamake.checkpoint.torch_dist import extra_states, optimizer_reader
from tokamake.checkpoint.torch_dist.optimizer_reader import (
    FULLY_RESHARDABLE,
    MASTERS,
    SHARDING,
    STATE_PREFIX,
    StoredModel,
)
from tokamake.checkpoint.torch_dist.sharded_tensors import (
    COMMON_FILE,
    ShardedTensor,
    match_tensors,
    read_common,
    sharded_tensors,
    to_whole_tensors,
)
from tokamake.checkpoint.torch_files import (
    dcp_archives,
    dcp_metadata,
    dcp_metadata_writer,
    torch_archive,
)
from tokamake.checkpoint.torch_files.dcp_archives import PlannedArchive
from tokamake.checkpoint.torch_files.dcp_metadata import WholeTensor
from tokamake.errors import UserError

TITLE = "Megatron-LM, distributed (torch_dist)"
SUMMARY = "Megatron-LM's torch_dist, its default, for any number of ranks; with states of Adam"
PRIORITY = 45
SIZES = {"expert_parallel_size": None}
STEP_FOLDER = r"iter_(\d+)"
POINTER = "latest_checkpointed_iteration.txt"
NUMBERED_FOLDER = "iter_{:07d}"  # The file may also hold a name, such as `release`.
NEAR_MISSES = {
    ("*.distcp",): "has no metadata.json, which Megatron-LM writes last, and no tokamake.json of a "
    "native checkpoint; fetch all files again, or name another checkpoint"
}

_KIND = "metadata.json"
"""File that says how the tensors are stored."""
_TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_EMBEDDING = "embedding.word_embeddings.weight"
_STEP = "tokamake_optimizer_step"
"""Key of the common state that only tokamake writes."""


def find(path: Path) -> Path | None:
    """Return the folder of the checkpoint, or None if it has another format."""
    folders = candidates(path, POINTER, NUMBERED_FOLDER)
    return next(filter(_is_checkpoint, folders), None)


def _is_checkpoint(folder: Path) -> bool:
    # Other folders have a metadata.json, too, such as the datasets of a run.
    beside = (dcp_metadata.FILE, COMMON_FILE)
    return (folder / _KIND).is_file() and any((folder / name).is_file() for name in beside)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint in a folder that `find` returned."""
    _check_kind(folder)
    contents = dcp_metadata.read_contents(folder, may_share=True)
    dcp_metadata.check_files(folder, contents)
    common = read_common(folder, contents)
    if _EMBEDDING not in contents.tensors:
        raise UserError(f"{folder}: has no {_EMBEDDING}; give a checkpoint of a language model")
    args, rows = common.value.get("args"), contents.tensors[_EMBEDDING].size[0]
    has_decoder = module_tree.has_both_stacks(contents.tensors)
    names = frozenset(
        # Layers that lie in one tensor have no number.
        re.sub(r"\.layers\.(?!\d)", ".layers.0.", name)
        for key in contents.tensors
        for name in [module_tree.current_name(key, has_decoder=has_decoder)]
    )
    description = Description(common.file, common.value, args, rows, is_core=True, names=names)
    architecture = description.architecture
    first_keys = second_keys(architecture, contents.tensors)
    stored = {
        key: tensor
        for key, tensor in contents.tensors.items()
        if not optimizer_reader.is_state(key)
        and not module_tree.is_buffer(key)
        and first_keys.get(key) not in contents.tensors
    }
    expected = sharded_tensors(architecture, padded_vocab_size=rows)
    tensors = match_tensors(folder, stored, model=expected)
    for key, tensor in stored.items():
        model_tensors.check_dtype(key, tensor.dtype, where=folder)
    weights = [
        to_whole_tensors(extent, tensors[extent.name], prefix=MODEL)
        for extent in dcp_archives.locate(folder, stored)
    ]
    model = StoredModel(
        architecture,
        rows,
        _layout(args, common.file),
        tensors | {key: tensors[first] for key, first in first_keys.items() if first in tensors},
        is_fp32=all(tensor.dtype == FLOAT32 for tensor in stored.values()),
        first_keys=first_keys,
        has_joined_experts=bool(getattr(args, "moe_grouped_gemm", False)),
    )
    states, unread = optimizer_reader.read_states(folder, contents, common=common, model=model)
    return description.checkpoint(
        "torch_dist",
        folder,
        states.source(weights, model_tensors.weight_shapes(architecture)),
        unread=unread,
        notes={**states.notes, **scheduler_note(common.value)},
    )


def _check_kind(folder: Path) -> None:
    kind: Any = files.read_json(folder / _KIND, REMEDY)
    backend = kind.get("sharded_backend") if isinstance(kind, dict) else None
    if backend != _TORCH_DIST["sharded_backend"]:
        raise UserError(
            f"{folder / _KIND}: sharded_backend: {backend!r}: is not supported; load it with the "
            "Megatron-LM that wrote it, and save it with --ckpt-format torch_dist"
        )


def _layout(args: Any, file: Path) -> ParallelLayout:
    """Return the layout of the run that saved the checkpoint; it matters for buckets only."""
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
    )
    tensor, pipeline, virtual, experts = (
        rank_file.whole_number(getattr(args, name, None) or 1, f"{file}: args.{name}")
        for name in names
    )
    return ParallelLayout(tensor, pipeline, virtual, expert_parallel_size=experts)


def archives(files: Iterable[Path]) -> dict[Path, list[tuple[int, int]]]:
    """Return first byte and length of the archives in each file."""
    paths = [*files]
    all_archives = torch_archive.archives(p for p in paths if p.name == COMMON_FILE)
    for folder in {file.parent for file in paths if file.suffix == dcp_metadata.SUFFIX}:
        all_archives |= dcp_metadata.archives(folder)
    return all_archives


def warnings(checkpoint: Checkpoint) -> list[str]:
    """Return warnings: states that cannot be loaded, settings that Megatron-LM lacks."""
    missing = (
        f"{checkpoint.path}: has no optimizer states: give Megatron-LM --no-load-optim or "
        "--finetune"
    )
    return [
        *([] if adam.has_states(checkpoint) else [missing]),
        *adam.unloadable_states_warnings(checkpoint),
        *argument_warnings(checkpoint, is_megatron_lm=True),
    ]


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write the files without the data of their tensors, with Adam's states if any.

    Both of Megatron's optimizers load the states: fp32 weights have the names of both.
    """
    step, with_states = checkpoint.progress.iteration, adam.has_loadable_states(checkpoint)
    (rank,) = target_ranks(checkpoint.architecture, target)
    model = sharded_tensors(checkpoint.architecture, padded_vocab_size=rank.padded_vocab_size)
    step_folder = folder / f"iter_{step:07d}"
    step_folder.mkdir()
    files.write_json(step_folder / _KIND, _TORCH_DIST)
    weights = [*_planned(model, checkpoint, target=target, with_states=with_states)]
    trained = {tensor.key for tensor in model if tensor.members[0].is_trained}
    parameters = [each for each in weights if each.key in trained]
    planned = [*weights, *(_planned_states(parameters, checkpoint) if with_states else ())]
    tensors, extents = dcp_archives.lay_out(
        step_folder, planned, max_shard_bytes=target.max_shard_bytes
    )
    if with_states:
        tensors |= _second_names(tensors, trained)
    first_keys = second_keys(checkpoint.architecture, {tensor.key for tensor in model})
    tensors |= _under_second_keys(tensors, first_keys)
    # A single archive stands for all extra states.
    location = dcp_archives.write_object(step_folder, [None])
    keys = extra_states.keys_of(checkpoint.architecture, model)
    objects = dict.fromkeys(keys, location)
    dcp_metadata_writer.write(step_folder, tensors, objects)
    state = _common_state(
        checkpoint,
        parameters,
        layout=target.layout,
        padded_vocab_size=rank.padded_vocab_size,
        with_states=with_states,
    )
    common_extents = torch_archive.lay_out(step_folder / COMMON_FILE, state)
    adam.write_loss_scale(checkpoint, common_extents)
    files.write_text(folder / POINTER, f"{step}")
    return [*extents, *common_extents]


def _planned(
    model: Iterable[ShardedTensor], checkpoint: Checkpoint, *, target: Target, with_states: bool
) -> Iterator[PlannedArchive]:
    for sharded in model:
        places = product(*map(range, sharded.stack))
        for place, member in zip(places, sharded.members, strict=True):
            tensor = module_tree.planned_tree(member, checkpoint, target=target)
            if with_states and tensor.dtype == FLOAT32:
                # Training continues from the optimizer's exact values.
                tensor = adam.planned_master(tensor, checkpoint.source)
            shape = (*[1] * len(place), *tensor.shape)
            planned = PlannedTensor(shape, tensor.dtype, tensor.chunks)
            yield PlannedArchive(sharded.key, (*place, *[0] * len(tensor.shape)), planned)


def _planned_states(
    weights: Iterable[PlannedArchive], checkpoint: Checkpoint
) -> Iterator[PlannedArchive]:
    """Plan the moments of each parameter, and fp32 weights of 16-bit parameters."""
    for key, offset, tensor in weights:
        if tensor.dtype != FLOAT32:
            master = adam.planned_master(tensor, checkpoint.source)
            yield PlannedArchive(f"{STATE_PREFIX}{MASTERS[0]}.{key}", offset, master)
        for kind in adam.MOMENTS:
            moment = adam.planned_moment(tensor, kind)
            yield PlannedArchive(f"{STATE_PREFIX}{kind}.{key}", offset, moment)


def _second_names(
    tensors: Mapping[str, WholeTensor], keys: Iterable[str]
) -> dict[str, WholeTensor]:
    """Return the fp32 weights of parameters by their names in the distributed optimizer."""
    return {
        f"{STATE_PREFIX}{MASTERS[1]}.{key}": tensors.get(
            f"{STATE_PREFIX}{MASTERS[0]}.{key}", tensors[key]
        )
        for key in keys
    }


def _under_second_keys(
    tensors: Mapping[str, WholeTensor], first_keys: Mapping[str, str]
) -> dict[str, WholeTensor]:
    """Return tensors that have a second key, and their states, by this key."""
    return {
        key.removesuffix(first) + second: tensor
        for key, tensor in tensors.items()
        for second, first in first_keys.items()
        if key == first or (key.startswith(STATE_PREFIX) and key.endswith(f".{first}"))
    }


def _common_state(
    checkpoint: Checkpoint,
    weights: Iterable[PlannedArchive],
    *,
    layout: ParallelLayout,
    padded_vocab_size: int,
    with_states: bool,
) -> dict[str, Any]:
    args = megatron_arguments(checkpoint, layout, padded_vocab_size=padded_vocab_size)
    # A run that continues seeds its random generators again.
    args.no_save_rng, args.no_save_optim = True, not with_states
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": FULLY_RESHARDABLE,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    state = {
        "args": as_megatron_lm(args),
        "checkpoint_version": 3.0,
        "iteration": checkpoint.progress.iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": metadata,
    }
    if not with_states:
        return state
    stored = {each.tensor.dtype for each in weights}
    # Experts that ranks share have an optimizer of their own; they have no norms.
    of_experts = (True, False) if checkpoint.architecture.mlp_bias else (True,)
    groups = [((True, False), False), (of_experts, True)][: 1 + (layout.expert_parallel_size > 1)]
    saved = [
        _optimizer(checkpoint, stored, decays=decays, of_experts=is_second)
        for decays, is_second in groups
    ]
    step = next(key for key in checkpoint.source if key.startswith(f"optimizer.{adam.STEP}."))
    return state | {
        adam.OPTIMIZER: dict(enumerate(saved)) if len(saved) > 1 else saved[0],
        OPT_PARAM_SCHEDULER: scheduler_state(checkpoint),
        # The same number as a tensor. Megatron ignores it.
        _STEP: PlannedTensor((), FLOAT32, (Chunk(step, ()),)),
    }


def _optimizer(
    checkpoint: Checkpoint, dtypes: set[Dtype], *, decays: tuple[bool, ...], of_experts: bool
) -> dict[str, Any]:
    """State of an optimizer besides its tensors; `decays`: whether each of its groups decays."""
    # The groups have the number of updates. torch's Adam would also keep it with the parameters,
    # which Transformer Engine's Adam, Megatron's default, refuses.
    inner = {
        "state": {},
        "param_groups": [
            adam.param_group(checkpoint, decays=each, of_experts=of_experts) for each in decays
        ],
    }
    saved = {
        adam.OPTIMIZER: inner,
        **adam.loss_scaler(checkpoint, {dtype.short for dtype in dtypes}),
        SHARDING: FULLY_RESHARDABLE,
    }
    # The optimizer for fp32 weights, unless it is distributed, wraps no other one.
    return inner | saved if dtypes == {FLOAT32} else saved


if TYPE_CHECKING:
    from tokamake.checkpoint.torch_dist import format as this_module

    _: CheckpointFormat = this_module
