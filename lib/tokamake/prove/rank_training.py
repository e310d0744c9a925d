"""Training on ranks whose weights, gradients and losses are gathered after each step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tokamake import plugins
from tokamake.checkpoint.model_tensors import WITHOUT_GRADIENT
from tokamake.config.resolved_run import Run
from tokamake.prove.engine_tensors import (
    WholeTensors,
    gather,
    watch_extra_passes,
    watch_updates,
    weights,
)
from tokamake.prove.plain_training import Update, rates
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples
from tokamake.runtime.ranks import Ranks
from tokamake.train.step_result import StepResult


class RankStep(NamedTuple):
    """A step of training."""

    result: StepResult
    updates: list[WholeTensors]
    """Clipped gradients of each update of the weights; a step has one update."""
    extra: list[WholeTensors]
    """Gradients of each extra pass of the optimizer; a step has one at most."""
    weights: WholeTensors
    """Weights after the step."""

    @property
    def update(self) -> Update:
        """Gradients and choices that changed the weights; no gradients if there was no update."""
        own, extra = (made[-1].tensors if made else {} for made in (self.updates, self.extra))
        return Update(own, extra, self.result.routers)


class RankTraining(NamedTuple):
    """Steps of training; the same on all ranks."""

    validations: list[float | None]
    """Loss of the samples after the last step, before the first step and after the last one; None:
    they have no label."""
    steps: list[RankStep]
    initial: WholeTensors
    """Weights before the first step."""


def train_on_ranks(
    run: Run,
    ranks: Ranks,
    *,
    num_steps: int,
    shapes: Mapping[str, torch.Size],
    device: torch.device,
) -> RankTraining:
    """Train a run's model as its back end does, on random samples; all ranks call it together.

    Args:
        run: a run with its precision; see `with_precision`. Its index and its data are not read.
        shapes: of all whole tensors by their names in checkpoints.
    """
    engine: Any = plugins.load("train/backends", run.train.backend).Engine(
        run, ranks, device=device
    )
    objective = engine.stages.objective
    initial = gather(weights(engine), shapes)
    held_out = rank_samples(step_samples(objective, step=num_steps), engine.mesh)
    validations = [engine.validate(iter(held_out)).loss]
    updates, extra = list[WholeTensors](), list[WholeTensors]()
    with_gradient = {
        name: shape for name, shape in shapes.items() if not name.endswith(WITHOUT_GRADIENT)
    }
    watch_updates(engine, lambda gradients: updates.append(gather(gradients, with_gradient)))
    watch_extra_passes(engine, lambda gradients: extra.append(gather(gradients, with_gradient)))
    steps = []
    for number in range(num_steps):
        rows = rank_samples(step_samples(objective, step=number), engine.mesh)
        ids = rank_ids(objective, engine.mesh, step=number)
        result = engine.train_step(rows, samples=ids, **rates(run, number))
        if number + 1 == num_steps:  # some optimizers validate an average of the weights
            validations.append(engine.validate(iter(held_out)).loss)
        engine._set_mode("eval")
        steps.append(RankStep(result, [*updates], [*extra], gather(weights(engine), shapes)))
        updates.clear()
        extra.clear()
    return RankTraining(validations, steps, initial)
