"""The DeepSpeed back end: ZeRO over data- and context-parallel ranks, all else as the native one.

Micro batches come from the loop; loss, gradient norm and checkpoints of torch's format go back.
DeepSpeed averages and shards gradients and holds fp32 weights and optimizer states; loss scale,
micro batches and layouts are ours.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.flat_chunks import FlatChunks
from tokamake.config.resolved_run import Run
from tokamake.optim._groups import set_rates
from tokamake.parallel import collectives, sharding
from tokamake.parallel.sharding import Held
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends import _deepspeed_partitions as pieces
from tokamake.train.backends import _deepspeed_setup as setup
from tokamake.train.backends._base import EngineBase
from tokamake.train.batch import MicroBatch, TokenRows
from tokamake.train.pipeline_stages import PipelineStages
from tokamake.train.step_result import Saving, StepResult


class _Parts(nn.Module):
    """This rank's stages as one module, for DeepSpeed to see all parameters of."""

    def __init__(self, stages: PipelineStages) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stages.modules.values())
        # Hidden, lest torch should take it for a part.
        self._stages = [stages]

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """Sum of the losses of a micro batch's tokens, times `scale`; of a model in one stage."""
        return self._stages[0].loss(batch, scale)


class Engine(EngineBase):
    """One rank's share of the training run.

    Args:
        run: the resolved run.
        ranks: this process among its peers.
        device: where the model lives.
        continues: whether `load` comes next, so that the run's start is not read.

    Raises:
        UserError: the settings do not go together, or with the start.
    """

    def __init__(
        self, run: Run, ranks: Ranks, device: torch.device, *, continues: bool = False
    ) -> None:
        self._stage, self._mode = run.train.zero_stage, ""
        super().__init__(run, ranks, device, shard=False)
        # Of flat pieces there are no whole parameters.
        self._optimizer = self._build_optimizer(whole=self._stage == 0)
        self._mark()
        mpu = setup.Mpu(self.mesh, ranks.world_size, device)
        self._engine = setup.initialize(
            run, _Parts(self._stages), self._optimizer, mpu, device.type
        )
        # DeepSpeed is told of a whole step's gradients at once.
        self._engine.pipeline_parallelism = self._stage < 2
        self._pieces = pieces.pieces(self._held, self._engine.optimizer, self._stage)
        if not continues:
            self._take_start()
            pieces.publish(self._engine.optimizer, self._stage)

    def _weights(self) -> Iterator[tuple[Held, FlatChunks]]:
        for piece in self._pieces:
            yield piece.held, piece.place(piece.flat)

    def _mark(self) -> None:
        """Say which parameters count in the norm here, and complete partial gradients."""
        for held in self._held:
            parameter: Any = held.parameter
            parameter.model_parallel = held.counts
            parameter.ds_pipe_replicated = held.is_copy
            if held.placement.partial and self._stage >= 2:
                # There gradients are shared out before a step's last pass is over.
                parameter.register_hook(partial(collectives.all_reduce, axis=self.mesh.tensor))

    def train_step(
        self,
        rows: Sequence[TokenRows],
        *,
        learning_rate: float,
        weight_decay: float,
        stop: bool = False,
        saved: bool = False,
    ) -> StepResult:
        """Do one optimizer step; see `native.Engine.train_step`."""
        self._set_mode("train")
        batches = self._batches(rows)
        # DeepSpeed averages over these ranks what shall be summed.
        averaged = self.mesh.data.size * self.mesh.context.size
        scale = averaged / self._count(batches)
        if self._run.train.precision == "fp16":
            self._engine.optimizer.loss_scale = self._loss_scale.value
        if self._stage < 2:
            total = self._at_once(batches, scale)
        else:
            total = self._one_by_one(batches, scale)
        squares = torch.zeros_like(total)
        if self._stage == 0:
            # Data-parallel ranks all have the same gradients.
            squares = sharding.squares(self._held, self._device) / averaged
        agreed = self._agree(total / averaged, squares, stop=stop, saved=saved)
        loss, norm, stopped, all_saved = agreed
        set_rates(self._optimizer, learning_rate=learning_rate, weight_decay=weight_decay)
        norm = self._update(norm) if math.isfinite(loss) else math.nan
        stepped = math.isfinite(loss) and self._loss_scale.update(norm)
        return StepResult(loss, norm, stop=stopped, saved=all_saved, skipped=not stepped)

    def _at_once(self, batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Add up the gradients of a step here, then let DeepSpeed reduce them."""
        value = self._loss_scale.value
        total = self._stages.forward_backward(batches, scale * value) / value
        sharding.add_up_partial(self._held, self.mesh.tensor, self._gradient)
        if self._run.architecture.tie_word_embeddings:
            name = self._stages.embedding_name
            sharding.add_up_copies(self._held, self.mesh.pipeline, name, self._gradient)
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.allreduce_gradients()
        return total

    def _gradient(self, held: Held) -> Tensor | None:
        """Where DeepSpeed adds up a gradient, in fp32."""
        optimizer, parameter = self._engine.optimizer, held.parameter
        if hasattr(optimizer, "get_gradient_for_reduction"):
            found: Tensor | None = optimizer.get_gradient_for_reduction(parameter)
            return found
        return getattr(parameter, "_hp_grad", parameter.grad)

    def _one_by_one(self, batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Let DeepSpeed reduce the gradients of each micro batch, and add up its share of them."""
        total = torch.zeros((), device=self._device)
        for number, batch in enumerate(batches, 1):
            self._engine.set_gradient_accumulation_boundary(number == len(batches))
            loss = self._engine(batch, scale)
            self._engine.backward(loss, scale_wrt_gas=False)
            total += loss.detach()
            if number < len(batches):
                self._engine.step()
        return total

    def _update(self, norm: float) -> float:
        """Take the step unless a gradient is not finite; return the norm before clipping."""
        if self._stage:
            self._engine.step()
            return float(self._engine.get_global_grad_norm())
        if math.isfinite(norm):
            most = self._run.train.gradient_clipping
            # The same small number as in torch.nn.utils.clip_grad_norm_.
            sharding.scale(self._held, min(1.0, most / (norm + 1e-6)) if most else 1.0)
            self._engine.step()
        return norm

    def _set_mode(self, mode: str) -> None:
        """Tell an optimizer that keeps weights apart for training which are wanted."""
        if mode == self._mode or not hasattr(self._optimizer, mode):
            return
        self._mode = mode
        with pieces.seen_by_optimizer(self._engine.optimizer, self._stage):
            getattr(self._optimizer, mode)()
        pieces.publish(self._engine.optimizer, self._stage)

    @torch.no_grad()
    def _losses(self, batches: Sequence[MicroBatch]) -> Tensor:
        if self._stage < 3:
            return self._stages.losses(batches)
        return torch.stack([self._engine(batch, 1.0) for batch in batches]).sum()

    def save(self, folder: Path, progress: dict[str, Any]) -> Saving:
        """Begin to write a checkpoint; see `native.Engine.save`."""
        self._set_mode("eval")
        counted = [piece for piece in self._pieces if piece.held.counts]
        written = training_state.save(
            folder,
            pieces.tensors_of(counted, self._optimizer.state),
            description=self._description(progress),
            rank_state=self._rank_state(),
            group=self._savers,
        )
        return Saving(folder, written, lambda: self._to_disk(folder))

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint of any back end and layout; see `native.Engine.load`."""
        own = [piece for piece in self._pieces if not piece.held.is_copy]
        copies = [piece for piece in self._pieces if piece.held.is_copy]
        state = None
        for some in (own, copies):
            with raise_on_all_ranks():
                pieces.make_state(folder, some, self._optimizer, self._state_kinds)
                tensors = pieces.tensors_of(some, self._optimizer.state)
                training_state.check(folder, tensors)
            state = training_state.load(folder, tensors) or state
            with raise_on_all_ranks():
                pieces.take_shared(folder, some, self._optimizer.state, tensors)
        pieces.publish(self._engine.optimizer, self._stage)
        self._take_rest(folder, state)
