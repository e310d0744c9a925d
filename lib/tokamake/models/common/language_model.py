"""Base class of all families' models: a pipeline stage, or the whole model.

A family's `Model` defines `forward`, or is a `Decoder` (`common.decoder`). The trainer gives it a
mesh and the layers of its stage; evaluation and generation use the whole model.
Shape suffixes: B batch, L tokens, D hidden size, V vocabulary.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokamake.config.architecture import Architecture
from tokamake.models.common import decoding
from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.layers import (
    MLP,
    Attention,
    GatedMLP,
    PostNormLayer,
    SandwichLayer,
    TransformerLayer,
)
from tokamake.models.common.recompute import NONE, Recompute, run
from tokamake.parallel.attention import AttentionMask
from tokamake.parallel.axis import part
from tokamake.parallel.context import zigzag_indices
from tokamake.parallel.document_mask import UNMASKED, document_mask, positions_in_documents
from tokamake.parallel.dropout import Dropout, SampleTokens
from tokamake.parallel.linear import linear
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.tensor import (
    CenteredRMSNorm,
    ColumnParallelLinear,
    LayerNorm,
    ReplicatedEmbedding,
    RMSNorm,
    VocabParallelEmbedding,
    own_tokens,
    shared_input,
)

_LAYER = re.compile(r"layers\.(\d+)\.")


class Predictions(NamedTuple):
    """Result of the last stage."""

    logits: Tensor
    """(B, L, V) scores of the vocabulary for each token; empty if the model has none."""
    sample_logits: Tensor | None = None
    """(samples, classes) class logits, from families with such a head."""
    query_embeddings: Tensor | None = None
    """(samples, D) vector of each query, from a biencoder."""
    block_embeddings: Tensor | None = None
    """(samples, D) vector of each block, from a biencoder."""


Output = Tensor | Predictions
"""Result of `forward`: logits, or `Predictions`."""


class PackedRows(NamedTuple):
    """Rows that samples of a micro batch share."""

    sample_ids: Tensor
    """(B, L) int64 number in the micro batch of each token's sample; padding of an encoder has
    the number of samples."""

    @property
    def position_ids(self) -> Tensor:
        """(B, L) int64 positions of tokens in their samples."""
        return positions_in_documents(self.sample_ids)

    def tokens(self, sample_numbers: Tensor) -> SampleTokens:
        """Places of the tokens in the run."""
        return SampleTokens(F.pad(sample_numbers, (0, 1))[self.sample_ids], self.position_ids)


class DropoutRates(NamedTuple):
    """Rates of dropout; see `parallel.dropout.Dropout`."""

    hidden: float
    attention: float
    embedding: float
    seed: int


class LanguageModel(nn.Module):
    """A language model, or a stage of one: some of its layers.

    The first stage has the embedding, the last one the final norm and the output layer. A tied
    output layer in another stage than the embedding is a copy of it.

    To load weights without drawing random ones first, construct it under `torch.device("meta")` and
    call `load_state_dict(..., assign=True)`; see `tokamake.checkpoint.model_tensors.to_model`.

    Attributes:
        architecture: shape of the whole model.
        mesh: this rank among the ranks that share the model.
        layers: layers of this stage by their number in the whole model.
        recompute: activations that the backward pass computes again.
        dropout_rates: rates and seed of dropout while training; None: nothing is dropped.
        embedding_name: parameter that maps tokens to states.
        output_name: parameter that maps states to logits, unless it is the embedding.
        is_gated: whether layers have RMSNorms and gated MLPs, not LayerNorms and plain MLPs.
        is_causal: whether a token attends to itself and earlier tokens only; not so in encoders.
        has_centered_norms: whether RMSNorms multiply by 1 + weight (Gemma).
        into_residual: ends of the names of weights that add to the residual stream.

    Args:
        stage: numbers of the layers of this stage; None: all.
    """

    embed_tokens: nn.Embedding
    norm: nn.Module
    lm_head: nn.Linear
    layers: nn.ModuleDict
    is_causal = True
    is_gated = False
    has_centered_norms = False
    into_residual: tuple[str, ...] = ("o_proj.weight", "down_proj.weight")
    embedding_name = "embed_tokens.weight"
    output_name = "lm_head.weight"

    def __init__(
        self, architecture: Architecture, mesh: Mesh = SINGLE_RANK, *, stage: range | None = None
    ) -> None:
        super().__init__()
        assert architecture.vocab_size is not None, "fill in vocab_size before building the model"
        self.architecture, self.mesh, self.recompute = architecture, mesh, NONE
        self.dropout_rates: DropoutRates | None = None
        numbers = range(architecture.num_hidden_layers) if stage is None else stage
        self.is_first = numbers.start == 0
        self.is_last = numbers.stop == architecture.num_hidden_layers
        self.add_layers(numbers)
        if self.is_first:
            self.add_embeddings()
        if self.is_last:
            self.add_output()

    def build_norm(self) -> nn.Module:
        """Build a norm of states; families with another norm replace this."""
        architecture, mesh = self.architecture, self.mesh
        if self.is_gated:
            kind = CenteredRMSNorm if self.has_centered_norms else RMSNorm
            return kind(architecture.hidden_size, mesh, eps=architecture.rms_norm_eps)
        return LayerNorm(architecture.hidden_size, mesh, eps=architecture.layer_norm_epsilon)

    def build_attention(self) -> Attention:
        """Build the self-attention of a layer; families may replace this."""
        return Attention(self.architecture, self.mesh)

    def build_mlp(self) -> nn.Module:
        """Build the MLP of a layer; families with another MLP replace this."""
        kind = GatedMLP if self.is_gated else MLP
        return kind(self.architecture, self.mesh)

    def build_layer(self) -> TransformerLayer | PostNormLayer | SandwichLayer:
        """Build a layer; families with another layer replace this."""
        return TransformerLayer(self.build_norm, self.build_attention(), mlp=self.build_mlp())

    def layer(self, number: int) -> nn.Module:  # noqa: ARG002
        """Build the layer with an index; families whose layers differ replace this."""
        return self.build_layer()

    def add_layers(self, numbers: range) -> None:
        self.layers = nn.ModuleDict({str(number): self.layer(number) for number in numbers})
        for number, layer in self.layers.items():
            attention: Any = layer.self_attn
            attention.number = int(number)
            attention.rotates = self.architecture.rotates(int(number))
            attention.window = self.architecture.window(int(number))

    @property
    def main_layers(self) -> list[nn.Module]:
        """Layers of this stage that predict the next token."""
        number = self.architecture.num_hidden_layers
        return [layer for index, layer in self.layers.items() if int(index) < number]

    @property
    def blocks(self) -> list[nn.Module]:
        """Layers of this stage: each is compiled, sharded and recomputed for itself."""
        return [*self.layers.values()]

    def layer_number(self, parameter: str) -> int | None:
        """Number, among all layers of the model, of a parameter's layer; None: it is in none."""
        match = _LAYER.match(parameter)
        return int(match[1]) if match else None

    def add_embeddings(self) -> None:
        """Add the embeddings of tokens and of learned positions; families may add more."""
        architecture, hidden = self.architecture, self.architecture.hidden_size
        assert architecture.vocab_size is not None
        self.embed_tokens = VocabParallelEmbedding(architecture.vocab_size, hidden, mesh=self.mesh)
        if architecture.position_embedding == "learned":
            longest = architecture.max_position_embeddings
            self.embed_positions = ReplicatedEmbedding(longest, hidden, mesh=self.mesh)

    def add_output(self) -> None:
        """Add the norm to the last stage, and the output layer unless that is the embedding."""
        self.norm = self.build_norm()
        if self.has_tied_output or not self.architecture.tie_word_embeddings:
            self.lm_head = self.build_output()

    def build_output(self) -> nn.Linear:
        vocab_size, hidden = self.architecture.vocab_size, self.architecture.hidden_size
        assert vocab_size is not None
        return ColumnParallelLinear(hidden, vocab_size, mesh=self.mesh)

    def forward(self, x: Tensor, *arguments: Any, **inputs: Any) -> Output:
        """Predict each token's successor, or masked tokens; families implement this.

        Args:
            x: (B, L) int64 token ids; for a later stage, (B, L, D) states.
            arguments: of causal models, `cache`: keys and values of earlier tokens, in which a pass
                has begun; these tokens extend it.
            inputs: `position_ids`: (B, L) positions, or (L,) for all rows; None: places in the row.
                `document_ids`: (B, L) numbers; a token sees only tokens with its own number.
                `sample_numbers`: (samples,) int64 number of each sample in the run, from which the
                masks of dropout follow; None: nothing is dropped. Encoders take more arguments.

        Returns:
            (B, L, V) logits in the dtype of the weights; from an earlier stage, (B, L, D) states.
            With a cache, (N, V): logits of the tokens that the pass chooses, row by row.
        """
        raise NotImplementedError

    @staticmethod
    def tensor_name(parameter: str) -> str:
        """Name of a parameter in a checkpoint: all but the output layer lie under `model.`."""
        return parameter if parameter.startswith("lm_head.") else f"model.{parameter}"

    @property
    def has_own_dropout(self) -> bool:
        """Whether the model drops numbers while training even if the run has no rates."""
        return False

    @property
    def has_tied_output(self) -> bool:
        """Whether the output layer is a copy of an embedding in another stage."""
        return self.architecture.tie_word_embeddings and self.is_last and not self.is_first

    @property
    def tied_output(self) -> str | None:
        """Name of the output layer, if it is a copy of an embedding in another stage."""
        return self.output_name if self.has_tied_output else None

    def join_projections(self) -> None:
        """Join products of the same input, which is faster for a few tokens; only for inference."""
        for module in [*self.modules()]:
            join = getattr(module, "join_projections", None)
            if join and module is not self:
                join()

    def saved_names(self) -> dict[str, str]:
        """Names of the parameters in checkpoints, by their names here; call it before sharding.

        The copy of a tied embedding is saved under the name of the embedding.
        """
        return {
            name: self.tensor_name(self.embedding_name if name == self.tied_output else name)
            for name, _ in self.named_parameters()
        }

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose the activations that the backward pass computes again."""
        self.recompute = recompute

    def through_layers(
        self, x_BLD: Tensor, *inputs: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Pass states through the layers of this stage; each gets `inputs` and its cache, too."""
        layers = self.main_layers
        if cache is None:
            return run(layers, self.recompute, x_BLD, *inputs)
        if decoding.applies(layers, x_BLD, cache=cache):
            cos, sin, *_ = inputs
            return decoding.decode(layers, x_BLD, cos, sin, cache=cache)
        for number, layer in enumerate(layers):
            x_BLD = layer(x_BLD, *inputs, cache.layers[number])
        return x_BLD

    def positions(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Positions of this rank's tokens in their rows; see `forward` for the arguments.

        (L,) if they are the same in all rows, else (B, L).
        """
        if cache:
            return cache.this_pass.positions
        length = x.shape[1]
        # Later stages receive this rank's part of the sequence, but layers attend to all of it.
        if self.mesh.sequence_parallel and not self.is_first:
            length *= self.mesh.tensor.size
        axis = self.mesh.context
        if axis.size > 1:
            return zigzag_indices(length * axis.size, axis, device=x.device)
        return torch.arange(length, device=x.device)

    def token_states(self, tokens_BL: Tensor, positions: Tensor) -> Tensor:
        """Sum of the embeddings of tokens and of learned positions, (L,) or (B, L)."""
        x_BLD: Tensor = self.embed_tokens(tokens_BL)
        if self.architecture.position_embedding != "learned":
            return x_BLD
        positions_BL = positions if positions.dim() > 1 else positions[None]
        return x_BLD + self.embed_positions(own_tokens(positions_BL, self.mesh))

    def dropout(
        self, x: Tensor, sample_numbers: Tensor | None, packed: PackedRows | None = None
    ) -> Dropout | None:
        """Dropout of a forward pass. None: nothing is dropped."""
        if sample_numbers is None or self.dropout_rates is None:
            return None
        heads = part(self.architecture.num_attention_heads, self.mesh.tensor)
        if packed is None:
            positions = own_tokens(self.positions(x)[None], self.mesh)
            tokens = SampleTokens(sample_numbers[:, None], positions)
            return Dropout(*self.dropout_rates, tokens, heads)
        whole = packed.tokens(sample_numbers)
        tokens = SampleTokens(*(own_tokens(each, self.mesh) for each in whole))
        return Dropout(*self.dropout_rates, tokens, heads, whole)

    def mask(
        self, document_ids: Tensor | None, cache: KeyValueCache | None = None
    ) -> AttentionMask:
        """Mask of attention that keeps documents apart, in the form that `attention` takes."""
        if cache:
            return cache.this_pass.mask
        if document_ids is None:
            return None if self.is_causal else UNMASKED
        axis, method = self.mesh.context, self.mesh.context_method
        return document_mask(document_ids, axis=axis, method=method, causal=self.is_causal)

    def logits(self, x_BLD: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Logits (B, L, V) for this rank's part of the vocabulary; only in the last stage.

        With a cache, (N, V): logits of the tokens that the pass chooses, row by row.
        """
        # Before the norm and the product, which cost as much as the layers of a small model.
        if cache:
            x_BLD = x_BLD[cache.this_pass.predicting_places]
        return self.output_logits(shared_input(self.norm(x_BLD), self.mesh))

    def output_logits(self, x_BLD: Tensor) -> Tensor:
        """Logits (..., V) of normed states, for this rank's part of the vocabulary."""
        logits: Tensor
        if hasattr(self, "lm_head"):
            logits = self.lm_head(x_BLD)
        else:
            logits = linear(x_BLD, self.embed_tokens.weight)
        if cap := self.architecture.logit_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def new_cache(self, num_rows: int, capacity: int, *, is_kept: bool = True) -> KeyValueCache:
        """Empty cache for `forward`; see `KeyValueCache` for the arguments."""
        return KeyValueCache(len(self.main_layers), num_rows, capacity=capacity, is_kept=is_kept)


def predictions(output: Output) -> Predictions:
    """The result of `forward` by names."""
    return output if isinstance(output, Predictions) else Predictions(output)
