"""The native back end: FSDP2, tensor, context and pipeline parallelism, torch's own checkpoints.

Micro batches come from the trainer; loss, gradient norm and checkpoints go back. Loss and gradients
are those of all tokens of a global batch, however ranks share it.
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
from tokamake.optim._groups import set_rates
from tokamake.parallel import sharding
from tokamake.parallel.sharding import ParameterChunk
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends._base import EngineBase, StepSums
from tokamake.train.batch import MicroBatch, SampleIds
from tokamake.train.pipeline_stages import LossFactors
from tokamake.train.sampled_labels import label_draws
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
            self._load_initial_weights()

    def _weights(self) -> Iterator[tuple[ParameterChunk, FlatChunks]]:
        for chunk in self._chunks:
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
            samples: those in `rows`; None: nothing is dropped, no loss of a corpus is measured.
        """
        self._set_mode("train")
        batches = self._batches(rows, samples)
        loss_scale = self._loss_scale.value  # it may change before the update
        if hasattr(self.optimizer, "prepare"):
            self.optimizer.prepare(partial(self._sampled_gradients, rows, batches))
            self._drop_gradients()
        sums = self._measure(batches, stop=stop, saved=saved, samples=samples)
        loss, norm = sums.loss, sums.norm
        overflowed = math.isfinite(loss) and self._loss_scale.overflowed(norm)
        bad = None if overflowed else find_fault(loss, norm)
        updates = math.isfinite(loss) and math.isfinite(norm) and (bad is None or bad.updates)
        if updates:
            set_rates(self.optimizer, learning_rate=learning_rate, weight_decay=weight_decay)
            sharding.scale(self._chunks, self._gradient_factor(norm) / loss_scale)
            self.optimizer.step()
        self._drop_gradients()
        return StepResult(
            loss,
            norm,
            stop=sums.stop,
            saved=sums.saved,
            skipped=overflowed,
            loss_scale=loss_scale,
            bad=bad,
            updated=updates,
            layer_norms=sums.layer_norms,
            corpus_losses=sums.corpora,
            sample_loss=sums.sample_loss,
            has_labels=self._has_labels,
            num_rows=self._num_rows,
        )

    def recompute(
        self, rows: Sequence[Any], *, samples: SampleIds | None = None
    ) -> tuple[float, float]:
        """Loss and gradient norm of this rank's micro batches, without an update."""
        self._set_mode("train")
        sums = self._measure(self._batches(rows, samples), stop=False, saved=False)
        self._drop_gradients()
        return sums.loss, sums.norm

    def _measure(
        self,
        batches: Sequence[MicroBatch],
        *,
        stop: bool,
        saved: bool,
        samples: SampleIds | None = None,
    ) -> StepSums:
        """Compute gradients, times the loss scale; return the result of `_sum_over_ranks`."""
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
        sums = self._sum_over_ranks(
            total,
            squares,
            stop=stop,
            saved=saved,
            layers=layers,
            corpora=self._corpus_sums(batches, samples),
        )
        return sums._replace(
            loss=sums.loss / loss_scale,
            norm=sums.norm / loss_scale,
            layer_norms=tuple(norm / loss_scale for norm in sums.layer_norms),
        )

    def _sampled_gradients(
        self, rows: Sequence[Any], batches: Sequence[MicroBatch], step: int
    ) -> int | None:
        """Compute gradients of the mean loss of sampled labels; return the labels' number."""
        num_labels, loss_scale = max(1, self._num_labels(batches)), self._loss_scale.value
        shape = self.stages.objective.label_shape(rows[0])
        draws = label_draws(len(rows), shape, seed=self._run.seed, step=step, mesh=self.mesh)
        factors = LossFactors(loss_scale / num_labels)
        self.stages.forward_backward(batches, factors, draws=draws)
        self._add_up_gradients()
        squares = sharding.squares(self._chunks, self._device)
        dist.all_reduce(squares)
        # If these gradients overflow in fp16, those of the step most likely do, too. Then the step
        # is skipped, and both are computed again at a lower scale.
        if not math.isfinite(squares.item()):
            return None
        sharding.scale(self._chunks, 1 / loss_scale)
        return num_labels

    def _drop_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.parameter.grad = chunk.local.grad = None

    def _add_up_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.take_gradient()
        sharding.add_up_partial(self._chunks, self.mesh.tensor)
        if self._run.architecture.tie_word_embeddings:
            sharding.add_up_copies(
                self._chunks, self.mesh.pipeline, name=self.stages.embedding_name
            )

    def _set_mode(self, mode: str) -> None:
        if hasattr(self.optimizer, mode):
            getattr(self.optimizer, mode)()

    def _losses(self, batches: Sequence[MicroBatch]) -> Tensor:
        losses = self.stages.losses(batches)
        self.stages.free_gathered_weights()
        return losses

    # ---- Checkpoints ----

    def save(self, folder: Path, progress: dict[str, Any]) -> Saving:
        """Begin to write a checkpoint; training may continue while it is written.

        Args:
            folder: folder of the checkpoint; the same on all ranks.
            progress: step, samples and tokens, stored with it.
        """
        self._set_mode("eval")
        written = training_state.save(
            folder,
            self._tensors(self._originals()),
            description=self._description(progress),
            rank_state=self._rank_state(),
            group=self._save_group,
        )
        return Saving(folder, written, finish=lambda: self._sync_folder(folder))

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

    def _pack_states(self, parameters: list[ParameterChunk]) -> None:
        """Pack states again, if the optimizer does so: a checkpoint has them unpacked."""
        packed = getattr(self.optimizer, "packed", None)
        if packed is None:
            return
        for chunk in parameters:
            state = self.optimizer.state[chunk.local]
            for kind, like in self._state_kinds.items():
                if like == "like_parameter" and kind in state:
                    state[kind] = packed(chunk.local, kind, state[kind])

    def _originals(self) -> list[ParameterChunk]:
        """This rank's parameters, without copies of a tied embedding."""
        return [chunk for chunk in self._chunks if not chunk.is_tied_output]

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any layout: weights, optimizer states, random generators."""
        self._set_mode("eval")  # the mode of the weights in a checkpoint
        copies = [chunk for chunk in self._chunks if chunk.is_tied_output]
        rank_state = None
        # A copy has the keys of its original, so that one dict cannot hold both.
        for parameters in (self._originals(), copies):
            with raise_on_all_ranks():
                training_state.make_state(
                    folder, parameters, optimizer=self.optimizer, kinds=self._state_kinds
                )
                tensors = self._tensors(parameters)
                training_state.check(folder, tensors)
            rank_state = training_state.load(folder, tensors) or rank_state
            self._pack_states(parameters)
        self._restore_state(folder, rank_state)
