"""Learning rate and weight decay of a step: warm-up, then the schedule; shapes of phases."""

import math

from tokamake import plugins
from tokamake.config.training import TrainSettings


class Schedule:
    """Learning rate and weight decay as functions of the progress of a run."""

    def __init__(self, train: TrainSettings) -> None:
        span = train.span
        assert span is not None, "resolve sets the number of steps"
        self._optimizer, self._settings = train.optimizer, train.schedule
        self._factor = plugins.load("schedules", train.schedule.name).factor
        self._lengths = train.schedule.lengths(span)
        self._length = train.schedule.length(span)
        self._options = train.schedule.options(train.optimizer.learning_rate)

    def learning_rate(self, step: int, consumed_samples: int) -> float:
        """Learning rate of the update after `step` finished ones."""
        share = self._share(self._position(step, consumed_samples))
        return self._optimizer.learning_rate * share

    def weight_decay(self, step: int, consumed_samples: int) -> float:
        """Weight decay of the next update; see `learning_rate` for the arguments."""
        progress = self._position(step, consumed_samples) / self._length
        return self._optimizer.weight_decay_at(progress)

    def _position(self, step: int, consumed_samples: int) -> int:
        return consumed_samples if self._settings.counts_samples else step

    def _share(self, position: int) -> float:
        """Share of the peak: linear during warm-up, then the plug-in's."""
        warmup, start = self._lengths["warmup"], self._settings.warmup_start_ratio
        if position < warmup:
            return start + (1.0 - start) * (position / warmup)
        share: float = self._factor(position, length=self._length, **self._lengths, **self._options)
        return share


def between(shape: str, progress: float, *, start: float, end: float) -> float:
    """Share of the peak within a phase, from `start` to `end`.

    `progress` is clipped to 0..1. With p for progress, s for start and e for end:
    linear: s + (e - s) p;
    cosine: e + (s - e) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, arXiv 1608.03983);
    1-sqrt: e + (s - e) (1 - sqrt(p)) (Hägele et al. 2024, arXiv 2405.18392);
    exponential: s (e / s)^p (Ibrahim et al. 2024, arXiv 2403.08763).
    """
    progress = min(1.0, max(0.0, progress))
    if shape == "exponential":
        return start * (end / start) ** progress
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": 1.0 - math.sqrt(progress),
    }[shape]
    return end + (start - end) * remaining
