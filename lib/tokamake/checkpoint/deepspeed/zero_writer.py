"""Writes DeepSpeed's optimizer states of ZeRO stages 1 to 3, which `zero_reader` reads.

[bf16_]zero_pp_rank_<D>_mp_rank_<M>_optim_states.pt is the partition of data-parallel rank D. It has
two parameter groups, as in Megatron-DeepSpeed: matrices, which decay, then norms and biases. In a
group, parameters have the order of the model. Stages 1 and 2 concatenate a group and cut it into
equal partitions. Stage 3 cuts each parameter, and concatenates slices up to `SUB_GROUP_SIZE`.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.deepspeed.folder import VERSION
from tokamake.checkpoint.deepspeed.zero_reader import (
    FlatRange,
    partition_ranges,
    slice_range,
    slice_size,
)
from tokamake.checkpoint.megatron_model.adam import MOMENTS, check_states, master_key
from tokamake.checkpoint.megatron_model.optimizer_states import MODEL, parameter_name
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorSlice
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint, Target
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor, cut
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.pickle_writer import Call, Global, Instance

_ALIGNMENT = 2
"""DeepSpeed makes the number of elements of a partition a multiple of this."""
_SCALER = {
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dynamic": True,
}
"""Attributes of DeepSpeed's DynamicLossScaler with its default settings."""
_FIRST_SCALE = 2.0**16
"""Initial loss scale of DeepSpeed by default."""
SUB_GROUP_SIZE = 10**9
"""Elements of a rank at which a flat tensor of stage 3 is full: DeepSpeed's default
sub_group_size."""

_FlatTensor = Mapping[str, TensorSlice]
"""The parameters in a flat tensor."""


class _Share(NamedTuple):
    """The elements of a flat tensor on a rank."""

    ranges: list[FlatRange]
    size: int
    """Number of elements, with padding."""
    padding: int


class PartitionWriter:
    """Lays out optimizer states as partitions of DeepSpeed; with ZeRO stage 0, nothing."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        self._checkpoint, self._layout = checkpoint, target.layout
        if target.layout.zero_stage:
            check_states(
                checkpoint,
                target.layout.zero_stage,
                otherwise="so DeepSpeed cannot resume from ZeRO partitions; convert to universal, "
                "which DeepSpeed loads at any stage",
            )
        self._is_stage_3 = target.layout.zero_stage == 3
        self._dtype = target.dtype

    @cached_property
    def _precision(self) -> str | None:
        source = self._checkpoint.source
        weights = (key for key in source if key.startswith(MODEL))
        return self._dtype or dtypes.widest(source.dtype(key) for key in weights).short

    def lay_out(
        self, folder: Path, model_rank: int, *, slices: Mapping[str, TensorSlice]
    ) -> tuple[dict[str, Any], list[Extent]]:
        """Write the files of a model-parallel rank, without the data of their tensors.

        `slices`: tensors of the rank by DeepSpeed's names, in the order of the model. Return
        entries for the rank's model_states.pt, and the extents to fill.
        """
        if not self._layout.zero_stage:
            return {}, []
        num_ranks = self._layout.data_parallel_size
        groups = [
            [*_sub_groups(group, num_ranks)] if self._is_stage_3 else [group]
            for group in _groups(slices)
        ]
        extents: list[Extent] = []
        prefix = "bf16_" * (self._precision == "bf16")
        state_of_rank = self._stage_3_state if self._is_stage_3 else self._stage_1_and_2_state
        for rank in range(num_ranks):
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"
            content = {"optimizer_state_dict": state_of_rank(groups, rank), "ds_version": VERSION}
            extents += torch_archive.lay_out(folder / name, content)
        size = Global("torch", "Size")
        shapes = [
            {name: Call(size, (tensor.shape,)) for name, tensor in flat.items()}
            for flat in chain(*groups)
        ]
        # DeepSpeed's zero_to_fp32 recognizes model states by `buffer_names`, and reads
        # `shared_params`.
        return {"param_shapes": shapes, "buffer_names": [], "shared_params": {}}, extents

    def _stage_1_and_2_state(self, groups: list[list[_FlatTensor]], rank: int) -> dict[str, Any]:
        layout = self._layout
        flats = [*chain(*groups)]
        shares = [_equal_share(flat, rank, num_ranks=layout.data_parallel_size) for flat in flats]
        return {
            "overflow": False,
            "base_optimizer_state": self._torch_state(groups, shares),
            # Unlike the moments, fp32 weights have no padding.
            "single_partition_of_fp32_groups": [
                self._planned(flat, share, share.size - share.padding)
                for flat, share in zip(flats, shares, strict=True)
            ],
            "zero_stage": layout.zero_stage,
            "group_paddings": [share.padding for share in shares],
            "partition_count": [layout.data_parallel_size] * len(groups),
            "ds_version": VERSION,
            **self._loss_scaler(),
        }

    def _stage_3_state(self, groups: list[list[_FlatTensor]], rank: int) -> dict[str, Any]:
        num_ranks = self._layout.data_parallel_size
        flats = [*chain(*groups)]
        shares = [_share_of_slices(flat, rank, num_ranks=num_ranks) for flat in flats]
        return {
            "overflow": False,
            "optimizer_state_dict": self._torch_state(groups, shares),
            "fp32_flat_groups": [
                self._planned(flat, share, share.size)
                for flat, share in zip(flats, shares, strict=True)
            ],
            "zero_stage": 3,
            "partition_count": num_ranks,
            **self._loss_scaler(),
        }

    def _torch_state(self, groups: list[list[_FlatTensor]], shares: list[_Share]) -> dict[str, Any]:
        """Return the state of torch's optimizer, whose parameters are the flat tensors."""
        pairs = zip(chain(*groups), shares, strict=True)
        return {
            "state": {index: self._states(*pair) for index, pair in enumerate(pairs)},
            "param_groups": [*self._param_groups([len(flats) for flats in groups])],
        }

    def _states(self, flat: _FlatTensor, share: _Share) -> dict[str, PlannedTensor]:
        moments = {kind: self._planned(flat, share, share.size, kind) for kind in MOMENTS}
        # All parameters have the same step count (`adam_problem`).
        steps = (
            Chunk(f"optimizer.step.{parameter_name(chunk.key)}", ())
            for tensor in flat.values()
            for chunk in tensor.chunks
        )
        return {"step": PlannedTensor((), FLOAT32, (*steps,)), **moments}

    def _planned(
        self, flat: _FlatTensor, share: _Share, size: int, kind: str | None = None
    ) -> PlannedTensor:
        """Return a flat tensor to write: moments of a kind, or fp32 weights."""

        def key_of(key: str) -> str:
            if kind is None:
                return master_key(key, self._checkpoint.source)
            return f"optimizer.{kind}.{parameter_name(key)}"

        # The padding of the vocabulary has the mean of the embedding as weights, and no moments.
        chunks = (
            chunk._replace(key=key_of(chunk.key), start=flat_range.offset + chunk.start)
            for flat_range in share.ranges
            for chunk in cut(flat[flat_range.name].chunks, flat_range.start, flat_range.stop)
            if kind is None or not chunk.is_mean
        )
        return PlannedTensor((size,), FLOAT32, (*chunks,))

    def _param_groups(self, counts: list[int]) -> Iterator[dict[str, Any]]:
        """Yield the settings of each group, which DeepSpeed adopts."""
        settings = self._checkpoint.notes[OPTIMIZER_SETTINGS]
        rates = {**settings, "betas": (*settings["betas"],)}
        names = ("wd_no_scale_lr", "no_wd_no_scale_lr")
        for index, end in enumerate(accumulate(counts)):
            decay = {} if index == 0 else {"weight_decay": 0.0}
            yield {
                "name": names[index],
                **rates,
                **decay,
                "wd_mult": 1.0 - index,
                "lr_mult": 1.0,
                "bias_correction": True,
                "amsgrad": False,
                "params": [*range(end - counts[index], end)],
            }

    def _loss_scaler(self) -> dict[str, Any]:
        scale, _ = self._checkpoint.notes.get("loss_scale", (1.0, 0))
        # In stage 3, DeepSpeed takes the scaler of the file, so the file must have one.
        scale = _FIRST_SCALE if scale == 1.0 and self._is_stage_3 else scale
        module = "deepspeed.runtime.fp16.loss_scaler"
        if self._precision == "fp16" and scale != 1.0:
            state = {**_SCALER, "cur_scale": scale, "dtype": Global("torch", "float16")}
            scaler = Instance(Global(module, "DynamicLossScaler"), state)
            return {"loss_scaler": scaler, "dynamic_loss_scale": True}
        if not self._is_stage_3:
            return {}
        scaler = Instance(Global(module, "LossScaler"), {"cur_scale": 1.0, "dynamic": False})
        return {"loss_scaler": scaler, "dynamic_loss_scale": False}


