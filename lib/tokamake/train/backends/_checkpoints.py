"""Checkpoints of the engines of all back ends: their tensors, and their description."""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.megatron_model.optimizer_states import LR_SCHEDULER, RATES, settings_note
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.folder import read_description
from tokamake.config.resolved_run import Run
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.train.random_state import random_state, set_random_state
from tokamake.train.stability.loss_scale import LossScale
from tokamake.train.step_result import Saving


class EngineCheckpoints(ABC):
    """Part of an engine that saves and loads its weights and optimizer states."""

    optimizer: torch.optim.Optimizer
    _run: Run
    _loss_scale: LossScale
    _save_group: dist.ProcessGroup

    def _set_mode(self, mode: str) -> None:
        """Prepare the weights for "train" or "eval"; some optimizers keep one set for each."""
        if hasattr(self.optimizer, mode):
            getattr(self.optimizer, mode)()

    def checkpoint_bytes(self) -> float:
        """Estimate of the size of a checkpoint, by the optimizer states of this rank."""
        groups = self.optimizer.param_groups
        num_local = sum(parameter.numel() for group in groups for parameter in group["params"])
        states = (value for state in self.optimizer.state.values() for value in state.values())
        num_states = sum(value.numel() for value in states if isinstance(value, Tensor))
        num_parameters = sum(map(math.prod, model_tensors.shapes(self._run.architecture).values()))
        # Checkpoints have fp32 weights and fp32 states, for every precision.
        return 4 * num_parameters * (1 + num_states / max(num_local, 1))

    def _write(
        self, folder: Path, progress: dict[str, Any], *, tensors: training_state.Tensors
    ) -> Saving:
        """Begin to write a checkpoint with this rank's tensors; see `native.Engine.save`."""
        written = training_state.save(
            folder,
            tensors,
            description=self._description(progress),
            rank_state={"random": random_state()},
            group=self._save_group,
        )
        return Saving(folder, written)

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any back end and layout: weights, optimizer states, random state."""
        self._set_mode("eval")  # the mode of the weights in a checkpoint
        rank_state = None
        # A copy has the keys of its original, so that one dict cannot hold both.
        for copies in (False, True):
            with raise_on_all_ranks():
                tensors = self._room(folder, copies=copies)
                training_state.check(folder, tensors)
            rank_state = training_state.load(folder, tensors) or rank_state
            self._take(folder, tensors, copies=copies)
        self._restore_state(folder, rank_state)

    @abstractmethod
    def _room(self, folder: Path, *, copies: bool) -> training_state.Tensors:
        """Tensors to load from a checkpoint, by key; allocates optimizer states.

        Args:
            copies: whether to load copies of a tied embedding, or all other parameters.
        """

    @abstractmethod
    def _take(self, folder: Path, loaded: training_state.Tensors, *, copies: bool) -> None:
        """Give the loaded optimizer states the form in which the optimizer keeps them."""

    def _description(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Description that a checkpoint has of itself."""
        dropout = self._run.train.dropout
        return {
            **progress,
            "architecture": self._run.architecture.model_dump(mode="json"),
            "optimizer": self._run.train.optimizer.name,
            **settings_note(self.optimizer.param_groups),
            LR_SCHEDULER: dict(zip(RATES, self._run.train.learning_rates, strict=True)),
            "loss_scale": self._loss_scale.state,
            "loss_scale_tolerated": self._loss_scale.num_tolerated,
            **({"dropout": dropout.model_dump()} if any(dropout.rates) else {}),
        }

    def _restore_state(self, folder: Path, rank_state: dict[str, Any] | None) -> None:
        """Restore the loss scale and, if the number of ranks is the same, random generators."""
        description = read_description(folder)
        scale, finite_steps = description["loss_scale"]
        self._loss_scale.state = scale, finite_steps
        self._loss_scale.num_tolerated = description.get("loss_scale_tolerated", 0)
        if rank_state:
            set_random_state(rank_state["random"])
