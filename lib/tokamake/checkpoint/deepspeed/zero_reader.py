"""Locates DeepSpeed's optimizer states of ZeRO stages 1 to 3 in the files of all ranks.

global_step<N>/[bf16_]zero_pp_rank_<D>_mp_rank_<M>_optim_states.pt is the partition of data-parallel
rank D of model-parallel rank M. For each parameter group it holds flat tensors. In stages 1 and 2,
a group's parameters are concatenated and cut anywhere; in stage 3, each parameter is cut.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.experts import NO_EXPERTS, ExpertRanks
from tokamake.checkpoint.megatron_model import rank_file
from tokamake.checkpoint.megatron_model.module_tree import current_name
from tokamake.checkpoint.megatron_model.optimizer_states import (
    MASTER,
    MODEL,
    OptimizerStates,
    parameter_name,
    settings_note,
    state_chunks,
)
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorSlice
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent, cut
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.allowed_globals import StandIn, value_of
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor
from tokamake.errors import UserError

_FP32_WEIGHTS = "single_partition_of_fp32_groups"
_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
"""DeepSpeed's ZeroStageEnum."""
_Partition = tuple[Path, dict[str, Any]]
"""A file, and its optimizer_state_dict."""


class FlatRange(NamedTuple):
    """A range of elements of a tensor that lies in a larger flat tensor."""

    name: str
    start: int
    """First element of the tensor in the range."""
    stop: int
    offset: int
    """Element of the flat tensor where the range begins."""


def partition_ranges(
    sizes: Sequence[tuple[str, int]], start: int, *, stop: int
) -> Iterator[FlatRange]:
    """Yield the ranges of concatenated tensors that lie in a partition, as in ZeRO 1 and 2.

    `sizes`: name and number of elements of each tensor. `stop` may lie in the padding after them.
    """
    ends = accumulate(size for _, size in sizes)
    for (name, size), end in zip(sizes, ends, strict=True):
        begin = end - size
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield FlatRange(name, low - begin, high - begin, low - start)


def slice_size(size: int, num_ranks: int) -> int:
    """Return the number of elements of a tensor on each rank in ZeRO 3; the last has padding."""
    return -(-size // num_ranks)


def slice_range(name: str, size: int, *, rank: int, num_ranks: int, offset: int) -> FlatRange:
    """Return the range of a tensor on a rank in ZeRO 3; it is empty if earlier ranks hold it all.

    `offset`: element of the rank's flat tensor where the slice begins.
    """
    start, stop = (min(size, number * slice_size(size, num_ranks)) for number in (rank, rank + 1))
    return FlatRange(name, start, stop, offset)


class _FlatGroup(NamedTuple):
    """The flat tensors of a parameter group in a file."""

    file: Path
    ranges: Sequence[FlatRange]
    """The parameters in the flat tensors."""
    weights: PickledTensor
    states: Mapping[str, Any]
    """By kind: a tensor like `weights`, or a number that all parameters share."""


def read_states(
    folder: Path,
    ranks: Sequence[Mapping[str, TensorSlice]],
    *,
    tensor_parallel_size: int,
    weights: Sequence[Extent],
    experts: ExpertRanks = NO_EXPERTS,
) -> OptimizerStates:
    """Locate the optimizer states of a checkpoint.

    Args:
        ranks: tensors that each model-parallel rank may have, by DeepSpeed's names.
        weights: extents of weights in other files. If all are fp32, the optimizer's fp32 weights
            are copies and are not read.
    """
    states, owners = OptimizerStates(), dict[tuple[int, str], int]()
    if not any(_FILE.fullmatch(file.name) for file in folder.iterdir()):
        return states
    weights_prefix: str | None = MASTER if weights else MODEL
    if weights and all(extent.dtype == FLOAT32 for extent in weights):
        weights_prefix = None
    for model_rank, slices in enumerate(ranks):
        partitions = _partitions(folder, model_rank)
        _describe(states, partitions)
        for group in _groups(folder, model_rank, partitions=partitions, experts=experts):
            # Several pipeline stages hold a tied parameter. The states of the first one count.
            owned: dict[str, TensorSlice] = {}
            for name in {flat_range.name for flat_range in group.ranges}:
                owner = owners.setdefault((model_rank % tensor_parallel_size, name), model_rank)
                if owner == model_rank:
                    tensor = _slice(slices, name, file=group.file)
                    if not tensor.is_replica:
                        owned[name] = tensor
            _add(states, group, owned=owned, weights_prefix=weights_prefix)
    return states


def _describe(states: OptimizerStates, partitions: Sequence[_Partition]) -> None:
    state = partitions[0][1]
    states.data_parallel_size, states.zero_stage = len(partitions), _stage(state)
    states.notes["loss_scale"] = _loss_scale(state)
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    states.notes |= settings_note(base.get("param_groups") if isinstance(base, dict) else None)


def _partitions(folder: Path, model_rank: int) -> list[_Partition]:
    matches = {file: _FILE.fullmatch(file.name) for file in folder.iterdir()}
    files = {int(m[1]): file for file, m in matches.items() if m and int(m[2]) == model_rank}
    partitions = []
    for _, file in sorted(files.items()):
        state = rank_file.read(file).get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise UserError(f"{file}: holds no optimizer_state_dict; {REMEDY}")
        partitions.append((file, state))
    # Stages 1 and 2 record a count for each parameter group, stage 3 a single one.
    counts = partitions[0][1].get("partition_count") if partitions else 1
    count = max(counts) if isinstance(counts, list) else int(counts or len(files))
    missing = rank_file.first_missing(files.keys(), max(count, *files, 1))
    if missing is not None:
        raise UserError(
            f"{folder}: has no optimizer states of data-parallel rank {missing} of {count} "
            f"(model-parallel rank {model_rank}); {REMEDY}"
        )
    return partitions


def _groups(
    folder: Path, model_rank: int, *, partitions: Sequence[_Partition], experts: ExpertRanks
) -> list[_FlatGroup]:
    model_states = rank_file.read(deepspeed_folder.model_states_path(folder, model_rank))
    shapes = model_states.get("param_shapes")
    try:
        if shapes is None:
            return [*_mapped_groups(partitions)]
        if _stage(partitions[0][1]) == 3:
            return [*_stage_3_groups(shapes, partitions)]
        return [*_stage_1_and_2_groups(shapes, partitions, experts=experts)]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{partitions[0][0]}: optimizer states in an unknown order ({reason}); convert them "
            "with DeepSpeed's ds_to_universal, and give the universal checkpoint"
        ) from None


