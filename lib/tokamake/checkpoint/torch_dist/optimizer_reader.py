"""Locates the optimizer states in a distributed checkpoint of Megatron-LM.

Megatron's optimizers save them in one of two ways: as sharded tensors like the model's
(--dist-ckpt-optim-fully-reshardable, without the distributed optimizer and, flattened, in older
versions), or as the buckets of each rank's flat buffers (dp_reshardable).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokamake.checkpoint.megatron_model import module_tree
from tokamake.checkpoint.megatron_model.adam import GROWTH, OPTIMIZER, SCALE, SCALER, STEP
from tokamake.checkpoint.megatron_model.optimizer_buffers import (
    BufferedParameter,
    fill_buckets,
    range_chunks,
)
from tokamake.checkpoint.megatron_model.optimizer_states import (
    MASTER,
    OptimizerStates,
    parameter_name,
    settings_note,
)
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorParallelRank
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.checkpoint.torch_dist.sharded_tensors import (
    ShardedTensor,
    StoredObject,
    is_flattened,
    read_shard,
    to_whole_tensors,
    unflattened,
)
from tokamake.checkpoint.torch_files import dcp_archives
from tokamake.checkpoint.torch_files.dcp_metadata import Contents, WholeTensor
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

SHARDING, FULLY_RESHARDABLE = "param_state_sharding_type", "fully_reshardable"
"""Key that says how a distributed optimizer was saved, and its value for sharded tensors."""
STATE_PREFIX = "optimizer.state."
MASTERS = ("fp32_param", "param")
"""Kinds of states that are fp32 weights: of the optimizer for 16-bit weights, and of the
distributed optimizer."""
_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_GROUP = r"optimizer\.distributed\.dp_group_idx_(\d+)\."
_BUCKET = re.compile(_GROUP + r"gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)")
_BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space")
_ORDERS = (
    # Transformer Engine fuses a norm with the projection that follows it.
    ("self_attention.dense", "input_layernorm", "self_attention.query_key_value"),
    ("input_layernorm", "self_attention.dense", "self_attention.query_key_value"),
)
"""Orders in which megatron.core makes the first modules of a layer; then come all other modules."""


class _UnreadError(Exception):
    """tokamake cannot read these states; the message describes them."""


@dataclass(frozen=True)
class StoredModel:
    """The model of a checkpoint."""

    architecture: Architecture
    padded_vocab_size: int
    layout: ParallelLayout
    tensors: Mapping[str, ShardedTensor]
    """Sharded tensors by the key of the weights."""
    is_fp32: bool
    """Whether all weights are fp32, so that the optimizer's weights are copies."""


def is_state(key: str) -> bool:
    return key.startswith(("optimizer.", "chained_"))


def read_states(
    folder: Path, contents: Contents, *, common: StoredObject, model: StoredModel
) -> tuple[OptimizerStates, tuple[str, ...]]:
    """Locate the optimizer states; if some cannot be read, return their descriptions alone."""
    stored = {key: each for key, each in contents.tensors.items() if is_state(key)}
    has_objects = any(is_state(key) for key in contents.objects)
    if not stored and not has_objects:
        return OptimizerStates(), ()
    try:
        saved = common.value.get(OPTIMIZER)
        sharding = saved.get(SHARDING) if isinstance(saved, Mapping) else None
        if sharding in _BUCKETS:
            return _from_buckets(folder, contents, stored=stored, model=model), ()
        if any(map(_BUCKET.fullmatch, stored)) or not stored:
            raise _UnreadError(f"optimizer states sharded as {sharding}")
        return _from_tensors(folder, stored, common=common, model=model), ()
    except _UnreadError as error:
        return OptimizerStates(), (str(error),)


