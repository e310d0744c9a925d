"""Tensors of an engine by name: chunks on this rank of weights and of the gradients of updates."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.optim._extra_pass import ExtraPass, Relabel
from tokamake.parallel.sharding import ParameterChunk
from tokamake.runtime.device import group_device


class NamedChunk(NamedTuple):
    """Part of a whole tensor."""

    name: str
    """Name of the tensor in checkpoints."""
    place: tuple[slice, ...]
    """Index of the part in the whole tensor."""
    values: Tensor


class WholeTensors(NamedTuple):
    """Whole tensors, gathered from chunks on all ranks."""

    tensors: dict[str, Tensor]
    """Mean of all copies of a tensor, fp32."""
    spreads: dict[str, float]
    """Root of the sum, over copies, of the squared distance from their mean: 0 if all agree."""
    missing: frozenset[str]
    """Tensors with an element that no rank has."""


def tensor_shapes(run: Run) -> dict[str, torch.Size]:
    """Shapes of all whole tensors of a run's model, buffers too, by their names in checkpoints."""
    with torch.device("meta"):
        model: Any = plugins.load("models/*/model", run.architecture.family).Model(run.architecture)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {model.tensor_name(name): tensor.shape for name, tensor in named}


def fragments(engine: Any) -> list[Any]:
    """This rank's parts of parameters, or of the flat buffers of DeepSpeed."""
    return list(vars(engine).get("_fragments", engine._chunks))


def buffer(fragment: Any) -> Tensor:
    """Parameter of the optimizer that contains a fragment."""
    tensor: Tensor = fragment.local if isinstance(fragment, ParameterChunk) else fragment.flat
    return tensor


def chunks(fragment: Any, tensor: Tensor) -> Iterator[NamedChunk]:
    """Chunks of whole tensors in a tensor of the shape of a fragment's buffer."""
    if isinstance(fragment, ParameterChunk):
        yield NamedChunk(fragment.saved_name, fragment.place, tensor.detach())
        return
    name = fragment.chunk.saved_name
    for offset, elements in fragment.place(tensor).chunks.items():
        sizes = zip(offset, elements.shape, strict=True)
        place = tuple(slice(start, start + size) for start, size in sizes)
        yield NamedChunk(name, place, elements.detach())


def weights(engine: Any) -> list[NamedChunk]:
    """This rank's fp32 weights."""
    parts = [*fragments(engine), *engine.stages.buffers]
    return [chunk for each in parts for chunk in chunks(each, buffer(each))]


def watch_updates(engine: Any, watch: Callable[[list[NamedChunk]], None]) -> None:
    """Call `watch` with the clipped gradients of each update, before it."""
    update, remaining, seen = engine.optimizer.step, list[Any](), list[NamedChunk]()

    def step(*arguments: Any) -> Any:
        # DeepSpeed clips and updates groups of parameters one after the other.
        if not remaining:
            remaining.extend(fragments(engine))
        groups = engine.optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        for fragment in [*remaining]:
            tensor = buffer(fragment)
            if id(tensor) in updated:
                remaining.remove(fragment)
                if tensor.grad is not None:
                    seen.extend(chunks(fragment, tensor.grad))
        if not remaining:
            watch([*seen])
            seen.clear()
        return update(*arguments)

    engine.optimizer.step = step


def watch_extra_passes(engine: Any, watch: Callable[[list[NamedChunk]], None]) -> None:
    """Call `watch` with the gradients of each extra pass that the optimizer makes."""
    if not hasattr(engine.optimizer, "prepare"):
        return
    prepare = engine.optimizer.prepare

    def watched(extra_pass: ExtraPass) -> None:
        def gradients(relabel: Relabel) -> int | None:
            num_labels = extra_pass.gradients(relabel)
            watch([chunk for each in fragments(engine) for chunk in chunks(each, _gradient(each))])
            return num_labels

        prepare(replace(extra_pass, gradients=gradients))

    engine.optimizer.prepare = watched


def _gradient(fragment: Any) -> Tensor:
    """Gradient of a fragment; 0 if it has none."""
    tensor = buffer(fragment)
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def gather(chunks: Iterable[NamedChunk], shapes: Mapping[str, torch.Size]) -> WholeTensors:
    """Gather whole tensors of these shapes; all ranks call it together."""
    chunks, sizes = [*chunks], [shape.numel() for shape in shapes.values()]
    counts, sums = torch.zeros(2, sum(sizes), dtype=torch.float64)

    def by_name(flat: Tensor) -> dict[str, Tensor]:
        parts = zip(shapes.items(), flat.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    counts_of, sums_of = by_name(counts), by_name(sums)
    for name, place, values in chunks:
        counts_of[name][place] += 1
        sums_of[name][place] += values.double().cpu()
    counts_of, sums_of = by_name(_total(counts)), by_name(_total(sums))
    # Sums of equal fp32 numbers are exact in fp64, and so are their means.
    means = {name: sums_of[name] / counts.clamp(min=1) for name, counts in counts_of.items()}
    squares = dict.fromkeys(shapes, torch.zeros((), dtype=torch.float64))
    for name, place, values in chunks:
        squares[name] = squares[name] + (values.double().cpu() - means[name][place]).square().sum()
    of_all = _total(torch.stack([*squares.values()])).sqrt().tolist()
    return WholeTensors(
        {name: mean.float() for name, mean in means.items()},
        dict(zip(shapes, of_all, strict=True)),
        frozenset(name for name, counts in counts_of.items() if not counts.all()),
    )


def _total(values: Tensor) -> Tensor:
    """The sum over all ranks; ranks with accelerators add up no tensors of the host."""
    of_ranks = values.to(group_device())
    dist.all_reduce(of_ranks)
    return of_ranks.cpu()
