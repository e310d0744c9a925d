"""Writes DeepSpeed's optimizer states of ZeRO stages 1 to 3, as `shards` reads them.

[bf16_]zero_pp_rank_<D>_mp_rank_<M>_optim_states.pt has the part of data-parallel rank D of two
groups, as Megatron-DeepSpeed parts parameters: matrices, which decay, then norms and biases; in
each they follow one another as the model makes them. Stages 1 and 2 cut a group into equal parts;
stage 3 cuts each parameter, and lays slices of some after one another (`SUB_GROUP_SIZE`).
"""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.deepspeed.folder import VERSION
from tokamake.checkpoint.deepspeed.zero_adam import MOMENTS, unfit
from tokamake.checkpoint.deepspeed.zero_partition import FlatRange, partition, share, slice_of
from tokamake.checkpoint.deepspeed.zero_reader import MASTER, MODEL, parameter
from tokamake.checkpoint.megatron_model.rank_tensors import TensorSlice
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint, Target
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor
from tokamake.checkpoint.tensors.flat_runs import cut
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.pickle_writer import Call, Global, Made
from tokamake.errors import UserError

_ALIGNMENT = 2
"""Elements of which DeepSpeed makes a rank's part a multiple."""
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
"""Attributes of DeepSpeed's scaler of the loss, as its settings are by default."""
_FIRST_SCALE = 2.0**16
"""Where that scaler starts by default."""
SUB_GROUP_SIZE = 10**9
"""Elements of a rank at which a flat tensor of stage 3 is full, as DeepSpeed's sub_group_size is by
default."""

_Group = Mapping[str, TensorSlice]
"""Parameters that a flat tensor is of."""


class _Cut(NamedTuple):
    """What a rank has of a flat tensor."""

    pieces: list[FlatRange]
    size: int
    """Elements."""
    padding: int
    """How many of them are of no parameter."""


class Partitions:
    """Optimizer states of a checkpoint, as data-parallel ranks of DeepSpeed share them.

    Args:
        checkpoint: which has them.
        target: with stage and ranks.

    Raises:
        UserError: DeepSpeed could not continue with them.
    """

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        self._checkpoint, self._layout = checkpoint, target.layout
        _check(checkpoint, target.layout.zero_stage)
        self._is_sliced = target.layout.zero_stage == 3
        weights = [key for key in checkpoint.source if key.startswith(MODEL)]
        kept = dtypes.widest(checkpoint.source.dtype(key) for key in weights)
        self._precision = target.dtype or kept.short

    def lay_out(
        self, folder: Path, number: int, parts: Mapping[str, TensorSlice]
    ) -> tuple[dict[str, Any], list[Extent]]:
        """Write the files of a model-parallel rank, without their tensors.

        Args:
            folder: to write in.
            number: of the rank.
            parts: what it has, by DeepSpeed's names, in the order in which its model makes them.

        Returns:
            What the rank's own files tell of them, and where the tensors are to go.
        """
        ranks = self._layout.data_parallel_size
        groups = [
            [*_sub_groups(group, ranks)] if self._is_sliced else [group] for group in _groups(parts)
        ]
        regions: list[Extent] = []
        prefix = "bf16_" * (self._precision == "bf16")
        for rank in range(ranks):
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{number:02d}_optim_states.pt"
            state = (self._sliced if self._is_sliced else self._partitioned)(groups, rank)
            content = {"optimizer_state_dict": state, "ds_version": VERSION}
            regions += torch_archive.lay_out(folder / name, content)
        size = Global("torch", "Size")
        shapes = [
            {name: Call(size, (part.shape,)) for name, part in flat.items()}
            for flat in chain(*groups)
        ]
        # Without the last two, DeepSpeed's zero_to_fp32 takes files for others.
        told = {"param_shapes": shapes, "buffer_names": [], "shared_params": {}}
        return told, regions

    def _partitioned(self, groups: list[list[_Group]], rank: int) -> dict[str, Any]:
        """What a data-parallel rank saves with stages 1 and 2; see `_base`."""
        layout = self._layout
        cuts = [_cut(flat, rank, layout.data_parallel_size) for flat in chain(*groups)]
        pairs = [*zip(chain(*groups), cuts, strict=True)]
        return {
            "overflow": False,
            "base_optimizer_state": self._base(groups, cuts),
            "single_partition_of_fp32_groups": [
                self._planned(group, each, each.size - each.padding) for group, each in pairs
            ],
            "zero_stage": layout.zero_stage,
            "group_paddings": [each.padding for each in cuts],
            "partition_count": [layout.data_parallel_size] * len(groups),
            "ds_version": VERSION,
            **self._scaler(),
        }

    def _sliced(self, groups: list[list[_Group]], rank: int) -> dict[str, Any]:
        """What a data-parallel rank saves with stage 3; see `_base`."""
        ranks = self._layout.data_parallel_size
        cuts = [_slices(flat, rank, ranks) for flat in chain(*groups)]
        pairs = zip(chain(*groups), cuts, strict=True)
        return {
            "overflow": False,
            "optimizer_state_dict": self._base(groups, cuts),
            "fp32_flat_groups": [self._planned(flat, each, each.size) for flat, each in pairs],
            "zero_stage": 3,
            "partition_count": ranks,
            **self._scaler(),
        }

    def _base(self, groups: list[list[_Group]], cuts: list[_Cut]) -> dict[str, Any]:
        """State of torch's optimizer.

        Args:
            groups: what each flat tensor is of, in groups that decay and that do not.
            cuts: what a rank has of each flat tensor.
        """
        pairs = zip(chain(*groups), cuts, strict=True)
        return {
            "state": {number: self._moments(*pair) for number, pair in enumerate(pairs)},
            "param_groups": [*self._param_groups([len(flats) for flats in groups])],
        }

    def _moments(self, group: _Group, own: _Cut) -> dict[str, PlannedTensor]:
        found = {kind: self._planned(group, own, own.size, kind) for kind in MOMENTS}
        steps = (
            Chunk(f"optimizer.step.{parameter(block.key)}", ())
            for part in group.values()
            for block in part.blocks
        )
        return {"step": PlannedTensor((), FLOAT32, (*steps,)), **found}

    def _planned(
        self, group: _Group, own: _Cut, size: int, kind: str | None = None
    ) -> PlannedTensor:
        """What is laid one after the other.

        Args:
            group: parameters.
            own: what there is of them.
            size: elements.
            kind: of moments; None: fp32 weights, where padding of the vocabulary is their mean.
        """
        blocks = (
            block._replace(key=self._key(kind, block.key), start=piece.at + block.start)
            for piece in own.pieces
            for block in cut(group[piece.name].blocks, piece.start, piece.stop)
            if kind is None or not block.is_mean
        )
        return PlannedTensor((size,), FLOAT32, (*blocks,))

    def _key(self, kind: str | None, key: str) -> str:
        name = parameter(key)
        if kind is not None:
            return f"optimizer.{kind}.{name}"
        exact = f"{MASTER}{name}"
        return exact if exact in self._checkpoint.source else key

    def _param_groups(self, counts: list[int]) -> Iterator[dict[str, Any]]:
        """Settings in each group of so many flat tensors; DeepSpeed takes them for its own."""
        settings = self._checkpoint.notes[OPTIMIZER_SETTINGS]
        rates = {**settings, "betas": (*settings["betas"],)}
        names = ("wd_no_scale_lr", "no_wd_no_scale_lr")
        for number, end in enumerate(accumulate(counts)):
            decays = {} if number == 0 else {"weight_decay": 0.0}
            yield {
                "name": names[number],
                **rates,
                **decays,
                "wd_mult": 1.0 - number,
                "lr_mult": 1.0,
                "bias_correction": True,
                "amsgrad": False,
                "params": [*range(end - counts[number], end)],
            }

    def _scaler(self) -> dict[str, Any]:
        """The scale of the loss, in fp16; with stage 3 DeepSpeed has no other than the file's."""
        scale, _ = self._checkpoint.notes.get("loss_scale", (1.0, 0))
        scale = _FIRST_SCALE if scale == 1.0 and self._is_sliced else scale
        module = "deepspeed.runtime.fp16.loss_scaler"
        if self._precision == "fp16" and scale != 1.0:
            state = {**_SCALER, "cur_scale": scale, "dtype": Global("torch", "float16")}
            kind = Global(module, "DynamicLossScaler")
            return {"loss_scaler": Made(kind, state), "dynamic_loss_scale": True}
        if not self._is_sliced:
            return {}
        made = Made(Global(module, "LossScaler"), {"cur_scale": 1.0, "dynamic": False})
        return {"loss_scaler": made, "dynamic_loss_scale": False}


