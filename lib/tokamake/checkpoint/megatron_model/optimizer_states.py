"""Optimizer states of whole parameters from the files of ranks, and Megatron's scheduler."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint
from tokamake.checkpoint.tensors.extents import Chunk, Extent
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor

MODEL, MASTER = "model.", "master."
"""Key prefixes: weights; fp32 master copies of bf16 or fp16 weights."""
LR_SCHEDULER = "lr_scheduler"
"""Key of the state of Megatron's scheduler in DeepSpeed's files, and in `Checkpoint.notes`."""
RATES = ("max_lr", "min_lr")
"""Keys of the highest and the lowest learning rate of a schedule."""
OPT_PARAM_SCHEDULER = "opt_param_scheduler"
"""The same key in Megatron-LM's files, since its scheduler also sets the weight decay."""


@dataclass
class OptimizerStates:
    """Optimizer states of whole parameters, collected from the files of all ranks."""

    extents: list[Extent] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    """Step counts that files hold as plain numbers, by key."""
    scalar_keys: set[str] = field(default_factory=set)
    """Keys of step counts that files hold as tensors."""
    zero_stage: int = 0
    data_parallel_size: int = 0
    """0 if there are no partitions."""
    notes: dict[str, Any] = field(default_factory=dict)
    """See `Checkpoint`."""

    def source(
        self, weights: Iterable[Extent], shapes: Mapping[str, tuple[int, ...]]
    ) -> TensorSource:
        """Return weights and states as whole tensors; in ZeRO 3, the states hold the weights."""
        all_shapes = dict(shapes)
        for extent in self.extents:
            for key in (chunk.key for chunk in extent.chunks):
                all_shapes[key] = shapes[f"model.{parameter_name(key)}"] if extent.shape else ()
        return TensorSource([*weights, *self.extents], all_shapes, in_memory=self.values)

    def add_step(self, file: Path, name: str, *, step: Any, keys: set[str]) -> None:
        """Add a step count, which several parameters may share; ignore other values."""
        if isinstance(step, PickledTensor):
            # Each partition of a parameter repeats its step count. One of them is enough.
            if keys := keys - self.scalar_keys:
                chunks = (*(Chunk(key, ()) for key in sorted(keys)),)
                self.extents.append(torch_archive.extent(file, name, step, chunks))
                self.scalar_keys |= keys
        elif isinstance(step, int | float):
            self.values |= dict.fromkeys(keys, float(step))


def parameter_name(key: str) -> str:
    """Return the name of the parameter in a key of `Checkpoint.source`."""
    return key.split(".", 2 if key.startswith("optimizer.") else 1)[-1]


def state_chunks(weights: Iterable[Chunk], prefix: str) -> Iterator[Chunk]:
    """Yield the chunks of a state of a parameter, without the padding of the vocabulary."""
    for chunk in weights:
        if not chunk.is_mean:
            yield chunk._replace(key=prefix + parameter_name(chunk.key))


def settings_note(groups: Any) -> dict[str, Any]:
    """Return the note with the optimizer's settings for the group with the largest weight decay.

    Weights decay; norms and biases are in other groups.
    """
    known = [group for group in groups if isinstance(group, Mapping)] if groups else []
    first = max(known, key=_weight_decay, default={})
    settings: dict[str, Any] = {}
    for name in ("lr", "betas", "eps", "weight_decay"):
        match first.get(name):
            case int() | float() as number:
                settings[name] = float(number)
            case (float() as beta1, float() as beta2):
                settings[name] = [beta1, beta2]
    return {OPTIMIZER_SETTINGS: settings} if settings else {}


def _weight_decay(group: Mapping[str, Any]) -> float:
    value = group.get("weight_decay")
    return value if isinstance(value, int | float) else 0.0


def scheduler_note(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note with the state of Megatron's scheduler, if a rank's file has it."""
    schedule = state.get(LR_SCHEDULER, state.get(OPT_PARAM_SCHEDULER))
    if not isinstance(schedule, dict):
        return {}
    plain = (int, float, str, type(None))
    return {
        LR_SCHEDULER: {key: value for key, value in schedule.items() if isinstance(value, plain)}
    }


def scheduler_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state of Megatron's scheduler: its position, and settings if they are known.

    Megatron reads all keys. Unknown settings are None; with
    --override-opt_param-scheduler, Megatron takes the settings of the new run instead.
    """
    rates = (*RATES, "lr_decay_style")
    lengths = ("lr_warmup_steps", "lr_warmup_tokens", "lr_decay_steps", "lr_decay_tokens")
    progress = checkpoint.progress
    position = {"num_steps": progress.consumed_samples, "num_tokens": progress.consumed_tokens}
    settings = checkpoint.notes.get(LR_SCHEDULER, {})
    return {**dict.fromkeys((*rates, *lengths)), **settings, **position}
