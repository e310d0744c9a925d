"""The native back end: FSDP2, tensor, context and pipeline parallelism, torch's own checkpoints.

Micro batches come from the loop; loss, gradient norm and checkpoints go back. Loss and gradients
are those of all tokens of a global batch, however ranks share it.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake import plugins
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.flat_chunks import FlatChunks, box
from tokamake.config.resolved_run import Run
from tokamake.optim._groups import set_rates
from tokamake.parallel import sharding
from tokamake.parallel.sharding import Held
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends._base import EngineBase
from tokamake.train.batch import MicroBatch, TokenRows, label_draws
from tokamake.train.step_result import Saving, StepResult


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
        super().__init__(run, ranks, device, shard=True)
        self._optimizer = self._build_optimizer(whole=True)
        plug_in = plugins.load("optim", run.train.optimizer.name)
        self._needs_hessian = getattr(plug_in, "needs_hessian", None)
        self._layout = training_state.StateLayout(self.mesh, device)
        if not continues:
            self._take_start()

    def _weights(self) -> Iterator[tuple[Held, FlatChunks]]:
        for held in self._held:
            yield held, box(held.local.detach(), held.shape, held.place)

    def train_step(
        self,
        rows: Sequence[TokenRows],
        *,
        learning_rate: float,
        weight_decay: float,
        stop: bool = False,
        saved: bool = False,
    ) -> StepResult:
        """Do one optimizer step.

        Args:
            rows: this rank's micro batches of the step.
            learning_rate: of this step.
            weight_decay: of this step.
            stop: whether this rank was asked to stop.
            saved: whether this rank has finished what it had to save.
        """
        self._set_mode("train")
        batches = self._batches(rows)
        scale = self._stages.num_averaged / self._count(batches)
        self._update_hessian(rows, batches)
        total = self._stages.forward_backward(batches, scale * self._loss_scale.value)
        self._add_up_gradients()
        squares = sharding.squares(self._held, self._device)
        own = total / self._stages.num_averaged
        loss, norm, stopped, all_saved = self._agree(own, squares, stop=stop, saved=saved)
        loss, norm = loss / self._loss_scale.value, norm / self._loss_scale.value
        stepped = math.isfinite(loss) and self._loss_scale.update(norm)
        if stepped and math.isfinite(norm):
            set_rates(self._optimizer, learning_rate=learning_rate, weight_decay=weight_decay)
            sharding.scale(self._held, self._share(norm))
            self._optimizer.step()
        self._forget_gradients()
        return StepResult(loss, norm, stop=stopped, saved=all_saved, skipped=not stepped)

    def _num_updates(self) -> int:
        """Updates that have been done, as the optimizer counts them."""
        states = (self._optimizer.state.get(held.local, {}) for held in self._held)
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def _update_hessian(self, rows: Sequence[TokenRows], batches: Sequence[MicroBatch]) -> None:
        """Where it is due, let the optimizer take in gradients of labels drawn from the model."""
        if self._needs_hessian is None:
            return
        step = self._num_updates()
        if not self._needs_hessian(step, self._run.train.optimizer):
            return
        count, loss_scale = self._count(batches), self._loss_scale.value
        draws = label_draws(rows, seed=self._run.seed, step=step, mesh=self.mesh)
        scale = self._stages.num_averaged / count * loss_scale
        self._stages.forward_backward(batches, scale, draws)
        self._add_up_gradients()
        squares = sharding.squares(self._held, self._device)
        dist.all_reduce(squares)
        # In fp16 they may overflow; then so do those of the step, most likely, and both are done
        # again at a lower scale.
        if math.isfinite(squares.item()):
            sharding.scale(self._held, 1 / loss_scale)
            optimizer: Any = self._optimizer
            optimizer.update_hessian(count)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for held in self._held:
            held.parameter.grad = held.local.grad = None

    def _add_up_gradients(self) -> None:
        for held in self._held:
            held.take_gradient()
        sharding.add_up_partial(self._held, self.mesh.tensor)
        if self._run.architecture.tie_word_embeddings:
            sharding.add_up_copies(self._held, self.mesh.pipeline, self._stages.embedding_name)

    def _share(self, norm: float) -> float:
        """What gradients are multiplied with: clipped, and without the loss scale."""
        most, share = self._run.train.gradient_clipping, 1.0
        if most:
            # The same small number as in torch.nn.utils.clip_grad_norm_.
            share = min(1.0, most / (norm + 1e-6))
        return share / self._loss_scale.value

    def _set_mode(self, mode: str) -> None:
        """Tell an optimizer that keeps weights apart for training which are wanted."""
        if hasattr(self._optimizer, mode):
            getattr(self._optimizer, mode)()

    def _losses(self, batches: Sequence[MicroBatch]) -> Tensor:
        found = self._stages.losses(batches)
        self._stages.forget_whole_weights()
        return found

    def save(self, folder: Path, progress: dict[str, Any]) -> Saving:
        """Begin to write a checkpoint; it may be waited for while training goes on.

        Args:
            folder: of the checkpoint; all ranks call with the same one.
            progress: step, samples, tokens; stored with it.
        """
        self._set_mode("eval")
        tensors = self._tensors(self._of_own())
        written = training_state.save(
            folder,
            tensors,
            description=self._description(progress),
            rank_state=self._rank_state(),
            group=self._savers,
        )
        return Saving(folder, written, lambda: self._to_disk(folder))

    def _tensors(self, held: list[Held]) -> training_state.Tensors:
        states: dict[Any, dict[str, Any]] = self._optimizer.state
        plain = getattr(self._optimizer, "plain", None)
        if plain:
            states = {
                key: {kind: plain(value) for kind, value in state.items()}
                for key, state in states.items()
            }
        return training_state.tensors_of(held, states, self._layout, self._state_kinds)

    def _pack_states(self, held: list[Held]) -> None:
        """Let an optimizer that keeps states in a format of its own have them so."""
        packed = getattr(self._optimizer, "packed", None)
        for one in held if packed else ():
            state = self._optimizer.state[one.local]
            for kind, like in self._state_kinds.items():
                if like == "like_parameter" and kind in state:
                    assert packed
                    state[kind] = packed(one.local, kind, state[kind])

    def _of_own(self) -> list[Held]:
        """What this rank holds, but for copies, which hold nothing new."""
        return [held for held in self._held if not held.is_copy]

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint of any layout: weights, optimizer, random generators."""
        copies = [held for held in self._held if held.is_copy]
        state = None
        for some in (self._of_own(), copies):
            with raise_on_all_ranks():
                training_state.make_state(folder, some, self._optimizer, self._state_kinds)
                tensors = self._tensors(some)
                training_state.check(folder, tensors)
            state = training_state.load(folder, tensors) or state
            self._pack_states(some)
        self._take_rest(folder, state)
