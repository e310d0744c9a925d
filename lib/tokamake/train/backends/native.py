"""The native back end: FSDP2, tensor, context and pipeline parallelism, torch's own checkpoints.

Micro batches come from the trainer; loss, gradient norm and checkpoints go back. Loss and gradients
cover the whole global batch, however ranks share it.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.flat_chunks import FlatChunks, single_chunk
from tokamake.config.resolved_run import Run
from tokamake.optim._extra_pass import ExtraPass, Relabel
from tokamake.optim._groups import set_rates
from tokamake.parallel import sharding, tied_embeddings
from tokamake.parallel.sharding import ParameterChunk
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends._base import EngineBase, GradientSums
from tokamake.train.backends._initial_weights import load_initial_weights
from tokamake.train.batch import MicroBatch, SampleIds
from tokamake.train.gradient_clipping import clip_coefficient
from tokamake.train.loss_factors import LossFactors
from tokamake.train.step_result import FindFault, Saving, StepResult, accept


class Engine(EngineBase):
    """One rank's part of the model and its optimizer.

    Args:
        continues: whether `load` comes next, so that the initial weights are not read.
    """

    def __init__(
        self, run: Run, ranks: Ranks, *, device: torch.device, continues: bool = False
    ) -> None:
        super().__init__(run, ranks, device=device, shard=True)
        self.optimizer = self._build_optimizer(whole=True)
        self._layout = training_state.StateLayout(self.mesh, device)
        if not continues:
            load_initial_weights([*self._weights()], run, ranks=ranks)

    def _weights(self) -> Iterator[tuple[ParameterChunk, FlatChunks]]:
        for chunk in (*self._chunks, *self.stages.buffers):
            yield chunk, single_chunk(chunk.local.detach(), chunk.shape, place=chunk.place)

    # ---- Steps ----

    def train_step(
        self,
        rows: Sequence[Any],
        *,
        learning_rate: float,
        weight_decay: float,
        find_fault: FindFault = accept,
        stop: bool = False,
        saved: bool = False,
        samples: SampleIds | None = None,
    ) -> StepResult:
        """Do one optimizer step.

        Args:
            find_fault: finds the fault of the step, if any, and whether it updates the weights.
            saved: whether this rank has written its files of a checkpoint.
            samples: the samples in `rows`; None: nothing is dropped, no loss of a corpus is
                measured.
        """
        self._set_mode("train")
        batches = self._batches(rows, samples)
        if hasattr(self.optimizer, "prepare"):
            self.optimizer.prepare(self._extra_pass(rows, batches))
            self._drop_gradients()
        sums, corpora = self._gradients(batches), self._corpus_sums(batches, samples)
        measured = self._sum_over_ranks(sums, stop=stop, saved=saved, corpora=corpora)
        loss, norm = measured.loss, measured.grad_norm
        overflowed = math.isfinite(loss) and self._loss_scale.overflowed(norm)
        bad = None if overflowed else find_fault(loss, norm)
        updates = math.isfinite(loss) and math.isfinite(norm) and (bad is None or bad.updates)
        if updates:
            set_rates(self.optimizer, learning_rate=learning_rate, weight_decay=weight_decay)
            factor = clip_coefficient(norm, self._run.train.gradient_clipping) / measured.loss_scale
            sharding.scale(self._chunks, factor)
            self.optimizer.step()
            self.stages.balance_routers(measured.routers)
        self._drop_gradients()
        return measured._replace(skipped=overflowed, bad=bad, updated=updates)

    def _extra_pass(self, rows: Sequence[Any], batches: Sequence[MicroBatch]) -> ExtraPass:
        """The further pass that some optimizers make before the gradients of a step."""
        vocab_size = self._run.architecture.vocab_size
        assert vocab_size is not None
        return ExtraPass(
            gradients=partial(self._relabelled_gradients, batches),
            labels=[batch.labels for batch in batches],
            label_numbers=[batch.label_numbers for batch in batches],
            label_shape=partial(self.stages.objective.label_shape, rows[0]),
            vocab_size=vocab_size,
            seed=self._run.seed,
            mesh=self.mesh,
        )

    def recompute(
        self, rows: Sequence[Any], *, samples: SampleIds | None = None
    ) -> tuple[float, float]:
        """Loss and gradient norm of this rank's micro batches, without an update."""
        self._set_mode("train")
        measured = self._sum_over_ranks(self._gradients(self._batches(rows, samples)))
        self._drop_gradients()
        return measured.loss, measured.grad_norm

    def _pass(self, batches: Sequence[MicroBatch], factors: LossFactors) -> Tensor:
        loss = self.stages.forward_backward(batches, factors.times(self._loss_scale.value))
        self._drop_gradients()
        return loss

    def _gradients(self, batches: Sequence[MicroBatch]) -> GradientSums:
        """Compute the gradients of a step."""
        loss_scale = self._loss_scale.value
        factors = self._loss_factors(batches).times(loss_scale)
        total = self.stages.forward_backward(batches, factors)
        self._add_up_gradients()
        squares = sharding.squares(self._chunks, self._device)
        layers = None
        if self._run.train.log_layer_norms:
            layers = sharding.squares_by_layer(
                self._chunks,
                self._run.architecture.num_layers,
                number_of=self.stages.layer_number,
                device=self._device,
            )
        return GradientSums(total, squares, layers, loss_scale)

    def _relabelled_gradients(self, batches: Sequence[MicroBatch], relabel: Relabel) -> int | None:
        """Compute gradients of the mean loss with other labels; see `ExtraPass.gradients`."""
        counts, loss_scale = self._num_labels(batches), self._loss_scale.value
        factors = LossFactors(counts.factors.tokens * loss_scale)  # without losses of routers
        self.stages.forward_backward(batches, factors, relabel=relabel)
        self._add_up_gradients()
        squares = sharding.squares(self._chunks, self._device)
        dist.all_reduce(squares)
        # If these gradients overflow in fp16, the step's gradients most likely do, too. Then the
        # step is skipped, and both are computed again at a lower scale.
        (square,), num_labels, *_ = counts.read(squares[None])
        if not math.isfinite(square):
            return None
        sharding.scale(self._chunks, 1 / loss_scale)
        return max(1, num_labels)

    def _drop_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.parameter.grad = chunk.local.grad = None

    def _add_up_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.take_gradient()
        sharding.add_up_partial(self._chunks, self.mesh.tensor)
        if self.stages.copies_embedding:
            tied_embeddings.add_up_copies(
                self._chunks, self.mesh.pipeline, name=self.stages.embedding_name
            )

    # ---- Checkpoints ----

    def save(self, folder: Path, progress: dict[str, Any]) -> Saving:
        """Begin to write a checkpoint; training may continue while it is written.

        Args:
            folder: folder of the checkpoint; the same on all ranks.
            progress: step, samples and tokens, stored with it.
        """
        self._set_mode("eval")
        tensors = self._tensors([*self._parameters(copies=False), *self.stages.buffers])
        return self._write(folder, progress, tensors=tensors)

    def _tensors(self, chunks: list[ParameterChunk]) -> training_state.Tensors:
        states: dict[Any, dict[str, Any]] = self.optimizer.state
        # An optimizer that packs its states can unpack them.
        plain = getattr(self.optimizer, "plain", None)
        if plain:
            states = {
                key: {kind: plain(value) for kind, value in state.items()}
                for key, state in states.items()
            }
        return training_state.tensors_of(
            chunks, states, layout=self._layout, kinds=self._state_kinds
        )

    def _parameters(self, *, copies: bool) -> list[ParameterChunk]:
        """This rank's parameters: copies of a tied embedding, or all other parameters."""
        return [chunk for chunk in self._chunks if chunk.is_tied_output == copies]

    def _room(self, folder: Path, *, copies: bool) -> training_state.Tensors:
        parameters = self._parameters(copies=copies)
        training_state.make_state(
            folder, parameters, optimizer=self.optimizer, kinds=self._state_kinds
        )
        return self._tensors(parameters if copies else [*parameters, *self.stages.buffers])

    def _take(self, folder: Path, loaded: training_state.Tensors, *, copies: bool) -> None:  # noqa: ARG002
        """Pack states again, if the optimizer does so: a checkpoint has them unpacked."""
        packed = getattr(self.optimizer, "packed", None)
        if packed is None:
            return
        for chunk in self._parameters(copies=copies):
            state = self.optimizer.state[chunk.local]
            for kind, like in self._state_kinds.items():
                if like == "like_parameter" and kind in state:
                    state[kind] = packed(chunk.local, kind, state[kind])
