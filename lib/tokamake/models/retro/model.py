"""Retro (arXiv 2112.04426): a decoder that attends to neighbors of the chunks of its text.

It is a model of another family, its decoder. Every third layer also has chunked cross-attention,
between self-attention and MLP. An encoder in the first of these layers reads the neighbors with the
decoder's embeddings, and in its first layer also the states of the chunk; all layers attend to its
output. As in Megatron, the encoder knows positions only if the decoder learns them. See `chunks`
for the tokens that see a neighbor, and for the shapes.
"""

from collections.abc import Callable, Sequence
from functools import cache as cached
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.models.common import recompute
from tokamake.models.common.decoder import Decoder
from tokamake.models.common.encoder_decoder import CrossAttention, DecoderLayer
from tokamake.models.common.key_value_cache import KeyValueCache, LayerCache
from tokamake.models.common.layers import Attention, TransformerLayer
from tokamake.models.retro.cache import CachedChunks, Retriever, RetroCache, retrieved
from tokamake.models.retro.chunks import ChunkGrid, EncodedNeighbors, Neighbors, counted
from tokamake.parallel.attention import AttentionMask, attention
from tokamake.parallel.document_mask import UNMASKED
from tokamake.parallel.dropout import Dropout, SampleTokens, dropped
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.score_rules import PLAIN_SCORES, ScoreRules
from tokamake.parallel.tensor import own_tokens, shared_input

STACKS = "retro"

WRAPS = "decoder"

SETTINGS = {
    "decoder": ("llama", "gpt"),
    "chunk_length": 64,
    "first_retrieval_layer": 0,
    "retrieval_interval": 3,
    "num_encoder_layers": 2,
    "encoder_hidden_dropout": 0.1,
    "encoder_attention_dropout": 0.1,
    "final_norm": (True, False),
}
"""Its own, beside the settings of the decoder: decoder is the family of the decoder. chunk_length
is the number of tokens of a chunk. first_retrieval_layer is the first layer that attends to
neighbors, counted from 1 on, 0 for 6, or 9 if there are more than 15 layers; retrieval_interval is
the distance to the next one. num_encoder_layers is the number of layers of the encoder, and
encoder_*_dropout are its rates of dropout while training. final_norm is whether the last layer is
followed by a norm, which Megatron's Retro lacks since megatron.core 0.8."""


class States(NamedTuple):
    """States that layers pass on."""

    x_BLD: Tensor
    neighbors: Neighbors | EncodedNeighbors | None
    """Neighbors, their states after the encoder, or None if there are none."""


class ChunkedCrossAttention(CrossAttention):
    """Attention of tokens to the neighbors of the last complete chunk."""

    def forward(  # type: ignore[override]
        self, x_BLD: Tensor, memory: EncodedNeighbors, dropout: Dropout | None
    ) -> Tensor:
        """Mix states of neighbors into the states of tokens; 0 for tokens that see none."""
        chunks = memory.chunks
        if chunks.is_empty:
            return torch.zeros_like(x_BLD)
        q_NWE = chunks.attending(self.q_proj(shared_input(x_BLD, self._mesh)))
        k_NSE, v_NSE = (
            projected(memory.x_NrD).unflatten(0, (-1, chunks.num_neighbors)).flatten(1, 2)
            for projected in (self.k_proj, self.v_proj)
        )
        q_NHWK, k_NGSK, v_NGSK = (
            projected.unflatten(-1, (-1, self._width)).transpose(1, 2)
            for projected in (q_NWE, k_NSE, v_NSE)
        )
        k_NGSK, v_NGSK = chunks.kept(k_NGSK, v_NGSK, layer=self.number)
        axis, rules = self._mesh.context, PLAIN_SCORES
        if dropout and dropout.attention:
            of_chunks = chunks.dropout(dropout)
            drop = partial(of_chunks.weights, axis=axis, layer=self, site="cross_attention")
            rules = ScoreRules(drop=drop)
        y_NHWK = attention(q_NHWK, k_NGSK, v_NGSK, axis=axis, mask=chunks.mask_N11S, rules=rules)
        y_BLE = chunks.in_rows(y_NHWK.transpose(1, 2).flatten(2))
        y_BLD: Tensor = self.o_proj(y_BLE)
        # Its bias is for tokens that see a neighbor alone.
        return y_BLD.masked_fill(~own_tokens(chunks.attends_BL1, self._mesh), 0)


