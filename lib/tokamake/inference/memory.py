"""Memory that a rank needs for inference, and memory of its device.

Parameters are counted on torch's `meta` device, which allocates nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokamake import plugins
from tokamake.inference.layout import InferenceLayout
from tokamake.parallel.mesh import planned
from tokamake.units import in_bytes

if TYPE_CHECKING:
    from tokamake.config.architecture import Architecture

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def weight_bytes(architecture: "Architecture", layout: InferenceLayout, *, world_size: int) -> int:
    """Most bytes of weights on a rank at one time.

    Without FSDP, the weights of the largest pipeline stage. With FSDP, the rank's shard of these
    weights, the largest layer, and all weights outside layers, which a pass gathers.
    """
    tensor, pipeline = layout.tensor_parallel_size, layout.pipeline_parallel_size
    mesh = planned(layout.settings)
    shards = world_size // (tensor * pipeline) if layout.fsdp else 1
    family = plugins.load("models/*/model", architecture.family)
    most = 0
    for stage in layout.settings.layers_of_stages(architecture.num_hidden_layers):
        with torch.device("meta"):
            module = family.Model(architecture.without_mtp, mesh, stage=stage)
        total = _num_parameters(module)
        if shards > 1:
            layers = [_num_parameters(layer) for layer in module.layers.values()]
            total = -(-total // shards) + max(layers) + total - sum(layers)
        most = max(most, total)
    return most * DTYPES[layout.dtype].itemsize


def cache_bytes(architecture: "Architecture", layout: InferenceLayout, *, num_tokens: int) -> int:
    """Most bytes of keys and values on a rank, for a number of tokens of all sequences."""
    stages = layout.settings.layers_of_stages(architecture.num_hidden_layers)
    width = architecture.latent_size
    if not width:
        heads = -(-architecture.num_key_value_heads // layout.tensor_parallel_size)
        width = 2 * heads * architecture.head_dim
    return max(map(len, stages)) * width * DTYPES[layout.dtype].itemsize * num_tokens


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class Needs:
    """Memory that a device needs beside the weights of a model."""

    cache_tokens: int = 0
    """Most tokens of all sequences in the cache of keys and values."""
    other_bytes: float = 0.0
    """Bytes of other models on a rank."""

    def beside_weights(self, architecture: "Architecture", layout: InferenceLayout) -> float:
        """Most bytes of a rank beside the weights of the model."""
        return self.other_bytes + cache_bytes(architecture, layout, num_tokens=self.cache_tokens)

    def total(
        self, architecture: "Architecture", layout: InferenceLayout, *, world_size: int
    ) -> float:
        """Most bytes of a rank for the model alone, with its cache."""
        weights = weight_bytes(architecture, layout, world_size=world_size)
        return weights + cache_bytes(architecture, layout, num_tokens=self.cache_tokens)


def memory_warning(
    needed: float, available: float, *, layout: InferenceLayout, others: float = 0.0
) -> str:
    """A line that says that a model does not fit, with the remedy; empty if it fits.

    Bytes of a rank: `needed` for weights, at most `others` beside them, `available` on its device.
    """
    if needed + others <= available:
        return ""
    if needed <= available:
        return (
            f"warning: weights in {layout.dtype} need {in_bytes(round(needed))} a rank, other "
            f"models and keys and values of full sequences {in_bytes(round(others))}, but the "
            f"device has {in_bytes(round(available))}: give a smaller --batch-size or "
            "--max-length, or share the model over more ranks"
        )
    narrower = "set --dtype bf16 (in a workflow evaluate.dtype and generate.dtype), or "
    return (
        f"warning: weights in {layout.dtype} need {in_bytes(round(needed))} a rank, but the device "
        f"has {in_bytes(round(available))}: {narrower * (layout.dtype == 'fp32')}share the model "
        "over more ranks with --fsdp, --tensor-parallel-size or --pipeline-parallel-size (in a "
        "workflow nodes and tasks of the rule, in the profile)"
    )
