"""Optimizer states in Megatron-LM's classic files: a torch optimizer's, by numbers of parameters.

Parameters are counted through its groups; in a group they follow one another as the file has their
weights. Fp32 weights that 16 bit ones were rounded from lie beside, in lists like the groups.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.deepspeed.zero_reader import MASTER, MODEL, States, settings_of
from tokamake.checkpoint.megatron_model.rank_tensors import TensorSlice
from tokamake.checkpoint.tensors.dtypes import FLOAT32, Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, TensorSource
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import Located

OPTIMIZER, MASTERS, SCALER = "optimizer", "fp32_from_fp16_params", "grad_scaler"
"""Keys of the states: of torch's optimizer, of fp32 weights and of what scales the loss."""
STEP, SCALE, SINCE = "step", "scale", "growth_tracker"
"""Keys within: of a parameter or group, and of what scales the loss."""
_OLDER = {OPTIMIZER: "optimizer_state_dict", MASTERS: "fp32_from_fp16"}
"""What the first Megatrons called them."""
_DISTRIBUTED = "distrib_optim.pt"
_OF_WORDS = ("word_embeddings.weight", "output_layer.weight", "word_embeddings_for_head.weight")
"""Names of parameters that can have a learning rate of their own (--decoupled-lr)."""


class Parameter(NamedTuple):
    """A parameter of a rank."""

    name: str
    part: TensorSlice
    dtype: Dtype
    """Of its weights in the file."""

    @property
    def decays(self) -> bool:
        """Whether it is in the first of Megatron's groups, in which weights decay."""
        return len(self.part.shape) > 1


class _Entry(NamedTuple):
    """What a file has for a parameter."""

    parameter: Parameter
    states: Mapping[str, Any]
    master: Located | None
    """Fp32 weights, where those of the model are rounded."""
    group: Mapping[str, Any]
    """Of torch's optimizer, with settings."""


class OptimizerReader:
    """Puts the states of all ranks together.

    Attributes:
        found: what is there; nothing, if some of it is unread.
        unread: what is there and is not read, in words.
    """

    def __init__(self) -> None:
        self.found = States()
        self.unread: tuple[str, ...] = ()

    def add(self, file: Path, state: Mapping[str, Any], parameters: Sequence[Parameter]) -> None:
        """Add what a rank's file has.

        Args:
            file: of the rank.
            state: what is in it.
            parameters: of the rank, in the file's order.
        """
        if self.unread:
            return
        if (file.parent / _DISTRIBUTED).is_file():
            self._leave(f"states of Megatron-LM's distributed optimizer ({_DISTRIBUTED})")
        elif (saved := state.get(OPTIMIZER)) is not None:
            entries = _entries(saved, parameters)
            if entries is None:
                self._leave(f"optimizer states in an order that is not known ({file})")
            elif entries:
                self.found.notes |= _notes(file, saved, entries)
                for entry in entries:
                    _add(self.found, file, entry)

    def _leave(self, what: str) -> None:
        self.found, self.unread = States(), (what,)


def _entries(saved: Any, parameters: Sequence[Parameter]) -> list[_Entry] | None:
    """What a file has for each parameter; None: in an order that is not known."""
    try:
        inner = _of(saved, OPTIMIZER, saved)
        states, groups = inner["state"], [each for each in inner["param_groups"] if each["params"]]
        if not states:
            return []  # saved before the first step
        masters = [each for group in _of(saved, MASTERS, ()) for each in group]
    # What is put together in another way can fail in any way.
    except (LookupError, TypeError, AttributeError):
        return None
    fitting = []
    for order in _orders(parameters):
        try:
            found = [*_paired(order, groups, states, iter(masters))]
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
        fitting.append(found)
    return fitting[0] if len(fitting) == 1 else None


def _of(saved: Mapping[str, Any], key: str, default: Any) -> Any:
    return saved.get(key, saved.get(_OLDER[key], default))


