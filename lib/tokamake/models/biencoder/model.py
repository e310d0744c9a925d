"""A biencoder as Megatron has it (arXiv 1906.00300): a BERT embeds queries, another one blocks.

The vector of a text is the state of [CLS] after the last norm, then a linear projection if there is
one. The score of a pair is the product of its vectors, so blocks are embedded once for all queries.
Shape suffixes: B samples, L tokens, D width of the vectors.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tokamake.models.biencoder.hf import towers
from tokamake.models.common.language_model import LanguageModel, Predictions
from tokamake.models.common.recompute import Recompute
from tokamake.models.common.text_encoder import TextEncoder
from tokamake.parallel.tensor import WholeLinear, first_tokens

STACKS = "biencoder"

SETTINGS = {
    "position_embedding": ("learned",),
    "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": (True,),
    "type_vocab_size": (2, 0, 1, 3, 4),
    "shared_towers": (False, True),
    "projection_dim": 0,
}
"""Its own: type_vocab_size is the number of token types, 0 for none; all tokens have type 0.
shared_towers: whether one BERT embeds queries and blocks. projection_dim is the width of the
vectors, 0 for hidden_size, without a projection."""

INTERMEDIATE_SIZE = (4, 1, 1)


class Tower(TextEncoder):
    """A BERT that embeds texts."""

    def add_output(self) -> None:
        """Add the last norm and the projection."""
        super().add_output()
        if size := self.architecture.setting("projection_dim"):
            self.projection = WholeLinear(self.architecture.hidden_size, size)

    def embeddings(
        self,
        tokens_BL: Tensor,
        document_ids: Tensor | None,
        *,
        text_numbers: Tensor | None,
    ) -> Tensor:
        """Vectors (B, D) of texts.

        Args:
            document_ids: (B, L) numbers that hide padding, see `Model.forward`.
            text_numbers: (B,) number of each text in the run, for dropout; None: none.
        """
        dropout = self.dropout(tokens_BL, text_numbers)
        x_BLD = self.norm(self.states(tokens_BL, dropout, document_ids=document_ids))
        x_BD = first_tokens(x_BLD, self.mesh)
        return self.projection(x_BD) if hasattr(self, "projection") else x_BD


class Model(LanguageModel):
    """A whole biencoder; pipelines do not divide it."""

    is_causal = False

    @property
    def towers(self) -> dict[str, Tower]:
        """The towers by name."""
        return {name: getattr(self, name) for name in towers(self.architecture)}

    def add_layers(self, numbers: range) -> None:
        """Add the towers, and number their layers one tower after the other."""
        assert len(numbers) == self.architecture.num_hidden_layers, "pipelines are refused"
        for name in towers(self.architecture):
            setattr(self, name, Tower(self.architecture, self.mesh))
        for number, layer in enumerate(self._layers()):
            layer.self_attn.number = number

    def _layers(self) -> Iterator[Any]:
        for tower in self.towers.values():
            yield from tower.layers.values()

    def add_embeddings(self) -> None:
        """Add nothing: towers have their own."""

    def add_output(self) -> None:
        """Add nothing: towers have their own."""

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self._layers()]

    def layer_number(self, parameter: str) -> int | None:
        name, _, within = parameter.partition(".")
        number = self.towers[name].layer_number(within)
        if number is None:
            return None
        return number + [*self.towers].index(name) * self.architecture.num_hidden_layers

    def set_recompute(self, recompute: Recompute) -> None:
        super().set_recompute(recompute)
        for tower in self.towers.values():
            tower.set_recompute(recompute)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        sample_numbers: Tensor | None = None,
        block_tokens: Tensor | None = None,
        block_document_ids: Tensor | None = None,
    ) -> Predictions:
        """Embed queries and blocks; see `LanguageModel.forward`.

        Args:
            x: (B, L) int64 tokens of queries.
            document_ids: (B, L) numbers; a token sees only tokens with its own number. Padding has
                a number of its own. None: there is no padding.
            block_tokens: (B, L) int64 tokens of blocks; (B × n, L) if each query has n of them.
            block_document_ids: numbers of the blocks' tokens, in the same way.

        Returns:
            Vectors of queries and of blocks; no logits.
        """
        assert block_tokens is not None
        query_numbers = block_numbers = None
        if sample_numbers is not None:  # each text has masks of its own
            num_texts = 1 + len(block_tokens) // len(x)
            places = torch.arange(num_texts, device=x.device)
            numbers = num_texts * sample_numbers[:, None] + places
            query_numbers, block_numbers = numbers[:, 0], numbers[:, 1:].flatten()
        towers = [*self.towers.values()]
        for tower in towers:
            tower.dropout_rates = self.dropout_rates
        queries_BD = towers[0].embeddings(x, document_ids, text_numbers=query_numbers)
        blocks_BD = towers[-1].embeddings(
            block_tokens, block_document_ids, text_numbers=block_numbers
        )
        no_logits = torch.empty(0, dtype=queries_BD.dtype, device=queries_BD.device)
        return Predictions(no_logits, query_embeddings=queries_BD, block_embeddings=blocks_BD)