def _from_tensors(
    folder: Path, stored: Mapping[str, WholeTensor], *, common: StoredObject, model: StoredModel
) -> OptimizerStates:
    """Locate states that are sharded like the model."""
    owners: dict[str, tuple[str, ShardedTensor]] = {}
    for key, tensor in stored.items():
        match = _STATE.fullmatch(key)
        owner = model.tensors.get(match[2]) if match else None
        if match is None or owner is None:
            raise _UnreadError(f"optimizer states in {key}")
        if tensor.size != owner.shape and not is_flattened(tensor.size, owner):
            raise _UnreadError(f"optimizer states in {key}")
        if match[1] not in MASTERS:
            owners[key] = f"optimizer.{match[1]}.", owner
        elif not model.is_fp32 and not _has_twin(match, stored):
            owners[key] = MASTER, owner
    states = OptimizerStates()
    for extent in dcp_archives.locate(folder, {key: stored[key] for key in owners}):
        prefix, owner = owners[extent.name]
        if (size := stored[extent.name].size) != owner.shape:
            try:
                extent = unflattened(extent, size, tensor=owner)
            except ValueError as error:
                raise _UnreadError(f"optimizer states in {extent.name} ({error})") from None
        states.extents.append(to_whole_tensors(extent, owner, prefix=prefix))
    _add_settings(states, common, saved=common.value.get(OPTIMIZER), extents=states.extents)
    return states


def _has_twin(match: re.Match[str], stored: Mapping[str, WholeTensor]) -> bool:
    """Whether fp32 weights are stored under the first of two names, too."""
    return match[1] == MASTERS[1] and f"{STATE_PREFIX}{MASTERS[0]}.{match[2]}" in stored


def _add_settings(
    states: OptimizerStates, place: StoredObject, *, saved: Any, extents: Sequence[Extent]
) -> None:
    """Add step counts of the parameters in `extents`, settings and loss scale."""
    inner = saved.get(OPTIMIZER, saved) if isinstance(saved, Mapping) else {}
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    states.notes = settings_note(groups) | states.notes
    steps = [group.get(STEP) for group in groups or () if isinstance(group, Mapping)]
    state = inner.get("state") if isinstance(inner, Mapping) else None
    if isinstance(state, Mapping):
        steps.append(state.get("common_step"))
    counts = {count for step in steps if (count := place.number(step)) is not None}
    # Megatron keeps a single count for all parameters.
    if len(counts) == 1:
        keys = (chunk.key for extent in extents for chunk in extent.chunks)
        names = (parameter_name(key) for key in keys)
        states.values |= dict.fromkeys((f"optimizer.{STEP}.{name}" for name in names), *counts)
    scaler = saved.get(SCALER) if isinstance(saved, Mapping) else None
    if isinstance(scaler, Mapping) and (scale := place.number(scaler.get(SCALE))) is not None:
        growth = scaler.get(GROWTH)
        states.notes["loss_scale"] = scale, growth if isinstance(growth, int) else 0


def _from_buckets(
    folder: Path, contents: Contents, *, stored: Mapping[str, WholeTensor], model: StoredModel
) -> OptimizerStates:
    groups: dict[int, dict[tuple[int, int], dict[str, str]]] = defaultdict(dict)
    for key in stored:
        match = _BUCKET.fullmatch(key)
        if match is None:
            raise _UnreadError(f"optimizer states in {key}")
        group, *bucket = map(int, match.groups()[:3])
        groups[group].setdefault((bucket[0], bucket[1]), {})[match[4]] = key
    layout = model.layout
    if {*groups} != {*range(layout.tensor_parallel_size * layout.pipeline_parallel_size)}:
        raise _UnreadError(f"optimizer states of {len(groups)} model-parallel ranks")
    states = OptimizerStates()
    for group, buckets in sorted(groups.items()):
        first = len(states.extents)
        for keys, parameters in _filled(buckets, stored, group=group, model=model):
            states.extents += _in_bucket(
                folder, stored, keys=keys, parameters=parameters, model=model
            )
        key = f"optimizer.distributed.dp_group_idx_{group}.{{}}/shard_0_1"
        saved = {
            name: read_shard(folder, key.format(name), location=contents.objects[key.format(name)])
            for name in (OPTIMIZER, SCALER)
            if key.format(name) in contents.objects
        }
        for name, place in saved.items():
            extents = states.extents[first:]
            _add_settings(states, place, saved={name: place.value}, extents=extents)
    return states


