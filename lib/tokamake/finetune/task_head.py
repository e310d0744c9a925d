"""The start of a finetuned model: pretrained weights, and a new head."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Progress
from tokamake.checkpoint.tensors.extents import whole_slices
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture
from tokamake.config.finetune import FinetuneTask
from tokamake.preflight.finetune import finetuned_architecture
from tokamake.preflight.initial_towers import initial_names, starts_towers

_HEAD = "model.task_head."


class ModelStart(NamedTuple):
    """Weights to finetune."""

    checkpoint: Checkpoint
    """Pretrained weights and the new head."""
    new: tuple[str, ...]
    """Tensors that the pretrained model lacks."""
    dropped: tuple[str, ...]
    """Tensors of the pretrained model that this one lacks."""


def with_task_head(
    pretrained: Checkpoint,
    task: FinetuneTask,
    *,
    seed: int,
    wanted: Architecture | None = None,
) -> ModelStart:
    """Put the head of a task on a pretrained model whose family has one; replace another head.

    Args:
        wanted: architecture of the model before it has the head; an encoder starts the towers of a
            biencoder. None: as the pretrained one.
    """
    wanted = wanted or pretrained.architecture
    if starts_towers(pretrained.architecture, wanted):
        return _with_towers(pretrained, finetuned_architecture(wanted, task), seed=seed)
    architecture = finetuned_architecture(wanted, task)
    shapes, source = model_tensors.shapes(architecture), pretrained.source
    kept = [n for n in shapes if f"model.{n}" in source and not n.startswith(_HEAD)]
    new = [name for name in shapes if name not in kept]
    keys = [key for n in kept for key in (f"model.{n}", f"master.{n}") if key in source]
    in_memory = {key: source.in_memory[key] for key in keys if key in source.in_memory}
    drawn = {
        f"model.{n}": tensor for n, tensor in _drawn(architecture, {n: n for n in new}, seed=seed)
    }
    start = replace(
        pretrained,
        architecture=architecture,
        source=TensorSource(
            source.extents,
            {key: source.shapes[key] for key in keys if key not in in_memory},
            in_memory={**in_memory, **drawn},
        ),
        progress=Progress(),
        notes={},
    )
    names = [key.removeprefix("model.") for key in source if key.startswith("model.")]
    dropped = [name for name in names if name not in kept]
    return ModelStart(start, (*new,), (*dropped,))


def _with_towers(encoder: Checkpoint, architecture: Architecture, *, seed: int) -> ModelStart:
    """Give each tower the weights of an encoder; all towers get the same new tensors."""
    names, source = initial_names(architecture), encoder.source
    kept = {name: theirs for name, theirs in names.items() if f"model.{theirs}" in source}
    new = {name: theirs for name, theirs in names.items() if name not in kept}
    tensors = {f"model.{name}": source.read(f"model.{theirs}") for name, theirs in kept.items()}
    drawn = {f"model.{name}": tensor for name, tensor in _drawn(architecture, new, seed=seed)}
    start = replace(
        encoder,
        architecture=architecture,
        source=TensorSource([], {}, in_memory={**tensors, **drawn}),
        progress=Progress(),
        notes={},
    )
    theirs = [key.removeprefix("model.") for key in source if key.startswith("model.")]
    dropped = [name for name in theirs if name not in kept.values()]
    return ModelStart(start, (*new,), (*dropped,))


def _drawn(
    architecture: Architecture, names: Mapping[str, str], *, seed: int
) -> Iterable[tuple[str, torch.Tensor]]:
    """Random tensors by name, each drawn under the name that it is mapped to."""
    weights = model_tensors.random_weights(architecture, seed)
    shapes = model_tensors.shapes(architecture)
    for name, drawn_as in names.items():
        tensor = torch.empty(shapes[name])
        for at, values in weights.tiles(drawn_as, shapes[name], place=whole_slices(shapes[name])):
            tensor[at] = torch.from_numpy(values)
        yield name, tensor


def table(start: ModelStart) -> str:
    """Lines that say which tensors are new and which are dropped."""
    lines = [*((name, "new: random") for name in start.new)]
    lines += [(name, "dropped") for name in start.dropped]
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)