def _stage(state: Mapping[str, Any]) -> int:
    if "fp32_flat_groups" in state:
        return 3
    recorded = state.get("zero_stage", 1)
    if (stage := value_of(recorded, _STAGES)) is None:
        raise UserError(f"zero_stage: {recorded!r}: not a known stage of DeepSpeed; {REMEDY}")
    return int(stage)


def _loss_scale(state: Mapping[str, Any]) -> tuple[float, int]:
    """Return the loss scale, and 0 for the steps since its last change, which are not recorded."""
    scaler = state.get("loss_scaler")
    values = scaler.values if isinstance(scaler, StandIn) else {}
    return float(values.get("cur_scale", 1.0)), 0


def _slice(slices: Mapping[str, TensorSlice], name: str, *, file: Path) -> TensorSlice:
    tensor = slices.get(current_name(name.removeprefix("module.")))
    if tensor is None:
        raise UserError(f"{file}: has states of {name}, which is not part of the model; {REMEDY}")
    return tensor


def _stage_1_and_2_groups(
    groups: Sequence[Mapping[str, Sequence[int]]],
    partitions: Sequence[_Partition],
    *,
    experts: ExpertRanks,
) -> Iterator[_FlatGroup]:
    """Yield groups whose concatenated parameters are cut into equal partitions."""
    for index, shapes in enumerate(groups):
        flat_groups = [
            _FlatGroup(
                file,
                (),
                state[_FP32_WEIGHTS][index],
                _torch_states(state["base_optimizer_state"], index),
            )
            for file, state in partitions
        ]
        # The file may omit the padding of fp32 weights, but not of moments. Thus the longest
        # tensor of all ranks has the size of a partition.
        size = max(
            tensor.numel for flat in flat_groups for tensor in (flat.weights, *_tensors(flat))
        )
        paddings = partitions[0][1].get("param_alignment_paddings")
        for rank, flat in enumerate(flat_groups):
            place, own = experts.place(shapes, rank, num_ranks=len(partitions))
            sizes = [*_sizes(own, paddings[index] if paddings else [0] * len(shapes))]
            ranges = partition_ranges(sizes, place * size, stop=(place + 1) * size)
            yield flat._replace(ranges=[flat_range for flat_range in ranges if flat_range.name])


