"""The DeepSpeed back end: ZeRO over data- and context-parallel ranks, all else as in `native`.

Micro batches come from the trainer; loss, gradient norm and checkpoints in torch's format go back.
DeepSpeed averages and shards gradients and holds fp32 weights and optimizer states. tokamake does
loss scaling, gradient accumulation and all other parallelism.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.flat_chunks import FlatChunks, single_chunk
from tokamake.config.resolved_run import Run
from tokamake.optim._groups import set_rates
from tokamake.parallel import collectives, sharding, tied_embeddings
from tokamake.parallel.sharding import ParameterChunk
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends import _deepspeed_internals as internals
from tokamake.train.backends import _deepspeed_partitions as partitions
from tokamake.train.backends import _deepspeed_setup as setup
from tokamake.train.backends._base import EngineBase, GradientSums
from tokamake.train.backends._initial_weights import load_initial_weights
from tokamake.train.batch import MicroBatch, SampleIds
from tokamake.train.gradient_clipping import clip_coefficient
from tokamake.train.loss_factors import SUM_OF_TOKENS, LossFactors
from tokamake.train.pipeline_stages import PipelineStages
from tokamake.train.step_result import FindFault, Saving, StepResult, accept


class _StagesModule(nn.Module):
    """This rank's stages as one module, so that DeepSpeed sees all parameters."""

    def __init__(self, stages: PipelineStages) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stages.modules.values())
        # In a list, because torch would search an attribute for parameters.
        self._stages = [stages]

    def forward(self, batch: MicroBatch, factors: LossFactors) -> Tensor:
        """Sum of the losses of a micro batch, times their factors; not for pipelines."""
        return self._stages[0].loss(batch, factors)


