"""BERT as Megatron has it (arXiv 1909.08053): LayerNorm before attention and MLP, learned
positions, attention in both directions, heads for masked tokens and for the order of sentences.

The original BERT (arXiv 1810.04805) norms after attention and MLP, and its embeddings: it is
another model. The head of masked tokens is dense, activation, LayerNorm, then the embedding as the
output layer, with a bias per token of the vocabulary.
Shape suffixes: B batch, L tokens, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor, nn

from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import Output, PackedRows, Predictions
from tokamake.models.common.layers import ACTIVATIONS
from tokamake.models.common.text_encoder import TextEncoder
from tokamake.parallel.axis import part
from tokamake.parallel.dropout import Dropout
from tokamake.parallel.linear import linear
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.placement import Placement
from tokamake.parallel.tensor import LayerNorm, WholeLinear, first_tokens, shared_input

STACKS = "encoder"

SETTINGS = {
    "position_embedding": ("learned",),
    "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    "head_act": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": (True,),
    "type_vocab_size": (2, 0, 1, 3, 4),
    "sentence_order_head": (True, False),
    "task_head": ("none", "classes", "choice"),
    "num_classes": 0,
}
"""Its own: head_act is the activation in the head of masked tokens. Megatron's is gelu, while its
MLPs have gelu_new unless bias_gelu_fusion is off. type_vocab_size is the number of token types, 0
for none. sentence_order_head: whether there are a pooler and a head for the order of sentences.
task_head: a finetuned model's only head: num_classes logits of a text (one in a regression), or
one logit for each option of a choice."""


class MaskedTokenHead(nn.Module):
    """States of tokens to logits, with the embedding as the output layer."""

    def __init__(self, architecture: Architecture, mesh: Mesh = SINGLE_RANK) -> None:
        super().__init__()
        self._mesh, self._activation = mesh, ACTIVATIONS[architecture.setting("head_act")]
        hidden, vocab_size = architecture.hidden_size, architecture.vocab_size
        assert vocab_size is not None
        self.bias = nn.Parameter(torch.zeros(len(part(vocab_size, mesh.tensor))))
        if mesh.tensor.size > 1:
            self.placements = {"bias": Placement(0)}
        # Each rank has the states of all tokens, or under sequence parallelism of its own.
        self.dense = WholeLinear(hidden, hidden, partial=mesh.sequence_parallel)
        self.layernorm = LayerNorm(hidden, mesh, eps=architecture.layer_norm_epsilon)

    def forward(
        self, x_BLD: Tensor, embedding_VD: Tensor, label_places: Tensor | None = None
    ) -> Tensor:
        """Return logits (B, L, V) for this rank's part of the vocabulary, whose embedding it takes.

        With label_places, they are (N, V); see `Model.forward`.
        """
        x_BLD = self.layernorm(self._activation(self.dense(x_BLD)))
        x = shared_input(x_BLD, self._mesh)
        if label_places is not None:
            # Few tokens are masked, and the product with the vocabulary is the largest one.
            x = x.flatten(0, 1).index_select(0, label_places)
        # torch's linear would return a view with a bias, and FSDP2 warns about views.
        return linear(x, embedding_VD).add_(self.bias)


INTERMEDIATE_SIZE = (4, 1, 1)


class Model(TextEncoder):
    """A BERT; layers have the names of Hugging Face's Llama, see `tensor_name`."""

    def add_output(self) -> None:
        """Add the last norm and the heads."""
        super().add_output()
        hidden = self.architecture.hidden_size
        if self.architecture.setting("task_head") != "none":
            self.pooler = WholeLinear(hidden, hidden)
            self.task_head = WholeLinear(hidden, self.architecture.setting("num_classes"))
            return
        self.masked_token_head = MaskedTokenHead(self.architecture, self.mesh)
        if self.architecture.setting("sentence_order_head"):
            self.pooler = WholeLinear(hidden, hidden)
            self.sentence_order_head = WholeLinear(hidden, 2)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        sample_numbers: Tensor | None = None,
        token_types: Tensor | None = None,
        label_places: Tensor | None = None,
        sample_places: Tensor | None = None,
    ) -> Output:
        """Predict masked tokens and the order of sentences; see `LanguageModel.forward`.

        Args:
            x: (B, L) int64 token ids; for a later stage, (B, L, D) states.
            document_ids: (B, L) numbers; a token sees only tokens with its own number. Padding has
                a number of its own, so that no token sees it. None: there is no padding.
            token_types: (B, L) int64 type of each token; None: all have type 0.
            label_places: (N,) int64 flat index of tokens to predict in the (B, L) grid; logits are
                then (N, V), of these tokens alone. None: all tokens.
            sample_places: (samples,) int64 flat index in the (B, L) grid of each sample's first
                token; then document_ids number the samples. None: each row is a sample.

        Returns:
            Logits, and logits (samples, 2) of the order of sentences, if the model has a head for
            it. With the head of a task, its logits (samples, num_classes) alone. From an earlier
            stage, (B, L, D) states.
        """
        packed = None
        if sample_places is not None:
            assert document_ids is not None
            packed = PackedRows(document_ids)
        dropout = self.dropout(x, sample_numbers, packed)
        x_BLD = self.states(
            x, dropout, document_ids=document_ids, packed=packed, token_types=token_types
        )
        if not self.is_last:
            return x_BLD
        if hasattr(self, "task_head"):
            return self._task_predictions(x_BLD, dropout)
        return self._predictions(x_BLD, label_places, sample_places)

    def _predictions(
        self, x_BLD: Tensor, label_places: Tensor | None, sample_places: Tensor | None
    ) -> Predictions:
        x_BLD = self.norm(x_BLD)
        output = self.lm_head if hasattr(self, "lm_head") else self.embed_tokens
        logits = self.masked_token_head(x_BLD, output.weight, label_places)
        if not hasattr(self, "pooler"):
            return Predictions(logits)
        pooled_BD = self.pooler(first_tokens(x_BLD, self.mesh, sample_places)).tanh()
        return Predictions(logits, sample_logits=self.sentence_order_head(pooled_BD))

    def _task_predictions(self, x_BLD: Tensor, dropout: Dropout | None) -> Predictions:
        x_BLD = self.norm(x_BLD)
        pooled_BD = self.pooler(first_tokens(x_BLD, self.mesh)).tanh()
        if dropout:
            positions = dropout.tokens.positions.new_zeros(1, 1)
            of_first = dropout._replace(tokens=dropout.tokens._replace(positions=positions))
            pooled_BD = of_first.states(pooled_BD[:, None], "task_head")[:, 0]
        return Predictions(x_BLD.new_empty(0), sample_logits=self.task_head(pooled_BD))
