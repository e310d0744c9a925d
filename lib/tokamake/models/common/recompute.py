"""Activation recomputation: the backward pass computes activations again instead of saving them.

Chen et al. 2016 (arXiv 1604.06174). `selective` follows Korthikanti et al. 2022 (arXiv 2205.05198)
but chooses by operator: it saves the results of matrix products and attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tokamake.parallel import recomputation
from tokamake.runtime.torch_internals import (
    attention_operators,
    grouped_product,
    onednn_linear,
)

States = TypeVar("States")
"""States of tokens, which each layer takes and returns."""


@dataclass(frozen=True)
class Recompute:
    """Activations that the backward pass computes again."""

    granularity: Literal["none", "selective", "full"] = "none"
    """None, cheap activations, or whole layers."""
    method: Literal["uniform", "block"] = "uniform"
    """For `full`: all layers in groups of `num_layers`, or the first `num_layers` of a stage."""
    num_layers: int = 1
    """See `method`."""
    in_parts: bool = False
    """For `full`: whether backward passes have two parts, as in zero-bubble schedules."""


NONE = Recompute()
"""Save all activations."""


def run(
    layers: Sequence[Callable[..., States]], recompute: Recompute, x: States, *inputs: Any
) -> States:
    """Pass states through layers; each gets `inputs`, too."""
    if not torch.is_grad_enabled() or recompute.granularity == "none":
        return _forward(layers, x, *inputs)
    # Masks of dropout follow from counters, so no random generator needs its state back.
    call: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if recompute.granularity == "selective":
        for layer in layers:
            x = call(layer, x, *inputs, context_fn=partial(_contexts, layer))
        return x
    if recompute.in_parts:
        call = recomputation.checkpoint
    if recompute.method == "uniform":
        return _by_groups(layers, recompute.num_layers, call, x, *inputs)
    x = _by_groups(layers[: recompute.num_layers], 1, call, x, *inputs)
    return _forward(layers[recompute.num_layers :], x, *inputs)


def _by_groups(
    layers: Sequence[Callable[..., States]],
    size: int,
    call: Callable[..., States],
    x: States,
    *inputs: Any,
) -> States:
    for start in range(0, len(layers), size):
        x = call(_forward, layers[start : start + size], x, *inputs)
    return x


def _forward(layers: Sequence[Callable[..., States]], x: States, *inputs: Any) -> States:
    for layer in layers:
        x = layer(x, *inputs)
    return x


@cache
def _saved() -> set[Any]:
    """Operators whose results `selective` saves."""
    return {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        *([onednn_linear.default] if onednn_linear else []),
        *([grouped_product.default] if grouped_product else []),
        *attention_operators(),
    }


class _Gathered:
    """Gathers the parameters of a layer, then enters the context of its second pass.

    In a pipeline, ZeRO 3 may gather experts in the first pass of one micro batch, and again before
    the second pass of another one. There they would be operators that the first pass lacks.
    """

    def __init__(self, layer: Any, context: Any) -> None:
        self._layer, self._context = layer, context

    def __enter__(self) -> None:
        modules = self._layer.modules() if isinstance(self._layer, torch.nn.Module) else ()
        for module in modules:
            # FSDP2's modules have it; importing their class takes long.
            if (unshard := getattr(module, "unshard", None)) is not None:
                unshard()
        self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)


def _contexts(layer: Any) -> Any:
    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_saved = operator in _saved()
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    return first, _Gathered(layer, second)
