"""Locates the optimizer states in Megatron-LM's classic files.

The file holds the state of torch's optimizer. The optimizer numbers parameters group by group; in a
group, parameters have the order of the weights in the file. Fp32 master weights are in separate
lists, one for each group. The distributed optimizer has a file of its own, `distrib_optim.pt`, with
flat buffers of all data-parallel ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.megatron_model.adam import GROWTH, OPTIMIZER, SCALE, SCALER, STEP
from tokamake.checkpoint.megatron_model.optimizer_buffers import fill_buckets, range_chunks
from tokamake.checkpoint.megatron_model.optimizer_states import (
    MASTER,
    OptimizerStates,
    parameter_name,
    settings_note,
    state_chunks,
)
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorSlice
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor

MASTERS = "fp32_from_fp16_params"
"""Key of fp32 master weights in the optimizer's state."""
_OLD_KEYS = {OPTIMIZER: "optimizer_state_dict", MASTERS: "fp32_from_fp16"}
"""The same keys in early Megatron versions."""
DISTRIBUTED = "distrib_optim.pt"
"""File of a rank with the buffers of its distributed optimizer."""
WEIGHTS = "param"
"""Key of the buffer with fp32 weights."""
SIZE, COALESCED = "numel_unpadded", "buckets_coalesced"
"""Keys of the number of elements of a buffer, and of whether its buckets are one tensor."""


class OptimizerParameter(NamedTuple):
    """A parameter of a rank."""

    name: str
    tensor: TensorSlice
    dtype: Dtype
    """Dtype of the weights in the file."""


class _ParameterStates(NamedTuple):
    """The states of a parameter in a file."""

    parameter: OptimizerParameter
    states: Mapping[str, Any]
    master: PickledTensor | None
    """Fp32 weights, if the model's weights are rounded."""
    group: Mapping[str, Any]
    """Parameter group of torch's optimizer, with its settings."""


class OptimizerReader:
    """Collects the optimizer states of all ranks.

    Attributes:
        states: states of the ranks so far; empty if tokamake cannot read a rank's states.
        unread: description of the states that tokamake cannot read.
    """

    def __init__(self) -> None:
        self.states = OptimizerStates()
        self.unread: tuple[str, ...] = ()

    def add(
        self, file: Path, state: Mapping[str, Any], stages: Sequence[Sequence[OptimizerParameter]]
    ) -> None:
        """Add the states of a rank; parameters of a (virtual) stage are in the file's order."""
        distributed, saved = file.with_name(DISTRIBUTED), state.get(OPTIMIZER)
        buffers = pickle_reader.read(distributed, REMEDY) if distributed.is_file() else None
        if self.unread:
            return
        if not isinstance(saved, list):
            self._add_optimizer(file, saved, stages=stages, buffers=buffers)
        elif len(saved) != 2 or not isinstance(buffers, list | None):
            self._skip(f"states of {len(saved)} optimizers ({file})")
        else:
            # Experts that expert-parallel ranks share have an optimizer of their own.
            for of_stack, of_part, in_buffers in zip(
                (False, True), saved, buffers or (None, None), strict=True
            ):
                part = [
                    [each for each in stage if each.tensor.of_stack == of_stack] for stage in stages
                ]
                # The first expert-parallel rank alone has the buffers of what all ranks have.
                if in_buffers is not None or not distributed.is_file():
                    self._add_optimizer(file, of_part, stages=part, buffers=in_buffers)

    def _add_optimizer(
        self,
        file: Path,
        saved: Any,
        *,
        stages: Sequence[Sequence[OptimizerParameter]],
        buffers: Any,
    ) -> None:
        """Add the states of one optimizer; buffers: of a distributed one."""
        if buffers is not None:
            if not _add_buffers(self.states, file, saved=saved, buffers=buffers, stages=stages):
                distributed = file.with_name(DISTRIBUTED)
                self._skip(f"states of Megatron-LM's distributed optimizer ({distributed})")
        elif saved is not None:
            entries = _entries(saved, [*chain.from_iterable(stages)])
            if entries is None:
                self._skip(f"optimizer states in an unknown order ({file})")
            elif entries:
                self.states.notes |= _notes(file, saved, entries=entries)
                for entry in entries:
                    _add(self.states, file, entry=entry)

    def _skip(self, description: str) -> None:
        # The states of only some ranks are of no use.
        self.states, self.unread = OptimizerStates(), (description,)


