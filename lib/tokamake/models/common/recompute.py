"""Activation recomputation: what a backward pass computes again instead of keeping it in memory.

Chen et al. 2016 (arXiv 1604.06174); selective as in Korthikanti et al. 2022 (arXiv 2205.05198), yet
with what is cheap to compute again told by operators: all but matrix products and attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tokamake.parallel.document_attention import VARLEN
from tokamake.parallel.linear import ONEDNN


@dataclass(frozen=True)
class Recompute:
    """What is computed again."""

    granularity: Literal["none", "selective", "full"] = "none"
    """Nothing; what is cheap; or whole layers."""
    method: Literal["uniform", "block"] = "uniform"
    """Of `full`: all layers, in groups of `num_layers`; or the first `num_layers` of each stage."""
    num_layers: int = 1
    """See `method`."""


NONE = Recompute()
"""Keep everything."""

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    *([ONEDNN.default] if ONEDNN else []),
    *([VARLEN.default] if VARLEN else []),
}
"""Operators whose results `selective` keeps."""


def run(blocks: Sequence[nn.Module], recompute: Recompute, x: Tensor, *rest: Any) -> Tensor:
    """Pass states through blocks, each called with `rest`, too."""
    if not torch.is_grad_enabled() or recompute.granularity == "none":
        return _through(blocks, x, *rest)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if recompute.granularity == "selective":
        again = partial(again, context_fn=_contexts)
        return _grouped(blocks, 1, again, x, *rest)
    if recompute.method == "uniform":
        return _grouped(blocks, recompute.num_layers, again, x, *rest)
    x = _grouped(blocks[: recompute.num_layers], 1, again, x, *rest)
    return _through(blocks[recompute.num_layers :], x, *rest)


def _grouped(
    blocks: Sequence[nn.Module], size: int, again: Callable[..., Tensor], x: Tensor, *rest: Any
) -> Tensor:
    for start in range(0, len(blocks), size):
        x = again(_through, blocks[start : start + size], x, *rest)
    return x


def _through(blocks: Sequence[nn.Module], x: Tensor, *rest: Any) -> Tensor:
    for block in blocks:
        x = block(x, *rest)
    return x


def _contexts() -> Any:
    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        kept = operator in _KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
