"""Tiny biencoders for tests: our shapes, transformers' BERTs as towers, pairs of texts."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import berts
from tests.support.random_tensors import randomized
from tokamake.config.architecture import Architecture
from tokamake.models.biencoder.hf import towers

ENCODER = berts.bert().model_dump(
    exclude={"head_act", "sentence_order_head", "task_head", "num_classes"}
)


def biencoder(**values: Any) -> Architecture:
    """Towers of the shape of `berts.bert`."""
    return Architecture(**{**ENCODER, "family": "biencoder", **values})


ARCHITECTURES = {
    "biencoder": biencoder(projection_dim=24),
    "biencoder-plain": biencoder(hidden_act="gelu_new", vocab_size=128, type_vocab_size=3),
    "biencoder-shared": biencoder(shared_towers=True, projection_dim=16),
}


class Oracle(nn.Module):
    """transformers' BERTs without poolers, and torch's projections."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        encoder = {name: getattr(architecture, name) for name in ENCODER if name != "family"}
        bert = berts.bert(**encoder, sentence_order_head=False)
        for name in towers(architecture):
            tower = berts.reference(bert).bert
            if size := architecture.setting("projection_dim"):
                tower.projection_enc = nn.Linear(architecture.hidden_size, size)
            setattr(self, name, tower)
        torch.manual_seed(1)  # towers differ
        randomized(self)

    def forward(self, tokens: Tensor, padding: Tensor, *, number: int) -> Tensor:
        """Vectors of queries (0) or blocks (1)."""
        names = towers(self.architecture)
        tower = getattr(self, names[number % len(names)])
        states = tower(input_ids=tokens, attention_mask=(~padding).long()).last_hidden_state
        first = states[:, 0]
        return tower.projection_enc(first) if hasattr(tower, "projection_enc") else first


class Pairs(NamedTuple):
    """Queries and blocks."""

    queries: npt.NDArray[np.int64]
    """(B, L) tokens."""
    query_padding: npt.NDArray[np.bool_]
    """(B, L) True for padding."""
    blocks: npt.NDArray[np.int64]
    block_padding: npt.NDArray[np.bool_]


def pairs(architecture: Architecture, *, number: int, length: int, seed: int = 7) -> Pairs:
    """Random texts of different lengths; the first ones are full."""
    assert architecture.vocab_size is not None
    generator, arrays = np.random.default_rng(seed), list[Any]()
    for _ in range(2):
        tokens = generator.integers(1, architecture.vocab_size, (number, length))
        lengths = generator.integers(length // 4, length, number)
        lengths[0] = length
        padding = np.arange(length) >= lengths[:, None]
        arrays += [np.where(padding, berts.PAD, tokens), padding]
    return Pairs(*arrays)


def inputs_of(texts: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
    """Arguments of our model."""
    queries, query_padding, blocks, block_padding = map(torch.from_numpy, texts)
    return queries, {
        "document_ids": query_padding.long(),
        "block_tokens": blocks,
        "block_document_ids": block_padding.long(),
    }


def vectors(model: Any, texts: Pairs) -> list[Tensor]:
    """Vectors of queries and of blocks, by our model."""
    tokens, further = inputs_of(texts)
    predicted = model(tokens, **further)
    return [predicted.query_embeddings, predicted.block_embeddings]


def their_vectors(oracle: Oracle, texts: Pairs) -> list[Tensor]:
    queries, query_padding, blocks, block_padding = map(torch.from_numpy, texts)
    return [oracle(queries, query_padding, number=0), oracle(blocks, block_padding, number=1)]


def in_batch_loss(vectors: list[Tensor]) -> Tensor:
    """Cross entropy of each query's own block among all blocks; scores are small, as gradients."""
    queries, blocks = vectors
    return F.cross_entropy(queries @ blocks.T / 64, torch.arange(len(queries)))


def mean_loss(model: Any, texts: Pairs) -> Tensor:
    """In-batch loss of our model."""
    return in_batch_loss(vectors(model, texts))
