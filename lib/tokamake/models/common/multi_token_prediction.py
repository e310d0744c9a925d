"""Layers that predict further tokens in training (MTP, DeepSeek-V3, arXiv 2412.19437, section 2.2).

Layer k, from 1 on, predicts token i + k + 1 from the states of place i and the embedding of token
i + k. The states are those of the last layer or of layer k - 1, after its norm; all layers share
the embedding and the output layer with the model. As in Megatron, the loss of a layer is the mean
over its labels, and the gradients have the mean of these losses, times
`train.mtp.loss_scaling_factor`. Evaluation and generation run without these layers.
Shape suffixes: B rows, L tokens of a row, D hidden size, K layers that predict further tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokamake.models.common.added_loss import with_loss
from tokamake.models.common.experts import ExpertDecoder, ExpertLayer
from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.models.common.layers import Attention
from tokamake.models.common.recompute import run
from tokamake.parallel.loss import cross_entropy
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.tensor import VocabParallelEmbedding, WholeLinear, shared_input


class MTPLosses:
    """Losses of the layers that predict further tokens, and their sums in a step.

    Attributes:
        factors: 1/labels of each layer in the global batch, times the scale of gradients. Empty:
            the layers do not run.
    """

    def __init__(
        self,
        *,
        scaling_factor: float,
        num_layers: int,
        vocab_size: int,
        device: torch.device,
        mesh: Mesh = SINGLE_RANK,
        compiled: bool = False,
    ) -> None:
        self._share = scaling_factor / num_layers
        self._num_layers, self._mesh, self._device = num_layers, mesh, device
        self._entropy: dict[str, Any] = {"mesh": mesh, "size": vocab_size, "compiled": compiled}
        self._measured: dict[int, list[Tensor]] = {}
        self.factors: Sequence[float | Tensor] = ()

    def added(self, x_BLD: Tensor, logits: Tensor, *, labels_BL: Tensor, number: int) -> Tensor:
        """Return the states; their backward pass adds gradients of the loss of a layer.

        Args:
            logits: (B, L, V), which the backward pass overwrites.
            labels_BL: int64 tokens to predict, or `NO_LABEL`.
        """
        loss = cross_entropy(logits, labels_BL, **self._entropy)
        return with_loss(x_BLD, loss, sums=self, number=number, measured=loss.detach())

    def gradient(self, number: int, measured: Tensor) -> Tensor:
        """Gradient of the loss of a layer in a micro batch; counts the loss."""
        self._measured.setdefault(number, []).append(measured)
        return (measured.new_ones(()) * (self.factors[number] * self._share)).float()

    def keep(self, number: int) -> None:
        """Drop losses before the last `number` micro batches."""
        self._measured = {layer: losses[-number:] for layer, losses in self._measured.items()}

    def take(self) -> Tensor:
        """(K,) sums of this rank's losses since the last call; add them up over all ranks."""
        sums = torch.zeros(self._num_layers, device=self._device)
        if self._mesh.tensor.rank == 0:  # tensor-parallel ranks have the same losses
            for layer, losses in self._measured.items():
                sums[layer] = torch.stack(losses).sum()
        self.forget()
        return sums

    def forget(self) -> None:
        """Drop the losses so far."""
        self._measured.clear()


class MTPLayer(ExpertLayer):
    """A layer that predicts a further token; its parameters have DeepSeek's names."""

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        attention: Attention,
        *,
        mlp: nn.Module,
        projection: nn.Module,
    ) -> None:
        super().__init__(norm, attention, mlp=mlp)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = projection
        self.shared_head = nn.ModuleDict({"norm": norm()})

    def forward(self, x_BLD: Tensor, *inputs: Any) -> Tensor:
        """Normed states for the output layer and the next of these layers.

        Args:
            x_BLD: (B, L, 2 D) embeddings of the tokens that follow, and normed states of the layer
                before.
            inputs: further arguments of `ExpertLayer.forward`.
        """
        embedded_BLD, x_BLD = x_BLD.chunk(2, dim=-1)
        both = torch.cat((self.enorm(embedded_BLD), self.hnorm(x_BLD)), dim=-1)
        y_BLD: Tensor = self.shared_head["norm"](super().forward(self.eh_proj(both), *inputs))
        return y_BLD


class MTPDecoder(ExpertDecoder):
    """A causal model with experts whose last stage also predicts further tokens in training.

    Families have the setting `num_nextn_predict_layers`. In a pipeline, the last stage has a copy
    of the embedding.

    Attributes:
        further_losses: gets the losses while the model trains; None: the layers do not run.
    """

    further_losses: MTPLosses | None = None

    def layer(self, number: int) -> ExpertLayer:
        if number not in self.architecture.mtp_layers:
            return super().layer(number)
        hidden, partial = self.architecture.hidden_size, self.mesh.sequence_parallel
        projection = WholeLinear(2 * hidden, hidden, partial=partial, bias=False)
        attention, mlp = self.build_attention(), self.build_mlp()
        return MTPLayer(self.build_norm, attention, mlp=mlp, projection=projection)

    def add_layers(self, numbers: range) -> None:
        further = self.architecture.num_mtp_layers if self.is_last else 0
        super().add_layers(range(numbers.start, numbers.stop + further))

    @property
    def _has_embedding_copy(self) -> bool:
        return self.is_last and not self.is_first and self.architecture.num_mtp_layers > 0

    def add_output(self) -> None:
        if self._has_embedding_copy:
            vocab_size, hidden = self.architecture.vocab_size, self.architecture.hidden_size
            assert vocab_size is not None
            self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden, mesh=self.mesh)
        super().add_output()

    @property
    def has_tied_output(self) -> bool:
        # The copy of the embedding is the output layer, too.
        return super().has_tied_output and not self._has_embedding_copy

    @property
    def tied_output(self) -> str | None:
        return self.embedding_name if self._has_embedding_copy else super().tied_output

    def through_layers(
        self,
        x_BLD: Tensor,
        *inputs: Any,
        cache: KeyValueCache | None = None,
        is_token: Tensor | None = None,
        further_tokens: Tensor | None = None,
        further_labels: Tensor | None = None,
    ) -> Tensor:
        """Pass states through the layers of this stage.

        Args:
            is_token: (B, L) False where a row is filled up; None: all are tokens.
            further_tokens: (B, L, K) int64 tokens i + 1 to i + K.
            further_labels: (B, L, K) int64 tokens i + 2 to i + K + 1, or `NO_LABEL`.
        """
        x_BLD = super().through_layers(x_BLD, *inputs, cache=cache, is_token=is_token)
        losses = self.further_losses
        runs = losses is not None and losses.factors and torch.is_grad_enabled() and self.is_last
        if not runs or further_tokens is None or further_labels is None:
            return x_BLD
        assert losses is not None
        y_BLD = self.norm(x_BLD)
        for number, index in enumerate(self.architecture.mtp_layers):
            embedded_BLD = self.embed_tokens(further_tokens[..., number])
            both = torch.cat((embedded_BLD, y_BLD), dim=-1)
            layer = self.layers[str(index)]
            y_BLD = run([layer], self.recompute, both, *inputs, None, is_token)
            logits = self.output_logits(shared_input(y_BLD, self.mesh))
            labels_BL = further_labels[..., number]
            x_BLD = losses.added(x_BLD, logits, labels_BL=labels_BL, number=number)
        return x_BLD
