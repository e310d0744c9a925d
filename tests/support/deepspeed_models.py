"""A tiny Llama with the names, shapes and arguments of Megatron-DeepSpeed.

It may have a pipeline. It computes the sum of its weights times random numbers, so its gradients
are random.
"""

import argparse
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

STEPS, SAMPLES, TOKENS = 3, 12, 192
NUM_LAYERS, HEAD_DIM, VOCAB, PADDED = 3, 2, 25, 28
SUB_GROUP_SIZE = 1000
"""DeepSpeed's sub_group_size: elements of a rank at which a flat tensor of stage 3 is full."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EMBEDDING = "language_model.embedding.word_embeddings"
HEAD = "language_model.output_layer"
NORM = "language_model.encoder.final_layernorm"
LAYERS = "language_model.encoder.layers."


@dataclass(frozen=True)
class Case:
    """Parallel layout and settings of the run that writes a checkpoint."""

    zero_stage: int = 1
    precision: str = "fp32"
    data: int = 2
    tensor: int = 1
    pipeline: int = 0
    """Number of stages; 0 for a model without pipeline."""
    tied: bool = False
    accumulation: str = "fp32"
    """Dtype in which bf16 gradients accumulate. With fp32 and ZeRO 1, DeepSpeed uses its
    BF16_Optimizer."""
    round_robin: bool = False
    """DeepSpeed's round_robin_gradients, which changes the order of parameters in a group."""
    fused: bool = False
    """Whether step counts are those of DeepSpeed's FusedAdam: ints, and 0 in the groups."""
    full: bool = False
    """Whether the vocabulary fills the embedding, so there is no padding."""

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * max(1, self.pipeline)

    @property
    def heads(self) -> tuple[int, int]:
        """Number of query heads, and of key and value heads."""
        return (9, 3) if self.tensor == 1 else (4, 2)

    @property
    def ffn(self) -> int:
        """Width inside the MLP. An odd number gives sizes that are not multiples of 4."""
        return 7 if self.tensor == 1 else 14

    def __str__(self) -> str:
        parts = [f"zero{self.zero_stage}", self.precision, f"dp{self.data}"]
        parts += [f"tp{self.tensor}"] * (self.tensor > 1) + ["tied"] * self.tied
        parts += [f"pp{self.pipeline}"] * (self.pipeline > 0) + ["robin"] * self.round_robin
        parts += ["fused"] * self.fused + ["full"] * self.full
        return "-".join(parts + ["bf16-sums"] * (self.accumulation == "bf16"))


def arguments(case: Case) -> argparse.Namespace:
    """Return the arguments that Megatron-DeepSpeed saves in checkpoints."""
    heads, groups = case.heads
    return argparse.Namespace(
        num_layers=NUM_LAYERS,
        hidden_size=heads * HEAD_DIM,
        ffn_hidden_size=case.ffn,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        seq_length=16,
        max_position_embeddings=16,
        swiglu=True,
        normalization="rmsnorm",
        layernorm_epsilon=1e-5,
        init_method_std=0.02,
        use_rotary_position_embeddings=True,
        add_position_embedding=False,
        add_bias_linear=False,
        rope_theta=5000.0,
        untie_embeddings_and_output_weights=not case.tied,
        vocab_size=PADDED if case.full else VOCAB,
        padded_vocab_size=PADDED,
        make_vocab_size_divisible_by=7,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=max(1, case.pipeline),
        no_pipeline_parallel=not case.pipeline,
        data_parallel_size=case.data,
        consumed_train_samples=SAMPLES,
        consumed_train_tokens=TOKENS,
        params_dtype=DTYPES[case.precision],
        bf16=case.precision == "bf16",
        fp16=case.precision == "fp16",
        deepspeed=True,
    )