def _add_buffers(
    states: OptimizerStates,
    file: Path,
    *,
    saved: Any,
    buffers: Any,
    stages: Sequence[Sequence[OptimizerParameter]],
) -> bool:
    """Add states in a distributed optimizer's buffers; return whether they fit the parameters."""
    distributed = file.with_name(DISTRIBUTED)
    extents: list[Extent] = []
    try:
        if not buffers[COALESCED]:
            return False
        for number, parameters in enumerate(stages):
            # A buffer for each dtype of weights; the families here have a single one.
            ((_, tensors),) = buffers[number].items()
            # Buckets have lost their padding. A bucket that ends at no multiple of 64 makes
            # the buffer shorter than one bucket would be, which is refused.
            (filled,) = fill_buckets([each.tensor for each in parameters], [tensors[SIZE]])
            is_fp32 = all(parameter.dtype == FLOAT32 for parameter in parameters)
            for kind, tensor in tensors.items():
                if kind == SIZE or (kind == WEIGHTS and is_fp32):
                    continue
                prefix = MASTER if kind == WEIGHTS else f"optimizer.{kind}."
                chunks = range_chunks(filled, 0, stop=tensor.numel, prefix=prefix)
                extents.append(torch_archive.extent(distributed, kind, tensor, (*chunks,)))
        groups = saved[OPTIMIZER]["param_groups"]
        (step,) = {float(group[STEP]) for group in groups}
    # An unknown structure may raise any of these.
    except (LookupError, TypeError, ValueError, AttributeError):
        return False
    states.extents += extents
    names = {parameter_name(chunk.key) for extent in extents for chunk in extent.chunks}
    states.values |= dict.fromkeys((f"optimizer.{STEP}.{name}" for name in names), step)
    states.notes = settings_note(groups) | _loss_scale_note(file, saved) | states.notes
    return True


def _entries(saved: Any, parameters: Sequence[OptimizerParameter]) -> list[_ParameterStates] | None:
    """Return the states of each parameter, or None if their order is unknown or ambiguous."""
    try:
        inner = _get(saved, OPTIMIZER, default=saved)
        groups = [group for group in inner["param_groups"] if group["params"]]
        states = inner["state"]
        if not states:
            return []  # saved before the first step
        masters = [tensor for group in _get(saved, MASTERS, default=()) for tensor in group]
    # An unknown structure may raise any of these.
    except (LookupError, TypeError, AttributeError):
        return None
    candidates = []
    for order in _orders(parameters):
        try:
            candidates.append([*_paired(order, groups, states=states, masters=iter(masters))])
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
    # If the shapes fit several orders, none of them is certain.
    return candidates[0] if len(candidates) == 1 else None


def _get(saved: Mapping[str, Any], key: str, *, default: Any) -> Any:
    return saved.get(key, saved.get(_OLD_KEYS[key], default))


def _orders(
    parameters: Sequence[OptimizerParameter],
) -> Iterator[tuple[list[OptimizerParameter], ...]]:
    """Yield the ways in which Megatron versions assign parameters to groups.

    All versions separate weights that decay from norms and biases. With --decoupled-lr, embedding
    and output layer have their own group. The order of the groups has changed several times.
    """
    decaying = [parameter for parameter in parameters if parameter.tensor.decays]
    matrices = [each for each in decaying if each.tensor.split != "vocabulary"]
    embeddings = [each for each in decaying if each.tensor.split == "vocabulary"]
    vectors = [parameter for parameter in parameters if not parameter.tensor.decays]
    groupings: list[tuple[list[OptimizerParameter], ...]] = [(decaying, vectors)]
    if embeddings:
        groupings.append((matrices, vectors, embeddings))
    for groups in groupings:
        yield from permutations(group for group in groups if group)