class ReadingLayer(DecoderLayer):
    """First layer of the encoder, which also attends to the chunk that neighbors resemble."""

    # As in Megatron.
    norms_residual = True


class NeighborEncoder(nn.Module):
    """Reads neighbors in both directions, and in its first layer their chunk."""

    def __init__(self, layers: Sequence[nn.Module], mesh: Mesh = SINGLE_RANK) -> None:
        super().__init__()
        self._mesh = mesh
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})

    def forward(self, neighbors: Neighbors, x_BLD: Tensor) -> EncodedNeighbors:
        """States of neighbors.

        Args:
            x_BLD: normed states of the decoder.
        """
        x_NrD, is_token_Nr, chunks, dropout = neighbors
        x_NmD = chunks.states(shared_input(x_BLD, self._mesh))
        if not len(x_NmD):  # a pass of generation completes no chunk
            return EncodedNeighbors(x_NrD, chunks)
        # A missing neighbor sees its first token, and nothing sees it: no softmax is over nothing.
        mask_N11r = F.pad(is_token_Nr[:, 1:], (1, 0), value=True)[:, None, None]
        first, *rest = self.layers.values()
        x_NmD = x_NmD.repeat_interleave(chunks.num_neighbors, 0)
        x_NrD = first(x_NrD, x_NmD, mask_N11r, UNMASKED, dropout)
        for layer in rest:
            x_NrD = layer(x_NrD, None, None, mask_N11r, dropout)
        x_NrD = shared_input(x_NrD, self._mesh)
        if self._mesh.tensor.size > 1 and not self._mesh.sequence_parallel:
            # It is a view, and FSDP2 warns of a layer that returns one.
            x_NrD = x_NrD.clone()
        return EncodedNeighbors(x_NrD, chunks)


class RetrievalLayer(TransformerLayer):
    """A layer with cross-attention to neighbors; the first one also has their encoder."""

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        attention: Attention,
        *,
        mlp: nn.Module,
        cross_attention: ChunkedCrossAttention,
        encoder: NeighborEncoder | None,
    ) -> None:
        super().__init__(norm, attention, mlp=mlp)
        self.cross_attn_layernorm = norm()
        self.cross_attn = cross_attention
        if encoder is not None:
            self.encoder = encoder

    def forward(  # type: ignore[override]
        self,
        x_BLD: Tensor,
        neighbors: Neighbors | EncodedNeighbors | None,
        cos_LK: Tensor | None,
        sin_LK: Tensor | None,
        mask: AttentionMask = None,
        dropout: Dropout | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, EncodedNeighbors | None]:
        """Transform states; see `Attention.forward` for the arguments.

        Returns:
            States, and neighbors if this layer has encoded them.
        """
        y_BLD: Tensor = self.self_attn(
            self.input_layernorm(x_BLD), cos_LK, sin_LK, mask, dropout, cache
        )
        x_BLD = x_BLD + dropped(y_BLD, dropout, "attention_output", layer=self.self_attn)
        encoded = None
        if neighbors is not None:
            y_BLD = self.cross_attn_layernorm(x_BLD)
            if hasattr(self, "encoder"):
                neighbors = encoded = self.encoder(neighbors, y_BLD)
            y_BLD = self.cross_attn(y_BLD, neighbors, dropout)
            x_BLD = x_BLD + dropped(y_BLD, dropout, "cross_attention_output", layer=self.cross_attn)
        y_BLD = self.mlp(self.post_attention_layernorm(x_BLD))
        x_BLD = x_BLD + dropped(y_BLD, dropout, "mlp_output", layer=self.self_attn)
        return x_BLD, encoded


