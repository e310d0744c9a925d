"""Samples that give a run bad numbers: the loss of a rank that sees one of them has a factor."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support.runs import make_run, records
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.train import metrics
from tokamake.train.backends import deepspeed, native
from tokamake.train.pipeline_stages import PipelineStages

Settings = dict[str, Any]
NAN = {35: math.nan}
"""Bad samples: 32 to 39 are those of step 5; of two ranks, rank 1 reads the third and fourth."""
QUICK: Settings = {"evaluation_steps": 0, "schedule": {"warmup_steps": 0}}


def bad_run(root: Path, name: str, on_bad_step: Settings, **settings: Any) -> Path:
    """A run of 6 steps with an answer to bad steps."""
    return make_run(root, name, on_bad_step=on_bad_step, **QUICK, **settings)


def events(config: Path) -> list[dict[str, Any]]:
    """Bad steps that the journal of a run has."""
    return metrics.read(read_run(config).output / "events.jsonl")


def steps(config: Path) -> list[int]:
    """Steps with a training loss in the metrics."""
    return [record["step"] for record in records(config) if "loss" in record]


def poison(
    config: Path,
    factors: Mapping[int, float],
    *,
    once: bool = False,
    of_gradients: bool = False,
    patch: Any = None,
) -> None:
    """Multiply the loss of ranks that train on certain samples, or only its gradients.

    `factors` has numbers of samples in training order. `once`: as a fault of the hardware. `patch`
    is pytest's monkeypatch, or None if the process ends after the run.
    """
    samples = training_samples(read_run(config))
    bad = {samples[number].tobytes(): factor for number, factor in factors.items()}
    current = [1.0]
    loss = PipelineStages._loss
    put = patch.setattr if patch else setattr

    def bad_loss(stages: PipelineStages, *arguments: Any) -> Tensor:
        value, factor = loss(stages, *arguments), current[0]
        if not of_gradients:
            return value * factor
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * factor)
        return value

    def with_factor(train_step: Any) -> Any:
        def step(engine: Any, rows: Any, **options: Any) -> Any:
            keys = {row.tobytes() for batch in rows for row in batch} & bad.keys()
            for key in keys:
                current[0] = bad[key]
                if once:
                    del bad[key]
            try:
                return train_step(engine, rows, **options)
            finally:
                current[0] = 1.0

        return step

    put(PipelineStages, "_loss", bad_loss)
    for backend in (native, deepspeed):
        put(backend.Engine, "train_step", with_factor(backend.Engine.train_step))
    put(native.Engine, "recompute", with_factor(native.Engine.recompute))