def _tensors(group: _FlatGroup) -> list[PickledTensor]:
    return [value for value in group.states.values() if isinstance(value, PickledTensor)]


def _sizes(
    shapes: Mapping[str, Sequence[int]], paddings: Iterable[int]
) -> Iterator[tuple[str, int]]:
    """Yield the size of each parameter, and of the padding after it under an empty name."""
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        yield name, math.prod(shape)
        yield "", padding


def _mapped_groups(partitions: Iterable[_Partition]) -> Iterator[_FlatGroup]:
    """Yield groups of stage 0 in bf16: as in stage 1, but without shapes in another file.

    The files of other stages also have `param_slice_mappings`, but they are wrong if
    `round_robin_gradients` has changed the order.
    """
    num_read: dict[str, int] = defaultdict(int)
    for file, state in partitions:
        groups = zip(state["param_slice_mappings"], state[_FP32_WEIGHTS], strict=True)
        for index, (fragments, weights) in enumerate(groups):
            ranges = []
            for name, fragment in fragments.items():
                start, stop = num_read[name], num_read[name] + fragment.values["numel"]
                ranges.append(FlatRange(name, start, stop, fragment.values["start"]))
                num_read[name] = stop
            states = _torch_states(state["base_optimizer_state"], index)
            yield _FlatGroup(file, ranges, weights, states)


def _stage_3_groups(
    groups: Iterable[Mapping[str, Sequence[int]]], partitions: Sequence[_Partition]
) -> Iterator[_FlatGroup]:
    """Yield groups of slices: each rank has a slice of each parameter, with padding at the end."""
    sizes = [(name, math.prod(shape)) for shapes in groups for name, shape in shapes.items()]
    for rank, (file, state) in enumerate(partitions):
        remaining = iter(sizes)
        # A group may have several flat tensors (`sub_group_size`), so their sizes decide which
        # parameters they hold.
        for index, weights in enumerate(state["fp32_flat_groups"]):
            ranges, offset = list[FlatRange](), 0
            while offset < weights.numel:
                name, size = next(remaining)
                ranges.append(
                    slice_range(name, size, rank=rank, num_ranks=len(partitions), offset=offset)
                )
                offset += slice_size(size, len(partitions))
            states = _torch_states(state["optimizer_state_dict"], index)
            yield _FlatGroup(file, ranges, weights, states)


def _torch_states(base: Any, index: int) -> dict[str, Any]:
    """Return the states of a group, which DeepSpeed gives to torch's optimizer as one parameter."""
    if isinstance(base, list):
        return dict(base[index])
    group = next(group for group in base["param_groups"] if index in group["params"])
    # Apex and FusedAdam keep the step count in the group, torch with the parameter.
    group_step = {key: value for key, value in group.items() if key == "step"}
    return group_step | base["state"].get(index, {})


def _add(
    states: OptimizerStates,
    group: _FlatGroup,
    *,
    owned: Mapping[str, TensorSlice],
    weights_prefix: str | None,
) -> None:
    """Add the tensors of a group; without a prefix, fp32 weights are left out."""
    ranges = [flat_range for flat_range in group.ranges if flat_range.name in owned]
    if weights_prefix is not None:
        chunks = (*_chunks(ranges, owned, weights_prefix),)
        states.extents.append(
            torch_archive.extent(group.file, "fp32 weights", group.weights, chunks)
        )
    for kind, value in group.states.items():
        prefix = f"optimizer.{kind}."
        if isinstance(value, PickledTensor) and value.shape:
            chunks = (*_chunks(ranges, owned, prefix),)
            states.extents.append(torch_archive.extent(group.file, kind, value, chunks))
            continue
        keys = {
            prefix + parameter_name(chunk.key)
            for flat_range in ranges
            if flat_range.start == 0
            for chunk in owned[flat_range.name].chunks
        }
        states.add_step(group.file, kind, step=value, keys=keys)


def _chunks(
    ranges: Iterable[FlatRange], slices: Mapping[str, TensorSlice], prefix: str
) -> Iterator[Chunk]:
    """Yield the chunks of a state in a flat tensor, without padding."""
    for flat_range in ranges:
        chunks = cut(slices[flat_range.name].chunks, flat_range.start, flat_range.stop)
        for chunk in state_chunks(chunks, prefix):
            yield chunk._replace(start=flat_range.offset + chunk.start)