class Engine(EngineBase):
    """One rank's part of the model and its optimizer; see `native.Engine`."""

    def __init__(
        self, run: Run, ranks: Ranks, *, device: torch.device, continues: bool = False
    ) -> None:
        self._zero_stage, self._mode = run.train.zero_stage, ""
        super().__init__(run, ranks, device=device, shard=False)
        self.mesh.log.has_gathers = self._zero_stage < 3  # DeepSpeed's own hooks gather
        # Flat partitions cannot be gathered to whole parameters.
        self.optimizer = self._build_optimizer(whole=self._zero_stage == 0)
        self._mark_parameters()
        mpu = setup.Mpu(self.mesh, ranks.world_size, device=device)
        self._engine = setup.initialize(
            run, _StagesModule(self.stages), optimizer=self.optimizer, mpu=mpu, device=device.type
        )
        internals.reduce_at_end(self._engine, self._zero_stage < 2)
        internals.sum_norm_over_all_ranks(self._engine.optimizer)
        self._fragments = partitions.fragments(
            self._chunks, self._engine.optimizer, self._zero_stage
        )
        if not continues:
            load_initial_weights([*self._weights()], run, ranks=ranks)
            internals.publish(self._engine.optimizer, self._zero_stage)

    def _weights(self) -> Iterator[tuple[ParameterChunk, FlatChunks]]:
        for fragment in self._fragments:
            yield fragment.chunk, fragment.place(fragment.flat)
        for chunk in self.stages.buffers:
            yield chunk, single_chunk(chunk.local, chunk.shape, place=chunk.place)

    def _mark_parameters(self) -> None:
        """Mark parameters for DeepSpeed's norm, and set hooks that sum partial gradients."""
        for chunk in self._chunks:
            internals.mark(chunk.parameter, counts=chunk.counts, is_replica=chunk.is_tied_output)
            if chunk.placement.partial and self._zero_stage >= 2:
                # Stages 2 and 3 shard a gradient as soon as it is computed: sum it before.
                chunk.parameter.register_hook(
                    partial(collectives.all_reduce, axis=self.mesh.tensor)
                )

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
        """Do one optimizer step; see `native.Engine.train_step`."""
        self._set_mode("train")
        batches = self._batches(rows, samples)
        sums, corpora = self._gradients(batches), self._corpus_sums(batches, samples)
        measured = self._sum_over_ranks(sums, stop=stop, saved=saved, corpora=corpora)
        loss = measured.loss
        set_rates(self.optimizer, learning_rate=learning_rate, weight_decay=weight_decay)
        norm = self._step(measured.grad_norm) if math.isfinite(loss) else self._discard()
        if self._zero_stage and not math.isfinite(norm):
            # DeepSpeed does not say which rank has the bad gradient: name all of them.
            own_loss, squares = self._own_sums
            self._own_sums = own_loss, torch.full_like(squares, norm)
        overflowed = math.isfinite(loss) and self._loss_scale.overflowed(norm)
        updated = math.isfinite(loss) and math.isfinite(norm)
        if updated:
            self.stages.balance_routers(measured.routers)
        return measured._replace(
            grad_norm=norm,
            skipped=overflowed,
            # DeepSpeed knows the norm only after the update.
            bad=None if overflowed else find_fault(loss, norm),
            updated=updated,
        )

    def _gradients(self, batches: Sequence[MicroBatch]) -> GradientSums:
        """Compute the gradients of a step; squares are 0 in stages 1 to 3."""
        # DeepSpeed averages over these ranks; the gradients should be summed.
        num_averaged = self.mesh.data.size * self.mesh.context.size
        total = self._reduced(batches, self._loss_factors(batches).times(num_averaged))
        squares = torch.zeros_like(total)
        if self._zero_stage == 0:
            # Data-parallel ranks all have the same gradients.
            squares = sharding.squares(self._chunks, self._device) / num_averaged
        return GradientSums(total / num_averaged, squares)

    def _pass(self, batches: Sequence[MicroBatch], factors: LossFactors) -> Tensor:
        total = self._reduced(batches, factors)
        self._discard()
        return total

    def _reduced(self, batches: Sequence[MicroBatch], factors: LossFactors) -> Tensor:
        """Compute and reduce the gradients of micro batches; return the sum of the losses."""
        if self._run.train.precision == "fp16":
            self._engine.optimizer.loss_scale = self._loss_scale.value
        if self._zero_stage < 2:
            return self._reduce_at_end(batches, factors)
        return self._reduce_each(batches, factors)

    def _reduce_at_end(self, batches: Sequence[MicroBatch], factors: LossFactors) -> Tensor:
        """Add up the gradients of a step here, then let DeepSpeed reduce them."""
        value = self._loss_scale.value
        total = self.stages.forward_backward(batches, factors.times(value)) / value
        sharding.add_up_partial(self._chunks, self.mesh.tensor, gradient=self._gradient)
        if self.stages.copies_embedding:
            name = self.stages.embedding_name
            tied_embeddings.add_up_copies(
                self._chunks, self.mesh.pipeline, name=name, gradient=self._gradient
            )
        internals.reduce(self._engine)
        return total

    def _gradient(self, chunk: ParameterChunk) -> Tensor | None:
        """DeepSpeed's fp32 sum of a parameter's gradients."""
        return internals.gradient(self._engine.optimizer, chunk.parameter)

    def _reduce_each(self, batches: Sequence[MicroBatch], factors: LossFactors) -> Tensor:
        """Let DeepSpeed reduce the gradients of each micro batch, and add up its shard of them."""
        self.stages.look_ahead(batches)
        if self._run.train.precision == "fp16":
            # DeepSpeed scales the loss, and gradients of added losses do not come from it.
            factors = factors.times_added(self._loss_scale.value)
        total = torch.zeros((), device=self._device)
        for number, batch in enumerate(batches, 1):
            self._engine.set_gradient_accumulation_boundary(number == len(batches))
            loss = self._engine(batch, factors)
            self._engine.backward(loss, scale_wrt_gas=False)
            total += loss.detach()
            if number < len(batches):
                self._engine.step()
        return total

    def _step(self, norm: float) -> float:
        """Update the weights unless a gradient is not finite; return the norm before clipping."""
        if self._zero_stage:
            self._engine.step()
            return float(self._engine.get_global_grad_norm())
        if math.isfinite(norm):
            sharding.scale(self._chunks, clip_coefficient(norm, self._run.train.gradient_clipping))
            self._engine.step()
        else:
            self._discard()
        return norm

    def _discard(self) -> float:
        """Drop the gradients of a step; return their norm."""
        if self._zero_stage:
            with internals.overflowing(self._engine.optimizer, self._zero_stage):
                self._engine.step()
        else:
            self._engine.zero_grad()
        return math.nan

    def _set_mode(self, mode: str) -> None:
        if mode == self._mode or not hasattr(self.optimizer, mode):
            return
        self._mode = mode
        with internals.seen_by_optimizer(self._engine.optimizer, self._zero_stage):
            getattr(self.optimizer, mode)()
        internals.publish(self._engine.optimizer, self._zero_stage)

    @torch.no_grad()
    def _losses(self, batches: Sequence[MicroBatch]) -> Tensor:
        if self._zero_stage < 3:
            return self.stages.losses(batches)
        self.stages.look_ahead(batches)
        # In stage 3, DeepSpeed gathers weights in the forward pass of its own engine.
        return torch.stack([self._engine(batch, SUM_OF_TOKENS) for batch in batches]).sum()

    # ---- Checkpoints ----

    def save(self, folder: Path, progress: dict[str, Any]) -> Saving:
        """Begin to write a checkpoint; see `native.Engine.save`."""
        self._set_mode("eval")
        counted = [fragment for fragment in self._fragments if fragment.chunk.counts]
        tensors = partitions.tensors_of(counted, self.optimizer.state) | self._buffers()
        return self._write(folder, progress, tensors=tensors)

    def load(self, folder: Path) -> None:
        super().load(folder)
        internals.publish(self._engine.optimizer, self._zero_stage)

    def _parameters(self, *, copies: bool) -> list[partitions.Fragment]:
        """This rank's fragments: of copies of a tied embedding, or of all other parameters."""
        return [each for each in self._fragments if each.chunk.is_tied_output == copies]

    def _room(self, folder: Path, *, copies: bool) -> training_state.Tensors:
        fragments = self._parameters(copies=copies)
        partitions.make_state(folder, fragments, optimizer=self.optimizer, kinds=self._state_kinds)
        tensors = partitions.tensors_of(fragments, self.optimizer.state)
        return tensors if copies else tensors | self._buffers()

    def _buffers(self) -> training_state.Tensors:
        """Tensors beside the parameters, by their keys in checkpoints."""
        return {f"model.{chunk.saved_name}": chunk.local for chunk in self.stages.buffers}

    def _take(self, folder: Path, loaded: training_state.Tensors, *, copies: bool) -> None:
        fragments = self._parameters(copies=copies)
        with raise_on_all_ranks():
            partitions.take_shared(folder, fragments, states=self.optimizer.state, loaded=loaded)
