"""Causal models: embedding, layers, output layer.

Shape suffixes: B batch, L tokens, D hidden size.
"""

import torch
from torch import Tensor

from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.language_model import LanguageModel
from tokamake.models.common.positions import rotary
from tokamake.parallel.attention import AttentionMask
from tokamake.parallel.dropout import dropped


class Decoder(LanguageModel):
    """A causal model; a family may replace `embedded` and `biased`.

    Attributes:
        scales_embeddings: whether embeddings of tokens are multiplied by √D (Gemma).
    """

    scales_embeddings = False

    def forward(
        self,
        x: Tensor,
        cache: KeyValueCache | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        sample_numbers: Tensor | None = None,
        **further: Tensor,
    ) -> Tensor:
        """Predict each token's successor; see `LanguageModel.forward`.

        Args:
            further: inputs of the family's `through_layers`.
        """
        places = self.positions(x, cache)
        if position_ids is None:
            position_ids = places
        dropout = self.dropout(x, sample_numbers)
        x_BLD = x
        if self.is_first:
            x_BLD = dropped(self.embedded(x, position_ids), dropout, "embedding")
        cos, sin = None, None
        if self.architecture.position_embedding == "rotary":
            # Ranks and passes that share a row agree on its length.
            longest = cache.capacity if cache else places.shape[-1] * self.mesh.context.size
            cos, sin = rotary(position_ids, self.architecture, x_BLD.dtype, longest=longest)
        mask = self.biased(self.mask(document_ids, cache), x_BLD, places=places, cache=cache)
        x_BLD = self.through_layers(x_BLD, cos, sin, mask, dropout, cache=cache, **further)
        return self.logits(x_BLD, cache) if self.is_last else x_BLD

    def embedded(self, tokens_BL: Tensor, positions: Tensor) -> Tensor:
        """States of tokens before the first layer; positions are (L,) or (B, L)."""
        x_BLD = self.token_states(tokens_BL, positions)
        if self.scales_embeddings:
            # The factor is rounded to the dtype, as in Gemma's own code.
            x_BLD = x_BLD * torch.tensor(self.architecture.hidden_size**0.5, dtype=x_BLD.dtype)
        return x_BLD

    def biased(
        self,
        mask: AttentionMask,
        x_BLD: Tensor,  # noqa: ARG002
        *,
        places: Tensor,  # noqa: ARG002
        cache: KeyValueCache | None,  # noqa: ARG002
    ) -> AttentionMask:
        """Mask of attention with the family's bias of scores, if it has one.

        `places` are positions in the rows; for `embedded`, they can be positions in documents.
        """
        return mask
