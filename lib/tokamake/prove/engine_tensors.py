"""Tensors of an engine by name: chunks on this rank of weights and of the gradients of updates."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tokamake.parallel.sharding import ParameterChunk


class NamedChunk(NamedTuple):
    """Part of a whole tensor."""

    name: str
    """Name of the tensor in checkpoints."""
    place: tuple[slice, ...]
    """Index of the part in the whole tensor."""
    values: Tensor


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
