"""Llama (arXiv 2302.13971): RMSNorm, rotary positions, grouped attention, SwiGLU, no biases.

Weights come from a checkpoint (`tokamake.checkpoint`) or from `Model.initialize`; the trainer calls
`loss`, evaluation and generation call the model for logits.
Shape suffixes: B batch, L tokens, D hidden size, V vocabulary, K width of a head.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config import Architecture
from tokamake.models._layers import MLP, Attention, KeyValueCache, document_mask, rotary

_NO_LABEL = -100


class Block(nn.Module):
    """One layer: attention, then MLP, each on normed states and added to the residual stream."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, epsilon = architecture.hidden_size, architecture.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.self_attn = Attention(architecture)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.mlp = MLP(architecture)

    def forward(
        self,
        x_BLD: Tensor,
        cos_LK: Tensor,
        sin_LK: Tensor,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Transform token states."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), cos_LK, sin_LK, cache, mask)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))


class Model(nn.Module):
    """A Llama whose parameters are named as Hugging Face's, see `hugging_face_name`.

    To load weights without drawing random ones first, construct it under `torch.device("meta")` and
    call `load_state_dict(..., assign=True)`; see `tokamake.checkpoint.tensors.to_model`.

    Args:
        architecture: shape of the model; its vocab_size is filled in.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        assert architecture.vocab_size is not None, "fill in vocab_size before building the model"
        self.architecture = architecture
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            Block(architecture) for _ in range(architecture.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(hidden, eps=architecture.rms_norm_eps)
        if not architecture.tie_word_embeddings:
            self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw random weights: normal with deviation `initializer_range`, norms 1.

        Projections into the residual stream are narrower by √(2 × layers), as in GPT-2's report.
        Each tensor depends on the seed, its name and its shape alone, and numpy draws it: torch's
        normal differs with the processor's vector units.
        """
        depth = math.sqrt(2 * self.architecture.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = self.architecture.initializer_range / (depth if into_residual else 1.0)
            source = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = np.random.default_rng(int.from_bytes(source, "little"))
            drawn = generator.standard_normal(parameter.shape, dtype=np.float32)
            parameter.copy_(torch.from_numpy(drawn).mul_(deviation))

    def new_cache(self) -> list[KeyValueCache]:
        """An empty cache for `forward`: one per layer."""
        return [KeyValueCache() for _ in self.layers]

    def forward(
        self,
        tokens_BL: Tensor,
        cache: list[KeyValueCache] | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Predict each token's successor.

        Args:
            tokens_BL: (B, L) int64 token ids.
            cache: tokens already seen, from `new_cache`; it is extended by these.
            position_ids: (B, L) positions, where they are not those in the row.
            document_ids: (B, L) documents, where a token sees none but those of its own.

        Returns:
            (B, L, V) logits in the dtype of the weights.
        """
        start = cache[0].length if cache else 0
        if position_ids is None:
            position_ids = torch.arange(start, start + tokens_BL.shape[1], device=tokens_BL.device)
        mask = None if document_ids is None else document_mask(document_ids)
        x_BLD = self.embed_tokens(tokens_BL)
        cos, sin = (angle.to(x_BLD.dtype) for angle in rotary(position_ids, self.architecture))
        for number, layer in enumerate(self.layers):
            x_BLD = layer(x_BLD, cos, sin, cache[number] if cache else None, mask)
        x_BLD = self.norm(x_BLD)
        if self.architecture.tie_word_embeddings:
            return F.linear(x_BLD, self.embed_tokens.weight)
        return self.lm_head(x_BLD)

    def loss(
        self,
        tokens: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Mean cross entropy in nats, fp32, of tokens 1 … L given those before them.

        Args:
            tokens: (B, L + 1) int64 token ids; one below 0 is none, and has no part in the mean.
            position_ids: (B, L) as `forward` takes them.
            document_ids: (B, L) as `forward` takes them.
            loss_mask: (B, L) bool, which inputs have a part in the mean; 0 where none has.
        """
        inputs = tokens[:, :-1].clamp(min=0)
        logits_BLV = self(inputs, position_ids=position_ids, document_ids=document_ids)
        logits, labels = logits_BLV.flatten(0, 1).float(), tokens[:, 1:].flatten()
        left_out = labels < 0
        if loss_mask is None:
            labels = labels.masked_fill(left_out, _NO_LABEL)
            return F.cross_entropy(logits, labels, ignore_index=_NO_LABEL)
        left_out = left_out | ~loss_mask.flatten()
        labels = labels.masked_fill(left_out, _NO_LABEL)
        total = F.cross_entropy(logits, labels, ignore_index=_NO_LABEL, reduction="sum")
        return total / (~left_out).sum().clamp(min=1)


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of a parameter: all but the output layer lie under `model.`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def num_flops_per_token(architecture: Architecture, sequence_length: int) -> int:
    """Floating-point operations of one token's forward and backward pass.

    Counts matrix products alone, two operations a multiply-add, backward twice the forward, and
    attention over the whole sequence as if it were not causal: the accounting of PaLM (arXiv
    2204.02311, appendix B). The embedding is a look-up and free; the output layer is a product.
    """
    assert architecture.vocab_size is not None, "fill in vocab_size before counting"
    hidden = architecture.hidden_size
    key_value = architecture.num_key_value_heads * architecture.head_dim
    projections = 2 * hidden * hidden + 2 * hidden * key_value
    mlp = 3 * hidden * architecture.intermediate_size
    scores_and_values = 2 * sequence_length * hidden
    layer = projections + mlp + scores_and_values
    multiply_adds = architecture.num_hidden_layers * layer + hidden * architecture.vocab_size
    return 3 * 2 * multiply_adds
