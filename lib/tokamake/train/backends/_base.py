"""What the engines of all back ends share: the start, the count of tokens, what ranks agree on.

A run and its start checkpoint come in; each rank reads the parts of weights that it holds.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake import files, plugins
from tokamake.checkpoint.deepspeed.zero_reader import settings_of
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.description import describe
from tokamake.checkpoint.native.flat_chunks import FlatChunks
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.optim._groups import parameter_groups
from tokamake.optim._whole import ALONE, ParameterPart, WholeParameters
from tokamake.parallel import mesh
from tokamake.parallel.loss import NO_LABEL
from tokamake.parallel.sharding import Held
from tokamake.runtime.cores import keep_freed_memory
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.batch import (
    MicroBatch,
    TokenRows,
    has_masked_labels,
    num_micro_batches,
    to_batch,
)
from tokamake.train.initial_checkpoint import describe_start
from tokamake.train.loss_scale import LossScale
from tokamake.train.numerics import precision_of
from tokamake.train.pipeline_stages import PipelineStages
from tokamake.train.random_state import random_state, seed_all, set_random_state


class EngineBase(ABC):
    """One rank's share of the training run; what it holds of the model is yet to be filled.

    Attributes:
        mesh: this rank among its peers.

    Args:
        run: the resolved run.
        ranks: this process among its peers.
        device: where the model lives.
        shard: whether FSDP2 is data parallelism here.

    Raises:
        UserError: the settings do not go together.
    """

    _state_kinds: dict[str, str]
    _optimizer: torch.optim.Optimizer

    def __init__(self, run: Run, ranks: Ranks, device: torch.device, *, shard: bool) -> None:
        self._run, self._ranks, self._device = run, ranks, device
        seed_all(run.seed)
        if device.type == "cpu":
            keep_freed_memory()
        parts = run.train.zero_stage > 0
        self.mesh = mesh.build(run.train.parallel, ranks.world_size, device, shard=parts)
        self._stages = PipelineStages(run, self.mesh, device, shard=shard)
        self._held: list[Held] = self._stages.held
        self._loss_scale = LossScale(precision_of(run))
        # Saving goes on beside training, and must not take part in its collectives.
        self._savers = dist.new_group(backend="gloo")

    @abstractmethod
    def _weights(self) -> Iterable[tuple[Held, FlatChunks]]:
        """This rank's parts of whole parameters, as the optimizer has them."""

    def _take_start(self) -> None:
        """Read the parts that this rank has of the weights that the run starts from.

        All ranks call it.

        Raises:
            UserError: there are none, or they are not of the run's architecture.
        """
        with raise_on_all_ranks():
            start = describe_start(self._run)
        names: list[str] = [""] * self._ranks.world_size
        dist.all_gather_object(names, start.path.name)
        if len({*names}) > 1:
            raise UserError(
                f"{self._run.checkpoint}: its latest moves on while ranks start from it; end the "
                "run that trains there, or start again"
            )
        parts = [*self._weights()]
        # A copy has the key of what it is a copy of.
        for copies in (False, True):
            some = {f"model.{held.saved_name}": p for held, p in parts if held.is_copy == copies}
            with raise_on_all_ranks():
                training_state.check(start.path, some)
            training_state.fill(start.path, some)

    def _build_optimizer(self, *, whole: bool) -> torch.optim.Optimizer:
        """Make the run's optimizer of what this rank holds.

        Args:
            whole: whether it may ask for whole parameters.
        """
        settings = self._run.train.optimizer
        named = [(held.name, held.local) for held in self._held]
        parts: dict[Tensor, ParameterPart] = {
            held.local: ParameterPart(tuple(held.shape), held.place, held.groups)
            for held in self._held
        }
        groups = parameter_groups(named, settings.used("weight_decay"))
        plug_in = plugins.load("optim", settings.name)
        self._state_kinds = plug_in.STATE
        view = WholeParameters(parts.__getitem__) if whole else ALONE
        made: torch.optim.Optimizer = plug_in.build(groups, settings, view)
        return made

    @abstractmethod
    def _losses(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Sum of the losses of all tokens of some micro batches; 0 where the last stage is not."""

    @abstractmethod
    def _set_mode(self, mode: str) -> None:
        """Ready the weights for "train" or "eval"."""

    def _batches(self, rows: Sequence[TokenRows]) -> list[MicroBatch]:
        return [to_batch(each, self._run, self._device, self.mesh) for each in rows]

    def _count(self, batches: Sequence[MicroBatch]) -> int:
        """Tokens of all ranks that have a loss."""
        if not has_masked_labels(self._run.train):
            own = sum(batch.labels.numel() for batch in batches)
            return own * self.mesh.data.size * self.mesh.context.size
        counts = [(batch.labels != NO_LABEL).sum() for batch in batches]
        count = torch.stack(counts).sum()
        dist.all_reduce(count)
        return max(1, int(count) // (self.mesh.tensor.size * self.mesh.pipeline.size))

    def _agree(
        self, loss: Tensor, squares: Tensor, *, stop: bool, saved: bool
    ) -> tuple[float, float, bool, bool]:
        """Sum loss and gradient over all ranks, and hear whether any stops and all have saved."""
        # Tensor-parallel ranks have the same loss, all but the last stage have none.
        own = loss if self.mesh.tensor.rank == 0 else torch.zeros_like(loss)
        flags = torch.tensor([stop, saved], device=self._device)
        sums = torch.cat((torch.stack((own, squares)).float(), flags.float()))
        dist.all_reduce(sums)
        total, square, stops, saves = sums.tolist()
        return total, math.sqrt(square), stops > 0, saves == self._ranks.world_size

    def mean_loss(self, rows: Iterable[TokenRows]) -> float:
        """Loss over all tokens of the micro batches of all ranks, without training on them."""
        self._set_mode("eval")
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        num_batches = num_micro_batches(self._run.train, self.mesh) if self._stages.in_turns else 1
        coming = iter(rows)
        while some := [*islice(coming, num_batches)]:
            batches = self._batches(some)
            total[0] += self._losses(batches)
            total[1] += sum((batch.labels != NO_LABEL).sum() for batch in batches)
        if not self._stages.has_loss or self.mesh.tensor.rank:
            total.zero_()
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _description(self, progress: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        return {
            **progress,
            "architecture": self._run.architecture.model_dump(mode="json"),
            "optimizer": self._run.train.optimizer.name,
            **settings_of(self._optimizer.param_groups),
            "loss_scale": self._loss_scale.state,
        }

    def _rank_state(self) -> dict[str, Any]:
        """What a checkpoint keeps for this rank alone."""
        return {"random": random_state()}

    def _take_rest(self, folder: Path, state: dict[str, Any] | None) -> None:
        """Bring back the loss scale and, if there were as many ranks, what `_rank_state` gave."""
        scale, steps = describe(folder)["loss_scale"]
        self._loss_scale.state = scale, steps
        if state:
            set_random_state(state["random"])

    def _to_disk(self, folder: Path) -> None:
        # DCP has synced what it wrote, but not the folder.
        with raise_on_all_ranks():
            if self._ranks.rank == 0:
                files.sync(folder)
