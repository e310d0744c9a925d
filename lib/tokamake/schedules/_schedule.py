"""Learning rate and weight decay of each step: settings of a run in, numbers for the loop out."""

from tokamake import plugins
from tokamake.config.schedule import Span
from tokamake.config.training import TrainSettings


class Schedule:
    """What the optimizer's rates are as a run goes on.

    Args:
        train: settings of a run whose length is known.
    """

    def __init__(self, train: TrainSettings) -> None:
        assert train.num_steps is not None, "resolve has counted them"
        span = Span(train.num_steps, train.batch_sizes, train.sequence_length)
        self._optimizer, self._settings = train.optimizer, train.schedule
        self._factor = plugins.load("schedules", train.schedule.name).factor
        self._lengths = train.schedule.lengths(span)
        self._length = train.schedule.length(span)
        self._options = train.schedule.options(train.optimizer.learning_rate)

    def learning_rate(self, step: int, consumed_samples: int) -> float:
        """Learning rate of the next update.

        Args:
            step: finished updates.
            consumed_samples: samples that they took.
        """
        share = self._share(self._position(step, consumed_samples))
        return self._optimizer.learning_rate * share

    def weight_decay(self, step: int, consumed_samples: int) -> float:
        """Weight decay of the next update; `learning_rate` tells the arguments."""
        progress = self._position(step, consumed_samples) / self._length
        return self._optimizer.weight_decay_at(progress)

    def _position(self, step: int, consumed_samples: int) -> int:
        return consumed_samples if self._settings.counts_samples else step

    def _share(self, position: int) -> float:
        """Share of the peak: of a straight line in warm-up, then of the plug-in."""
        warmup, start = self._lengths["warmup"], self._settings.warmup_start_ratio
        if position < warmup:
            return start + (1.0 - start) * (position / warmup)
        share: float = self._factor(position, length=self._length, **self._lengths, **self._options)
        return share