def _check(checkpoint: Checkpoint, stage: int) -> None:
    """See that there is what DeepSpeed needs to continue.

    Raises:
        UserError: there is not.
    """
    source, path = checkpoint.source, checkpoint.path
    if not any(key.startswith("optimizer.") for key in source):
        raise UserError(
            f"{path}: has no optimizer states for --zero-stage {stage}; leave it out, or choose "
            "another checkpoint"
        )
    if why := unfit(checkpoint):
        raise UserError(
            f"{path}: {why}, so that DeepSpeed could not continue with shards; convert to "
            "universal, which it loads at any stage"
        )


def _groups(parts: Mapping[str, TensorSlice]) -> Iterator[_Group]:
    """Parameters that decay, and those that do not."""
    for decays in (True, False):
        found = {name: part for name, part in parts.items() if (len(part.shape) > 1) == decays}
        if found:
            yield found


def _sub_groups(group: _Group, ranks: int) -> Iterator[_Group]:
    """Parameters whose slices are in one flat tensor."""
    found: dict[str, TensorSlice] = {}
    size = 0
    for name, part in group.items():
        found[name] = part
        size += share(math.prod(part.shape), ranks)
        if size >= SUB_GROUP_SIZE:
            yield found
            found, size = {}, 0
    if found:
        yield found


def _slices(group: _Group, rank: int, ranks: int) -> _Cut:
    """A rank's slices of parameters, one after the other."""
    pieces, at = list[FlatRange](), 0
    for name, part in group.items():
        size = math.prod(part.shape)
        pieces.append(slice_of(name, size, rank, ranks, at))
        at += share(size, ranks)
    filled = sum(piece.stop - piece.start for piece in pieces)
    return _Cut(pieces, at, at - filled)


def _cut(group: _Group, rank: int, ranks: int) -> _Cut:
    """A rank's part of a flat group."""
    sizes = [(name, math.prod(part.shape)) for name, part in group.items()]
    total = sum(size for _, size in sizes)
    each = -(-total // (_ALIGNMENT * ranks)) * _ALIGNMENT
    start = rank * each
    pieces = [*partition(sizes, start, start + each)]
    return _Cut(pieces, each, each - max(0, min(each, total - start)))
