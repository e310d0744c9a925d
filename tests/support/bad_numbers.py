"""Samples that give a run bad numbers: the loss of a rank that sees one of them has a factor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tokamake.config.resolved_run import read_run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.train.backends import deepspeed, native
from tokamake.train.pipeline_stages import PipelineStages


def poison(
    config: Path,
    factors: Mapping[int, float],
    *,
    once: bool = False,
    of_gradients: bool = False,
    patch: Any = None,
) -> None:
    """Multiply the loss, or only the gradients, of ranks that train on certain samples.

    Args:
        config: run.yaml.
        factors: factor by the number of the sample in training order.
        once: whether each sample does so only once, as a fault of the hardware.
        of_gradients: whether the loss keeps its value.
        patch: pytest's monkeypatch; None: the process ends after the run.
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
