"""Tiny T5s for tests: our shapes, transformers' models of the same shape, samples with spans."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.random_tensors import randomized
from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import predictions
from tokamake.parallel.loss import NO_LABEL, cross_entropy
from tokamake.train.objectives.span_corruption.rows import SpanRows

PAD, BOS = 0, 1


def t5(**values: Any) -> Architecture:
    """A shape with 4 heads of width 16, 3 + 2 layers and an odd vocabulary."""
    usual = {
        "family": "t5",
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_decoder_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    return Architecture(**(usual | values))


ARCHITECTURES = {
    "t5": t5(),
    "t5-tanh": t5(hidden_act="gelu_new", vocab_size=128, num_hidden_layers=2, intermediate_size=48),
}
"""Those that transformers can hold, too."""


def _config(shape: Architecture) -> Any:
    import transformers

    return transformers.BlenderbotConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.hidden_size,
        encoder_layers=shape.num_hidden_layers,
        decoder_layers=shape.setting("num_decoder_layers"),
        encoder_attention_heads=shape.num_attention_heads,
        decoder_attention_heads=shape.num_attention_heads,
        encoder_ffn_dim=shape.intermediate_size,
        decoder_ffn_dim=shape.intermediate_size,
        max_position_embeddings=shape.max_position_embeddings,
        activation_function=shape.hidden_act,
        init_std=shape.initializer_range,
        dropout=0.0,
        pad_token_id=None,  # the embedding of padding would have no gradient as an output, either
    )


def reference(architecture: Architecture) -> Any:
    """transformers' model with random weights, norms and biases included, without dropout.

    Its two tables of positions are one, and its bias of the logits is trained, as in Megatron.
    """
    import transformers

    torch.manual_seed(0)
    model = transformers.BlenderbotForConditionalGeneration(_config(architecture))
    model.model.decoder.embed_positions = model.model.encoder.embed_positions
    bias = torch.nn.Parameter(torch.zeros(1, architecture.vocab_size or 0))
    del model.final_logits_bias
    model.final_logits_bias = bias
    return randomized(model)


def hf_t5(**values: Any) -> Architecture:
    """A T5 v1.1 with 4 heads of width 16 of narrower states, 3 + 2 layers and few buckets."""
    usual = {
        "family": "hf_t5",
        "hidden_size": 48,
        "head_dim": 16,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 20,
    }
    return t5(**(usual | values))


HF_ARCHITECTURES = {
    "hf_t5": hf_t5(),
    "hf_t5-tied": hf_t5(
        hidden_act="silu", vocab_size=128, tie_word_embeddings=True, num_decoder_layers=3
    ),
}


def hf_reference(shape: Architecture) -> Any:
    """transformers' T5 with random weights, norms included, without dropout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=shape.vocab_size,
        d_model=shape.hidden_size,
        d_kv=shape.head_dim,
        d_ff=shape.intermediate_size,
        num_layers=shape.num_hidden_layers,
        num_decoder_layers=shape.setting("num_decoder_layers"),
        num_heads=shape.num_attention_heads,
        relative_attention_num_buckets=shape.setting("relative_attention_num_buckets"),
        relative_attention_max_distance=shape.setting("relative_attention_max_distance"),
        feed_forward_proj={"gelu_new": "gated-gelu", "silu": "gated-silu"}[shape.hidden_act],
        layer_norm_epsilon=shape.rms_norm_eps,
        tie_word_embeddings=shape.tie_word_embeddings,
        initializer_factor=0.3,
        dropout_rate=0.0,
        n_positions=shape.max_position_embeddings,
    )
    model = transformers.T5ForConditionalGeneration(config)
    if not shape.tie_word_embeddings:  # transformers 5 ties them in any case
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return randomized(model)


def named_parameters(model: Any) -> dict[str, Tensor]:
    """Parameters of transformers' model by the names of its files, with the tables of positions."""
    named = dict(model.named_parameters())
    positions = "embed_positions.weight"
    if f"model.encoder.{positions}" in named:
        named[f"model.decoder.{positions}"] = named[f"model.encoder.{positions}"]
    return named


def span_samples(
    architecture: Architecture, *, number: int, length: int, decoder_length: int, seed: int = 7
) -> SpanRows:
    """Random samples of different lengths; the first one is full."""
    assert architecture.vocab_size is not None
    generator = np.random.default_rng(seed)
    tokens = generator.integers(2, architecture.vocab_size, (number, length))
    targets = generator.integers(2, architecture.vocab_size, (number, decoder_length))
    lengths = generator.integers(length // 4, length, number)
    decoder_lengths = generator.integers(decoder_length // 4, decoder_length, number)
    lengths[0], decoder_lengths[0] = length, decoder_length
    padding_mask = np.arange(length) < lengths[:, None]
    is_token = np.arange(decoder_length) < decoder_lengths[:, None]
    decoder_tokens = np.concatenate([np.full((number, 1), BOS), targets[:, :-1]], 1)
    return SpanRows(
        np.where(padding_mask, tokens, PAD),
        np.where(is_token, decoder_tokens, PAD),
        np.where(is_token, targets, NO_LABEL),
        padding_mask,
    )


def inputs_of(samples: SpanRows, multiple: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Arguments of our model."""
    inputs = samples.inputs(multiple)
    further = {name: torch.from_numpy(array) for name, array in inputs.further.items()}
    return torch.from_numpy(inputs.tokens), further


def mean_loss(model: Any, samples: SpanRows) -> Tensor:
    """Loss of our model: mean over tokens of the decoder."""
    mesh = model.mesh
    multiple = mesh.tensor.size if mesh.sequence_parallel else 1
    tokens, further = inputs_of(samples, multiple)
    logits = predictions(model(tokens, **further)).logits
    labeled = samples.inputs(multiple).labeled
    labels = torch.from_numpy(labeled.rows(samples.labels, padding=NO_LABEL))
    total = cross_entropy(logits, labels, mesh=mesh, size=model.architecture.vocab_size)
    return total / (labels != NO_LABEL).sum()


def their_logits(model: Any, samples: SpanRows) -> Tensor:
    """Logits by transformers' model."""
    logits: Tensor = model(
        input_ids=torch.from_numpy(samples.tokens),
        attention_mask=torch.from_numpy(samples.padding_mask).long(),
        decoder_input_ids=torch.from_numpy(samples.decoder_tokens),
    ).logits
    return logits


def their_loss(model: Any, samples: SpanRows) -> Tensor:
    """Loss of transformers' model, by torch."""
    labels = torch.from_numpy(samples.labels).flatten()
    return F.cross_entropy(their_logits(model, samples).flatten(0, 1), labels)