class Weight(nn.Module):
    """A rank's slice of a weight. The module adds the weight times random numbers to its input."""

    def __init__(self, name: str, shape: tuple[int, ...], part: int | None, data_rank: int) -> None:
        super().__init__()
        self.name, self.shape, self.part, self.data_rank = name, shape, part, data_rank
        self.calls = 0
        self.weight = nn.Parameter(0.1 * self._random("start"))
        self.weight.tensor_model_parallel = part is not None

    def _random(self, *keys: Any) -> Tensor:
        seed = zlib.crc32(repr((self.name, self.part, *keys)).encode())
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))

    def forward(self, total: Tensor) -> Tensor:
        """Add the loss of this weight. Each call gives different gradients."""
        self.calls += 1
        return total + (self.weight * self._random(self.calls, self.data_rank).to(total)).sum()


class Chain(nn.Module):
    """Weights by dotted names. The module applies them one after the other."""

    def __init__(self, weights: dict[str, Weight]) -> None:
        super().__init__()
        for name, weight in weights.items():
            *groups, last = name.split(".")
            module: nn.Module = self
            for group in groups:
                if group not in dict(module.named_children()):
                    module.add_module(group, nn.Module())
                module = getattr(module, group)
            module.add_module(last, weight)

    def forward(self, total: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, Weight):
                total = module(total)
        return total


class TransformerLayer(Chain):
    """A layer. DeepSpeed counts modules of this name to divide them among stages."""


def weights_of(case: Case, tensor_rank: int, data_rank: int) -> dict[str, Weight]:
    """Return a rank's weights by Megatron's names, in Megatron's order."""
    (heads, groups), size = case.heads, case.tensor
    hidden, vocabulary = heads * HEAD_DIM, PADDED // size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, hidden)}
    for number in range(NUM_LAYERS):
        prefix = f"{LAYERS}{number}."
        shapes |= {
            f"{prefix}input_layernorm": (hidden,),
            f"{prefix}self_attention.query_key_value": (
                (heads + 2 * groups) * HEAD_DIM // size,
                hidden,
            ),
            f"{prefix}self_attention.dense": (hidden, hidden // size),
            f"{prefix}post_attention_layernorm": (hidden,),
            f"{prefix}mlp.dense_h_to_4h": (2 * case.ffn // size, hidden),
            f"{prefix}mlp.dense_4h_to_h": (hidden, case.ffn // size),
        }
    shapes[NORM] = (hidden,)
    if not case.tied:
        shapes[HEAD] = (vocabulary, hidden)
    return {
        name: Weight(name, shape, tensor_rank if len(shape) > 1 else None, data_rank)
        for name, shape in shapes.items()
    }


def pipeline_module(weights: dict[str, Weight], case: Case) -> nn.Module:
    """Return the weights as the layers of a pipeline, as in Megatron-DeepSpeed's GPTModelPipe."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    def to_dtype(total: Tensor) -> Tensor:
        return total.to(DTYPES[case.precision])

    embedding = {"word_embeddings": weights[EMBEDDING]}
    tied = ("embed", Chain, embedding)
    attribute = {"tied_weight_attr": "word_embeddings.weight"}
    layers, norm = [], weights[NORM]
    for number in range(NUM_LAYERS):
        prefix = f"{LAYERS}{number}."
        layer = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        layers.append(LayerSpec(TransformerLayer, layer))
    last = LayerSpec(Weight, norm.name, norm.shape, norm.part, norm.data_rank)
    if case.tied:
        # As in BigScience's fork, where functions between the layers have layer numbers, too.
        first = TiedLayerSpec(*tied, **attribute)
        head = TiedLayerSpec(*tied, **attribute, forward_fn=lambda module, total: module(total))
        specs = [to_dtype, first, to_dtype, *layers, to_dtype, last, head]
    else:
        head = LayerSpec(Chain, {"lm_head": weights[HEAD]})
        specs = [to_dtype, LayerSpec(Chain, embedding), *layers, last, head]
    module: nn.Module = PipelineModule(
        specs,
        topology=PipeModelDataParallelTopology(case.pipeline, case.tensor, case.data),
        loss_fn=lambda total, _: total.sum(),
        partition_method="type:transformer",
    )
    return module