def _groups(slices: Mapping[str, TensorSlice]) -> Iterator[_FlatTensor]:
    for decays in (True, False):
        group = {name: tensor for name, tensor in slices.items() if tensor.decays == decays}
        if group:
            yield group


def _sub_groups(group: _FlatTensor, num_ranks: int) -> Iterator[_FlatTensor]:
    """Yield the parameters of each flat tensor of stage 3."""
    sub_group: dict[str, TensorSlice] = {}
    size = 0
    for name, tensor in group.items():
        sub_group[name] = tensor
        size += slice_size(math.prod(tensor.shape), num_ranks)
        # As in DeepSpeed, the parameter that exceeds the size is still part of the sub-group.
        if size >= SUB_GROUP_SIZE:
            yield sub_group
            sub_group, size = {}, 0
    if sub_group:
        yield sub_group


def _share_of_slices(flat: _FlatTensor, rank: int, *, num_ranks: int) -> _Share:
    """Return a rank's concatenated slices of parameters (stage 3)."""
    ranges, offset = list[FlatRange](), 0
    for name, tensor in flat.items():
        size = math.prod(tensor.shape)
        ranges.append(slice_range(name, size, rank=rank, num_ranks=num_ranks, offset=offset))
        offset += slice_size(size, num_ranks)
    num_filled = sum(flat_range.stop - flat_range.start for flat_range in ranges)
    return _Share(ranges, offset, offset - num_filled)


def _equal_share(flat: _FlatTensor, rank: int, *, num_ranks: int) -> _Share:
    """Return a rank's partition of concatenated parameters (stages 1 and 2)."""
    sizes = [(name, math.prod(tensor.shape)) for name, tensor in flat.items()]
    total = sum(size for _, size in sizes)
    size = -(-total // (_ALIGNMENT * num_ranks)) * _ALIGNMENT
    start = rank * size
    ranges = [*partition_ranges(sizes, start, stop=start + size)]
    return _Share(ranges, size, size - max(0, min(size, total - start)))