class Model(Decoder):
    """A Retro: a model of the decoder's family whose class this one precedes.

    Attributes:
        retriever: finds neighbors of texts that come without any; None: chunks have none.
    """

    retriever: Retriever | None = None

    def __new__(cls, architecture: Architecture | None = None, *_: Any, **__: Any) -> "Model":
        """An instance of the class of this decoder; copies are made without arguments."""
        of_decoder = architecture and _with_decoder(architecture.setting("decoder"))
        return super().__new__(of_decoder or cls)

    @property
    def has_own_dropout(self) -> bool:
        """Whether the encoder drops numbers, whatever the rates of the run are."""
        return any(self._encoder_rates)

    @property
    def _encoder_rates(self) -> tuple[float, float]:
        setting = self.architecture.setting
        return setting("encoder_hidden_dropout"), setting("encoder_attention_dropout")

    def add_layers(self, numbers: range) -> None:
        """Add the layers, and number the encoder's layers after the decoder's."""
        assert len(numbers) == self.architecture.num_hidden_layers, "pipelines are refused"
        first, *_ = retrieving = self.architecture.retrieval_layers
        layers: dict[str, Any] = {}
        for number in numbers:
            encoder = self._build_encoder() if number == first else None
            is_retrieving = number in retrieving
            layer = self._build_retrieval_layer(encoder) if is_retrieving else self.build_layer()
            layer.self_attn.number = number
            layers[str(number)] = layer
        for number in retrieving:
            layers[str(number)].cross_attn.number = number
        self.layers = nn.ModuleDict(layers)

    def _build_retrieval_layer(self, encoder: NeighborEncoder | None) -> RetrievalLayer:
        return RetrievalLayer(
            self.build_norm,
            self.build_attention(),
            mlp=self.build_mlp(),
            cross_attention=ChunkedCrossAttention(self.architecture, self.mesh),
            encoder=encoder,
        )

    def _build_encoder(self) -> NeighborEncoder:
        first = ReadingLayer(
            self.build_norm,
            self.build_attention(),
            cross_attention=CrossAttention(self.architecture, self.mesh),
            mlp=self.build_mlp(),
        )
        first.cross_attn.number = self.architecture.num_hidden_layers
        number = self.architecture.setting("num_encoder_layers")
        layers: list[Any] = [first, *(self.build_layer() for _ in range(number - 1))]
        for place, layer in enumerate(layers, self.architecture.num_hidden_layers):
            layer.self_attn.number = place
        return NeighborEncoder(layers, self.mesh)

    def add_output(self) -> None:
        """Add the norm, unless the model has none, and the output layer."""
        super().add_output()
        if not self.architecture.setting("final_norm"):
            self.norm = nn.Identity()

    def forward(
        self,
        x: Tensor,
        cache: KeyValueCache | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        sample_numbers: Tensor | None = None,
        **neighbors: Tensor,
    ) -> Tensor:
        """Predict each token's successor; see `LanguageModel.forward`.

        Args:
            neighbors: `neighbor_tokens`: (B, C, k, r) int64 tokens of the neighbors of each chunk.
                `num_neighbor_tokens`: (B, C, k) int64 number of them that are no fill; 0: there is
                no such neighbor. None: no chunk has a neighbor.
        """
        if isinstance(cache, RetroCache):
            cache.retrieve(x)
        elif self.retriever is not None and cache is None and not neighbors:
            return self._predict_with(self.retriever, x)
        return super().forward(
            x,
            cache,
            position_ids=position_ids,
            document_ids=document_ids,
            sample_numbers=sample_numbers,
            **neighbors,
        )

    def _predict_with(self, retriever: Retriever, tokens_BL: Tensor) -> Tensor:
        """Logits of texts whose chunks have the neighbors that a retriever finds."""
        num_rows, length = tokens_BL.shape
        # Whole chunks; no token sees the fill, nor neighbors of the chunk that it completes.
        filled_BL = F.pad(tokens_BL, (0, -length % self.architecture.setting("chunk_length")))
        chunks_Nm = filled_BL.reshape(-1, self.architecture.setting("chunk_length"))
        tokens, counts = retrieved(chunks_Nm.cpu().numpy(), retriever, device=tokens_BL.device)
        logits_BLV: Tensor = super().forward(
            filled_BL,
            neighbor_tokens=tokens.unflatten(0, (num_rows, -1)),
            num_neighbor_tokens=counts.unflatten(0, (num_rows, -1)),
        )
        return logits_BLV[:, :length]

    def through_layers(
        self,
        x_BLD: Tensor,
        *inputs: Any,
        cache: KeyValueCache | None = None,
        neighbor_tokens: Tensor | None = None,
        num_neighbor_tokens: Tensor | None = None,
    ) -> Tensor:
        """Pass states through the layers; see `forward` for the arguments."""
        neighbors = None
        if isinstance(cache, RetroCache):
            neighbors = self._retrieved(cache.chunks)
        elif neighbor_tokens is not None:
            assert num_neighbor_tokens is not None
            neighbors = self._neighbors(neighbor_tokens, num_neighbor_tokens, dropout=inputs[-1])
        caches = cache.layers if cache else [None] * len(self.layers)
        layers = [
            partial(_pass, layer, cache=of_layer)
            for layer, of_layer in zip(self.layers.values(), caches, strict=True)
        ]
        states = States(x_BLD, neighbors)
        return recompute.run(layers, self.recompute, states, *inputs).x_BLD

    def _retrieved(self, chunks: CachedChunks) -> Neighbors:
        """Embedded tokens of the neighbors of chunks that a pass of generation completes."""
        tokens_Nkr = chunks.tokens_Nkr
        positions = torch.arange(tokens_Nkr.shape[2], device=tokens_Nkr.device)
        is_token_Nkr = positions < chunks.counts_Nk[..., None]
        x_NrD = self.embedded(tokens_Nkr.flatten(0, 1), positions)
        return Neighbors(x_NrD, is_token_Nkr.flatten(0, 1), chunks, None)

    def new_cache(self, num_rows: int, capacity: int, *, is_kept: bool = True) -> KeyValueCache:
        """Empty cache, with neighbors of complete chunks if there is a `retriever`."""
        if self.retriever is None:
            return super().new_cache(num_rows, capacity, is_kept=is_kept)
        return RetroCache(
            len(self.layers),
            num_rows,
            capacity=capacity,
            retriever=self.retriever,
            chunk_length=self.architecture.setting("chunk_length"),
            is_kept=is_kept,
        )

    def _neighbors(
        self, tokens_BCkr: Tensor, num_tokens_BCk: Tensor, *, dropout: Dropout | None
    ) -> Neighbors:
        """Embedded tokens of neighbors."""
        num_chunks, num_neighbors, length = tokens_BCkr.shape[1:]
        positions = torch.arange(length, device=tokens_BCkr.device)
        is_token_BCkr = positions < num_tokens_BCk[..., None]
        tokens_Nr = tokens_BCkr.flatten(0, 2)
        x_NrD = self.embedded(tokens_Nr, positions)
        if dropout is not None:
            numbers = counted(dropout.tokens.numbers, num_chunks * num_neighbors).view(-1, 1)
            tokens = SampleTokens(numbers, own_tokens(positions[None], self.mesh))
            hidden, attention = self._encoder_rates
            first, *_ = self.architecture.retrieval_layers
            encoder: Any = self.layers[str(first)].encoder
            dropout = dropout._replace(hidden=hidden, attention=attention, tokens=tokens)
            of_first_layer = encoder.layers["0"].self_attn
            x_NrD = dropped(x_NrD, dropout, "embedding", layer=of_first_layer)
        chunks = ChunkGrid(is_token_BCkr, self.architecture.setting("chunk_length"))
        return Neighbors(x_NrD, is_token_BCkr.flatten(0, 2), chunks, dropout)


def _pass(layer: nn.Module, states: States, *inputs: Any, cache: LayerCache | None) -> States:
    """Pass states through a layer, with neighbors or without."""
    if isinstance(layer, RetrievalLayer):
        x_BLD, encoded = layer(*states, *inputs, cache)
        return States(x_BLD, states.neighbors if encoded is None else encoded)
    return states._replace(x_BLD=layer(states.x_BLD, *inputs, cache))


@cached
def _with_decoder(family: str) -> type[Model]:
    """Class of a model whose decoder has a family."""
    decoder = plugins.load("models/*/model", family).Model
    return type(f"Retro{family.title()}", (Model, decoder), {})