def _orders(parameters: Sequence[Parameter]) -> Iterator[tuple[list[Parameter], ...]]:
    """Ways in which Megatrons have put parameters into groups.

    In all of them, weights that decay are apart from norms and biases; embedding and output layer
    are apart from others where they have a learning rate of their own. Which group comes first has
    changed several times.
    """
    decays = [each for each in parameters if each.decays]
    words = [each for each in decays if each.name.endswith(_OF_WORDS)]
    others = [each for each in decays if not each.name.endswith(_OF_WORDS)]
    rest = [each for each in parameters if not each.decays]
    for groups in ((decays, rest), (others, rest, words)) if words else ((decays, rest),):
        yield from permutations(group for group in groups if group)


def _paired(
    order: Iterable[Sequence[Parameter]],
    groups: Iterable[Mapping[str, Any]],
    states: Mapping[Any, Mapping[str, Any]],
    masters: Iterator[Any],
) -> Iterator[_Entry]:
    """Parameters and what a file has for them.

    Args:
        order: parameters of each group.
        groups: of torch's optimizer.
        states: by numbers of parameters.
        masters: fp32 weights of those that are rounded, in the order of the groups; or none.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: they do not fit.
    """
    first = next(masters, None)
    kinds: set[str] = set()
    for own, group in zip(order, groups, strict=True):
        in_group = {STEP: group[STEP]} if STEP in group else {}
        for parameter, number in zip(own, group["params"], strict=True):
            found = {**in_group, **states[number]}
            master = None
            if first is not None and parameter.dtype != FLOAT32:
                master, first = first, next(masters, None)
                _check(master, parameter)
            for kind, value in found.items():
                if kind != STEP:
                    _check(value, parameter)
                elif not isinstance(value, int | float) and value.numel != 1:
                    raise ValueError("a step that is no number")
            if kinds and kinds != {*found}:
                raise ValueError("parameters with other states")
            kinds = {*found}
            yield _Entry(parameter, found, master, group)
    if first is not None:
        raise ValueError("more fp32 weights than parameters")


def _check(tensor: Located, parameter: Parameter) -> None:
    if tensor.shape != parameter.part.shape or tensor.dtype.short is None:
        raise ValueError("a state of another shape")


def _notes(file: Path, saved: Mapping[str, Any], entries: Sequence[_Entry]) -> dict[str, Any]:
    """Settings of the optimizer, and the scale of the loss."""
    decaying = next((each for each in entries if each.parameter.decays), entries[0])
    notes = settings_of([decaying.group])
    scaler = saved.get(SCALER)
    if isinstance(scaler, Mapping) and isinstance(scale := scaler.get(SCALE), Located):
        where = torch_archive.region(file, f"{SCALER}.{SCALE}", scale, (Chunk(SCALE, ()),))
        number = TensorSource([where], {SCALE: ()}).number(SCALE)
        since = scaler.get(SINCE)
        notes["loss_scale"] = (number, since if isinstance(since, int) else 0)
    return notes


def _add(found: States, file: Path, entry: _Entry) -> None:
    """Add what a file has for a parameter."""
    name, part, _ = entry.parameter
    if entry.master is not None:
        found.regions.append(_region(file, f"fp32 {name}", entry.master, part, MASTER))
    for kind, value in entry.states.items():
        prefix = f"optimizer.{kind}."
        if kind != STEP:
            found.regions.append(_region(file, f"{kind} of {name}", value, part, prefix))
            continue
        keys = {prefix + block.key.removeprefix(MODEL) for block in part.blocks}
        if not isinstance(value, Located):
            found.given |= dict.fromkeys(keys, float(value))
        elif keys := keys - found.numbers:
            blocks = (*(Chunk(key, ()) for key in sorted(keys)),)
            where = torch_archive.region(file, f"{kind} of {name}", value, blocks)
            # Some keep it in a tensor of one element.
            found.regions.append(replace(where, shape=(), stride=None))
            found.numbers |= keys


def _region(file: Path, name: str, tensor: Located, part: TensorSlice, prefix: str) -> Extent:
    """Where a tensor like a parameter lies; padding of the vocabulary is left out."""
    blocks = (
        block._replace(key=prefix + block.key.removeprefix(MODEL))
        for block in part.blocks
        if not block.is_mean
    )
    where = torch_archive.region(file, name, tensor, (*blocks,))
    return replace(where, is_copy=part.is_copy)