def _paired(
    order: Iterable[Sequence[OptimizerParameter]],
    groups: Iterable[Mapping[str, Any]],
    *,
    states: Mapping[Any, Mapping[str, Any]],
    masters: Iterator[Any],
) -> Iterator[_ParameterStates]:
    """Pair parameters with their states, and check that shapes and kinds fit.

    `masters`: fp32 weights of rounded parameters in the order of the groups, or nothing. Raises
    LookupError, TypeError, ValueError or AttributeError if the order does not fit.
    """
    next_master = next(masters, None)
    expected_kinds: set[str] = set()
    for parameters, group in zip(order, groups, strict=True):
        # Apex keeps the step count in the group, torch with the parameter.
        group_step = {STEP: group[STEP]} if STEP in group else {}
        for parameter, number in zip(parameters, group["params"], strict=True):
            values = {**group_step, **states[number]}
            master = None
            if next_master is not None and parameter.dtype != FLOAT32:
                master, next_master = next_master, next(masters, None)
                _check_tensor(master, parameter)
            _check_values(values, parameter)
            if expected_kinds and expected_kinds != {*values}:
                raise ValueError("parameters with different kinds of states")
            expected_kinds = {*values}
            yield _ParameterStates(parameter, values, master, group)
    if next_master is not None:
        raise ValueError("more fp32 weights than parameters")


def _check_values(values: Mapping[str, Any], parameter: OptimizerParameter) -> None:
    for kind, value in values.items():
        if kind != STEP:
            _check_tensor(value, parameter)
        elif not isinstance(value, int | float) and value.numel != 1:
            raise ValueError("a step count that is not a number")


def _check_tensor(tensor: PickledTensor, parameter: OptimizerParameter) -> None:
    if tensor.shape != parameter.tensor.shape or tensor.dtype.short is None:
        raise ValueError("a state of another shape or dtype")


def _notes(
    file: Path, saved: Mapping[str, Any], *, entries: Sequence[_ParameterStates]
) -> dict[str, Any]:
    # Only this group has the weight decay.
    decaying = next((entry for entry in entries if entry.parameter.tensor.decays), entries[0])
    return settings_note([decaying.group]) | _loss_scale_note(file, saved)


def _loss_scale_note(file: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note with the loss scale, if the state of Megatron's optimizer has it."""
    scaler = saved.get(SCALER)
    if not isinstance(scaler, Mapping) or not isinstance(scale := scaler.get(SCALE), PickledTensor):
        return {}
    extent = torch_archive.extent(file, f"{SCALER}.{SCALE}", scale, (Chunk(SCALE, ()),))
    value = TensorSource([extent], {SCALE: ()}).number(SCALE)
    growth = scaler.get(GROWTH)
    return {"loss_scale": (value, growth if isinstance(growth, int) else 0)}


def _add(states: OptimizerStates, file: Path, *, entry: _ParameterStates) -> None:
    name, tensor, _ = entry.parameter
    if entry.master is not None:
        states.extents.append(
            _extent(file, f"fp32 {name}", state=entry.master, parameter=tensor, prefix=MASTER)
        )
    for kind, value in entry.states.items():
        prefix = f"optimizer.{kind}."
        if kind != STEP:
            states.extents.append(
                _extent(file, f"{kind} of {name}", state=value, parameter=tensor, prefix=prefix)
            )
            continue
        keys = {prefix + parameter_name(chunk.key) for chunk in tensor.chunks}
        if isinstance(value, PickledTensor):
            # Some optimizers keep the step count in a tensor of shape [1].
            value = replace(value, shape=(), stride=())
        states.add_step(file, f"{kind} of {name}", step=value, keys=keys)


def _extent(
    file: Path, name: str, *, state: PickledTensor, parameter: TensorSlice, prefix: str
) -> Extent:
    chunks = (*state_chunks(parameter.chunks, prefix),)
    extent = torch_archive.extent(file, name, state, chunks)
    return replace(extent, is_replica=parameter.is_replica)