def _filled(
    buckets: Mapping[tuple[int, int], Mapping[str, str]],
    stored: Mapping[str, WholeTensor],
    *,
    group: int,
    model: StoredModel,
) -> Iterator[tuple[Mapping[str, str], list[BufferedParameter]]]:
    """Yield the keys of the states in each bucket of a model-parallel rank, and its parameters."""
    pipeline_rank, number = divmod(group, model.layout.tensor_parallel_size)
    layout = model.layout
    try:
        rank = TensorParallelRank(
            model.architecture, Axis(number, layout.tensor_parallel_size), model.padded_vocab_size
        )
        layers = module_tree.even_layers(
            model.architecture, layout.pipeline_parallel_size * layout.virtual_pipeline_size
        )
    except UserError as error:
        raise _UnreadError(f"optimizer states in buckets ({error})") from None
    trees = [*module_tree.rank_trees(rank, layout, pipeline_rank=pipeline_rank, layers=layers)]
    if {buffer for buffer, _ in buckets} != {*range(len(trees))}:
        # One for each stage, unless weights have several dtypes.
        raise _UnreadError("optimizer states in buckets of an unknown number of buffers")
    for buffer, tree in enumerate(trees):
        keys = [buckets[at] for at in sorted(buckets) if at[0] == buffer]
        tensors = [stored[next(iter(each.values()))] for each in keys]
        filled = _fitting_order(tree, tensors)
        yield from zip(keys, filled, strict=True)


def _fitting_order(tree: Any, buckets: Sequence[WholeTensor]) -> list[list[BufferedParameter]]:
    """Return the parameters of a stage's buckets, in the order that the stored chunks show.

    Megatron saves each parameter's elements apart. Raises _UnreadError unless one order fits.
    """
    fitting = []
    for order in _ORDERS:
        tensors = sorted(module_tree.named_slices(tree), key=lambda item: _place(item[0], order))
        try:
            filled = fill_buckets(
                [tensor for _, tensor in tensors], [bucket.size[0] for bucket in buckets]
            )
        except ValueError:
            continue
        starts = [
            {*(chunk.offset[0] for chunk in bucket.chunks), *bucket.size} for bucket in buckets
        ]
        if all(
            {parameter.start, parameter.stop} <= of_bucket
            for parameters, of_bucket in zip(filled, starts, strict=True)
            for parameter in parameters
        ):
            fitting.append(filled)
    if len(fitting) != 1:
        raise _UnreadError("optimizer states in buckets of an unknown order")
    return fitting[0]


def _place(name: str, order: Sequence[str]) -> tuple[int, int, int]:
    """Return a sort key: modules before the layers, layers with their modules, later modules."""
    match = re.search(r"\.layers\.(\d+)\.(.+)", name)
    # A decoder beside an encoder comes after its norm.
    in_decoder = 2 * (".decoder." in name)
    if match is None:
        return (0 if ".embedding." in name else 2 + in_decoder), 0, 0
    places = (number for number, module in enumerate(order) if match[2].startswith(f"{module}."))
    return 1 + in_decoder, int(match[1]), next(places, len(order))


def _in_bucket(
    folder: Path,
    stored: Mapping[str, WholeTensor],
    *,
    keys: Mapping[str, str],
    parameters: Sequence[BufferedParameter],
    model: StoredModel,
) -> Iterator[Extent]:
    """Locate the states in a bucket, by kind."""
    prefixes = {
        key: MASTER if kind in MASTERS else f"optimizer.{kind}."
        for kind, key in keys.items()
        if kind not in MASTERS or not model.is_fp32
    }
    for extent in dcp_archives.locate(folder, {key: stored[key] for key in prefixes}):
        (chunk,) = extent.chunks
        (at,) = chunk.slices
        pieces = range_chunks(parameters, at.start, stop=at.stop, prefix=prefixes[extent.name])
        chunks = (*(each._replace(start=each.start + chunk.start) for each in pieces),)
        if chunks:
            yield replace(extent, chunks=chunks)
