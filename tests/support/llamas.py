"""Tiny Llamas for the checkpoint tests: our shapes, and transformers' models of the same shape."""

from pathlib import Path
from typing import Any

import torch

from tests.support.random_tensors import randomized
from tokamake.config.architecture import Architecture

ARCHITECTURES = [
    Architecture(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=64,
        rope_theta=5000.0,
        tie_word_embeddings=tied,
    )
    for key_value_heads in (4, 2, 1)
    for tied in (False, True)
    for vocab_size in (128, 131)
]
"""MHA, GQA and MQA, output layer tied or not, vocabulary that fits Megatron's padding or not."""

WIDE_HEADS = Architecture(**{**ARCHITECTURES[4].model_dump(), "head_dim": 24})
"""Heads that are wider together than the residual stream."""
BIASED = ARCHITECTURES[5].model_copy(update={"attention_bias": True, "mlp_bias": True})
"""With biases of all projections."""


def label(architecture: Architecture) -> str:
    """Test id of a shape."""
    tied = "tied" if architecture.tie_word_embeddings else "untied"
    return f"kv{architecture.num_key_value_heads}-{tied}-{architecture.vocab_size}"


def reference(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with random weights, norms included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    values = architecture.model_dump(exclude={"family", "rope_theta", "rope_scaling"})
    rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
    if architecture.rope_scaling:
        rope |= architecture.rope_scaling.model_dump(mode="json", exclude_none=True)
    model = LlamaForCausalLM(LlamaConfig(**values, rope_parameters=rope))
    return randomized(model, dtype)


def tensors_of(model: Any, architecture: Architecture) -> dict[str, torch.Tensor]:
    """A transformers model's tensors, the output layer left out if tied."""
    tensors = dict(model.state_dict())
    if architecture.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def write_confident(folder: Path, *, vocab_size: int, context: int) -> Path:
    """Write a random Llama whose weights are wide enough for confident, varied tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def window_nats(folder: Path, tokens: list[int], *, length: int) -> tuple[float, int]:
    """Sum of the losses of transformers, windows as rows, and the number of predicted tokens."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    whole, ids = (len(tokens) - 1) // length * length, torch.tensor(tokens)
    batches = [ids[None, whole:]] if whole < len(tokens) - 1 else []
    if whole:
        batches += ids[: whole + 1].unfold(0, length + 1, length).split(64)
    total, count = 0.0, 0
    for windows_BL in batches:
        with torch.no_grad():
            loss = model(windows_BL, labels=windows_BL).loss.item()
        number = windows_BL[:, 1:].numel()
        total, count = total + loss * number, count + number
    return total, count
