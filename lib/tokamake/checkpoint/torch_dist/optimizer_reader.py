"""Locates the optimizer states in a distributed checkpoint of Megatron-LM.

Megatron's optimizers save them in one of two ways: as sharded tensors like the model's
(--dist-ckpt-optim-fully-reshardable, without the distributed optimizer and, flattened, in older
versions), or as the buckets of each rank's flat buffers (dp_reshardable).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.megatron_model import grouped_experts, module_tree
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
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    TensorSlice,
)
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
_GROUP = r"(?:chained_(\d)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\."
_BUCKET = re.compile(_GROUP + r"gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)")
_BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space")
_MTP, _SINKS = ("enorm", "hnorm", "eh_proj"), "self_attention.core_attention"
_OUTPUT, _QKV = "self_attention.dense", "self_attention.query_key_value"
_ORDERS: tuple[tuple[str, ...], ...] = (
    # Transformer Engine fuses a norm with the projection that follows it.
    (*_MTP, _SINKS, _OUTPUT, "input_layernorm", _QKV),
    (*_MTP, "input_layernorm", _SINKS, _OUTPUT, _QKV),
)
"""Orders in which megatron.core makes the first modules of a layer; then come all other modules."""
_PROJECTIONS = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
_LATENT_ORDERS: tuple[tuple[str, ...], ...] = (
    (*_MTP, "input_layernorm", _OUTPUT),
    (*_MTP, "input_layernorm", _OUTPUT, *(f"self_attention.linear_{n}" for n in _PROJECTIONS)),
)
"""The same of layers with latent attention."""


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
    first_keys: Mapping[str, str]
    """First keys of tensors by their second ones (`second_keys`)."""
    has_joined_experts: bool = False
    """Whether the experts of a layer can have been in two matrices."""


class _BucketOwner(NamedTuple):
    """The model-parallel rank whose optimizer has a group of buckets."""

    pipeline: int
    tensor: int
    expert: int = 0
    of_stack: bool | None = None
    """Whether the optimizer has experts, or what is no expert; None: it has both."""


def _owners(layout: ParallelLayout) -> dict[tuple[str | None, int], _BucketOwner]:
    """Return the owners by numbers of the chained optimizer, if there are several, and group."""
    tensor, experts = layout.tensor_parallel_size, layout.expert_parallel_size
    ranks = [*product(range(layout.pipeline_parallel_size), range(tensor))]
    if experts == 1:
        return {(None, number): _BucketOwner(*rank) for number, rank in enumerate(ranks)}
    # Experts that ranks share have an optimizer of their own.
    owners: dict[tuple[str | None, int], _BucketOwner] = {
        ("0", number): _BucketOwner(*rank, of_stack=False) for number, rank in enumerate(ranks)
    }
    for (stage, number), expert in product(ranks, range(experts)):
        place = (stage * experts + expert) * tensor + number
        owners["1", place] = _BucketOwner(stage, number, expert, of_stack=True)
    return owners


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
        saved = _first_optimizer(common)
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
        if match and f"{STATE_PREFIX}{match[1]}.{model.first_keys.get(match[2])}" in stored:
            continue
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
    _add_settings(states, common, saved=_first_optimizer(common), extents=states.extents)
    return states


def _first_optimizer(common: StoredObject) -> Any:
    """State of the optimizer, or of the first one: Megatron keeps their step counts equal."""
    saved = common.value.get(OPTIMIZER)
    return saved.get(0, saved) if isinstance(saved, Mapping) else saved


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
    groups: dict[tuple[str | None, int], dict[tuple[int, int], dict[str, str]]] = defaultdict(dict)
    for key in stored:
        match = _BUCKET.fullmatch(key)
        if match is None:
            raise _UnreadError(f"optimizer states in {key}")
        bucket = int(match[3]), int(match[4])
        groups[match[1], int(match[2])].setdefault(bucket, {})[match[5]] = key
    owners = _owners(model.layout)
    if groups.keys() != owners.keys():
        raise _UnreadError(f"optimizer states of {len(groups)} model-parallel ranks")
    states = OptimizerStates()
    for (chained, number), buckets in sorted(groups.items()):
        first = len(states.extents)
        for keys, parameters in _filled(
            buckets, stored, owner=owners[chained, number], model=model
        ):
            states.extents += _in_bucket(
                folder, stored, keys=keys, parameters=parameters, model=model
            )
        prefix = "" if chained is None else f"chained_{chained}."
        key = f"{prefix}optimizer.distributed.dp_group_idx_{number}.{{}}/shard_0_1"
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
    owner: _BucketOwner,
    model: StoredModel,
) -> Iterator[tuple[Mapping[str, str], list[BufferedParameter]]]:
    """Yield the keys of the states in each bucket of an owner, and its parameters."""
    layout = model.layout
    try:
        rank = TensorParallelRank(
            model.architecture,
            Axis(owner.tensor, layout.tensor_parallel_size),
            model.padded_vocab_size,
            experts=Axis(owner.expert, layout.expert_parallel_size),
        )
        layers = module_tree.even_layers(
            model.architecture, layout.pipeline_parallel_size * layout.virtual_pipeline_size
        )
    except UserError as error:
        raise _UnreadError(f"optimizer states in buckets ({error})") from None
    trees = [*module_tree.rank_trees(rank, layout, pipeline_rank=owner.pipeline, layers=layers)]
    if {buffer for buffer, _ in buckets} != {*range(len(trees))}:
        # One for each stage, unless weights have several dtypes.
        raise _UnreadError("optimizer states in buckets of an unknown number of buffers")
    for buffer, tree in enumerate(trees):
        keys = [buckets[at] for at in sorted(buckets) if at[0] == buffer]
        tensors = [stored[next(iter(each.values()))] for each in keys]
        slices = {
            name: tensor
            for name, tensor in module_tree.named_slices(tree)
            if owner.of_stack in (None, tensor.of_stack) and tensor.is_trained
        }
        filled = _fitting_order(slices, tensors, model=model)
        yield from zip(keys, filled, strict=True)


def _fitting_order(
    slices: Mapping[str, TensorSlice], buckets: Sequence[WholeTensor], *, model: StoredModel
) -> list[list[BufferedParameter]]:
    """Return the parameters of a stage's buckets, in the order that the stored chunks show.

    Megatron saves each parameter's elements apart. Raises _UnreadError unless one order fits.
    """
    fitting: list[list[list[BufferedParameter]]] = []
    for tensors in _orders(slices, model):
        try:
            filled = fill_buckets(tensors, [bucket.size[0] for bucket in buckets])
        except ValueError:
            continue
        starts = [
            {*(chunk.offset[0] for chunk in bucket.chunks), *bucket.size} for bucket in buckets
        ]
        if filled not in fitting and all(
            {parameter.start, parameter.stop} <= of_bucket
            for parameters, of_bucket in zip(filled, starts, strict=True)
            for parameter in parameters
        ):
            fitting.append(filled)
    if len(fitting) != 1:
        raise _UnreadError("optimizer states in buckets of an unknown order")
    return fitting[0]


def _orders(slices: Mapping[str, TensorSlice], model: StoredModel) -> Iterator[list[TensorSlice]]:
    """Yield the parameters in each order in which megatron.core may have made them."""
    for order in _LATENT_ORDERS if model.architecture.latent_size else _ORDERS:
        yield [slices[name] for name in sorted(slices, key=lambda name: _place(name, order))]
        if not model.architecture.has_routers:
            continue
        # One module of Transformer Engine has the first projections of all experts of a layer.
        grouped = sorted(slices, key=lambda name: (*_place(name, order), _in_group(name)))
        yield [slices[name] for name in grouped]
        if model.has_joined_experts:
            joined = grouped_experts.joined(slices)
            yield [joined[name] for name in sorted(joined, key=lambda name: _place(name, order))]


def _in_group(name: str) -> int:
    """Return the place of a module within an MLP: first and second projections of experts."""
    if match := re.search(r"\.local_experts\.\d+\.linear_fc([12])\.", name):
        return int(match[1])
    return 3 * (".shared_experts." in name)


def _place(name: str, order: Sequence[str]) -> tuple[int, int, int]:
    """Return a sort key: modules before the layers, layers with their modules, later modules."""
    match = re.search(r"\.layers\.(\d+)\.(.+)", name)
    # A decoder beside an encoder comes after its norm.
    in_decoder = 2 * (".decoder." in name or ".mtp." in name)
    if match is None:
        is_last = ".output_layer." in name
        return (0 if ".embedding." in name else 2 + in_decoder + 2 * is_last), 0, 0
    module = match[2].removeprefix("transformer_layer.")
    places = (number for number, first in enumerate(order) if module.startswith(f"{first}."))
    # The norm after a layer that predicts further tokens is its last module.
    is_last = module.startswith("final_layernorm.")
    return 1 + in_decoder, int(match[1]), next(places, len(order)) + is_last


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
        try:
            chunks = (*(each._replace(start=each.start + chunk.start) for each in pieces),)
        except ValueError as error:
            raise _UnreadError(f"optimizer states in {extent.name} ({error})") from None
        if chunks:
            yield replace(extent, chunks=chunks)
