"""An encoder as Megatron's BERT has it: attention in both directions, learned positions, types.

Shape suffixes: B batch, L tokens, D hidden size.
"""

import torch
from torch import Tensor

from tokamake.models.common.language_model import LanguageModel, PackedRows
from tokamake.parallel.dropout import Dropout, dropped
from tokamake.parallel.tensor import ReplicatedEmbedding, own_tokens


class TextEncoder(LanguageModel):
    """Embeddings, layers and the last norm; families add heads, if any."""

    is_causal = False

    def add_embeddings(self) -> None:
        """Add the embeddings of tokens, of positions, and of token types."""
        super().add_embeddings()
        if num_types := self.architecture.setting("type_vocab_size"):
            hidden = self.architecture.hidden_size
            self.embed_token_types = ReplicatedEmbedding(num_types, hidden, mesh=self.mesh)

    def states(
        self,
        x: Tensor,
        dropout: Dropout | None,
        *,
        document_ids: Tensor | None,
        packed: PackedRows | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """States (B, L, D) before the last norm; see `Model.forward` for the arguments."""
        x_BLD = x
        if self.is_first:
            x_BLD = dropped(self._embedded(x, packed, token_types), dropout, "embedding")
        return self.through_layers(x_BLD, None, None, self.mask(document_ids), dropout)

    def _embedded(
        self, tokens_BL: Tensor, packed: PackedRows | None, token_types: Tensor | None
    ) -> Tensor:
        positions = packed.position_ids if packed else self.positions(tokens_BL)
        x_BLD = self.token_states(tokens_BL, positions)
        if not hasattr(self, "embed_token_types"):
            return x_BLD
        types_BL = torch.zeros_like(tokens_BL) if token_types is None else token_types
        return x_BLD + self.embed_token_types(own_tokens(types_BL, self.mesh))
