"""Learning rate and weight decay of each step of a run, from its settings."""

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
