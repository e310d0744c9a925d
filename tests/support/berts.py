"""Tiny BERTs for tests: our shapes, transformers' models of the same shape, masked samples."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.random_tensors import randomized
from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import predictions
from tokamake.parallel.loss import NO_LABEL, cross_entropy
from tokamake.train.objectives.masked.rows import MaskedRows

PAD = 0


def bert(**values: Any) -> Architecture:
    """A shape with 4 heads of width 16, 3 layers and an odd vocabulary."""
    usual = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    return Architecture(family="bert", **(usual | values))


ARCHITECTURES = {
    "bert": bert(),
    "bert-tanh": bert(
        hidden_act="gelu_new", head_act="gelu_new", vocab_size=128, layer_norm_epsilon=1e-12
    ),
    "bert-without-order": bert(sentence_order_head=False, intermediate_size=48, type_vocab_size=3),
}
"""Those that transformers can hold, too."""
MIXED = bert(hidden_act="gelu_new")
"""Megatron's default: tanh in the MLPs, erf in the head."""


def reference(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with random weights, norms and biases included, without dropout."""
    import transformers

    torch.manual_seed(0)
    shape = architecture
    config = transformers.MegatronBertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        intermediate_size=shape.intermediate_size,
        hidden_act=shape.hidden_act,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=shape.max_position_embeddings,
        type_vocab_size=shape.setting("type_vocab_size"),
        initializer_range=shape.initializer_range,
        layer_norm_eps=shape.layer_norm_epsilon,
        pad_token_id=None,  # the embedding of padding would have no gradient as an output, either
    )
    has_order = shape.setting("sentence_order_head")
    kind = (
        transformers.MegatronBertForPreTraining
        if has_order
        else transformers.MegatronBertForMaskedLM
    )
    model = kind(config)
    return randomized(model, dtype)


def tensors_of(model: Any) -> dict[str, Tensor]:
    """A transformers model's tensors, without copies of tied ones."""
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("cls.predictions.decoder.")
    }


def masked_samples(
    architecture: Architecture, *, number: int, length: int, seed: int = 7
) -> MaskedRows:
    """Random samples of different lengths; the first one is full, the second one masks nothing."""
    assert architecture.vocab_size is not None
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, architecture.vocab_size, (number, length))
    lengths = generator.integers(length // 4, length, number)
    lengths[0] = length
    padding_mask = np.arange(length) < lengths[:, None]
    types = np.arange(length) >= generator.integers(2, length // 2, number)[:, None]
    is_masked = padding_mask & (generator.random((number, length)) < 0.2)
    is_masked[1] = False
    labels = np.where(is_masked, tokens, NO_LABEL)
    inputs = np.where(is_masked, generator.integers(1, architecture.vocab_size), tokens)
    return MaskedRows(
        np.where(padding_mask, inputs, PAD),
        np.where(padding_mask, types, 0).astype(np.int64),
        labels,
        padding_mask,
        generator.integers(0, 2, number),
    )


def rows_of(samples: MaskedRows, part: slice) -> MaskedRows:
    """Some of the samples."""
    return MaskedRows(*(array[part] for array in samples))


def inputs_of(samples: MaskedRows) -> tuple[Tensor, dict[str, Tensor]]:
    """Arguments of our model."""
    further = {
        "token_types": torch.from_numpy(samples.types),
        "document_ids": torch.from_numpy(~samples.padding_mask).long(),
    }
    return torch.from_numpy(samples.tokens), further


def mean_loss(model: Any, samples: MaskedRows) -> Tensor:
    """Loss of our model: mean over masked tokens, plus mean over samples."""
    tokens, further = inputs_of(samples)
    output = predictions(model(tokens, **further))
    labels = torch.from_numpy(samples.labels)
    size = model.architecture.vocab_size
    total = cross_entropy(output.logits, labels, mesh=model.mesh, size=size)
    loss = total / (labels != NO_LABEL).sum().clamp(min=1)
    if output.sample_logits is None:
        return loss
    return loss + F.cross_entropy(output.sample_logits, torch.from_numpy(samples.is_random))


def their_output(model: Any, samples: MaskedRows) -> tuple[Tensor, Tensor | None]:
    """Logits of tokens and of samples by transformers' model."""
    output = model(
        input_ids=torch.from_numpy(samples.tokens),
        attention_mask=torch.from_numpy(samples.padding_mask).long(),
        token_type_ids=torch.from_numpy(samples.types),
    )
    if hasattr(output, "prediction_logits"):
        return output.prediction_logits, output.seq_relationship_logits
    return output.logits, None


def their_loss(model: Any, samples: MaskedRows) -> Tensor:
    """Loss of transformers' model, by torch."""
    logits, order = their_output(model, samples)
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(samples.labels).flatten())
    if order is None:
        return loss
    return loss + F.cross_entropy(order, torch.from_numpy(samples.is_random))
