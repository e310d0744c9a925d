"""Number of samples of each training step, with an optional ramp-up at the beginning of a run.

It depends only on the samples consumed so far, so a resumed run continues with the same sizes.
"""

import bisect
import functools
from dataclasses import dataclass

from tokamake.errors import UserError


@dataclass(frozen=True)
class Rampup:
    """Growth of the global batch in equal steps, as Megatron's --rampup-batch-size."""

    start: int
    """Samples of the first global batches."""
    increment: int
    """Samples by which the global batch grows at a time."""
    samples: int
    """Consumed samples after which the global batch has its full size."""


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of the global batches of a run."""

    global_batch_size: int
    """Samples of a step after the ramp-up."""
    rampup: Rampup | None = None
    """None: full size from the first step."""
    first_step: int = 0
    """First step with these sizes; earlier steps had other sizes."""
    first_sample: int = 0
    """Samples that the steps before `first_step` consumed."""

    def __post_init__(self) -> None:
        ramp, full = self.rampup, self.global_batch_size
        if full < 1:
            raise UserError(f"global_batch_size: {full}: give 1 or more")
        if ramp is None:
            return
        if ramp.increment < 1 or ramp.samples < 0 or not 0 < ramp.start <= full:
            raise UserError(
                f"rampup_batch_size: {ramp.start} {ramp.increment} {ramp.samples}: give a start up "
                f"to global_batch_size {full}, an increment of 1 or more and samples"
            )
        if (full - ramp.start) % ramp.increment:
            raise UserError(
                f"rampup_batch_size: from {ramp.start} by {ramp.increment} it never reaches "
                f"global_batch_size {full}; give an increment that divides {full - ramp.start}"
            )

    def at(self, consumed_samples: int) -> int:
        """Samples of the step that begins after `consumed_samples`."""
        ramp = self.rampup
        if ramp is None or ramp.start == self.global_batch_size or consumed_samples > ramp.samples:
            return self.global_batch_size
        if not ramp.samples:
            return self.global_batch_size
        increments = (self.global_batch_size - ramp.start) // ramp.increment
        # Megatron divides in floating point. Integers would round differently at some bounds.
        num_increments = int(consumed_samples / (ramp.samples / increments))
        return min(ramp.start + num_increments * ramp.increment, self.global_batch_size)

    @functools.cached_property
    def _starts(self) -> list[int]:
        """First sample of each step of the ramp-up, and of the first step of full size."""
        starts = [self.first_sample]
        while self.rampup and starts[-1] <= self.rampup.samples:
            if (size := self.at(starts[-1])) == self.global_batch_size:
                break
            starts.append(starts[-1] + size)
        return starts

    def samples(self, steps: int) -> int:
        """Total samples of the first `steps` steps, `first_step` or more."""
        ramp_steps, steps = len(self._starts) - 1, steps - self.first_step
        if steps <= ramp_steps:
            return self._starts[steps]
        return self._starts[-1] + (steps - ramp_steps) * self.global_batch_size

    def whole_steps(self, samples: int) -> int:
        """Number of complete steps in `samples` samples, `first_sample` or more."""
        ramp_steps = len(self._starts) - 1
        if samples < self._starts[-1]:
            return self.first_step + bisect.bisect_right(self._starts, samples) - 1
        return self.first_step + ramp_steps + (samples - self._starts[-1]) // self.global_batch_size

    def step_and_row(self, sample: int) -> tuple[int, int]:
        """Step (from 0) of a sample, and its row in the global batch of that step."""
        step = self.whole_steps(sample)
        return step, sample - self.samples(step)

    @property
    def all(self) -> list[int]:
        """All sizes of steps, ascending."""
        ramp, full = self.rampup, self.global_batch_size
        return [*(range(ramp.start, full, ramp.increment) if ramp else ()), full]

    def num_micro_batches(
        self, micro_batch_size: int, data_parallel_size: int, *, size: int | None = None
    ) -> int:
        """Micro batches of each rank in a step of `size` samples; None: in a step of full size."""
        return (size or self.global_batch_size) // (micro_batch_size * data_parallel_size)

    def check_micro_batches(self, micro_batch_size: int, data_parallel_size: int) -> None:
        """Check that each rank gets whole micro batches in every step."""
        divisor = micro_batch_size * data_parallel_size
        for size in self.all:
            if size % divisor:
                raise UserError(
                    f"global_batch_size: {size} samples cannot be shared by "
                    f"{data_parallel_size} data-parallel ranks in micro batches of "
                    f"{micro_batch_size}; make it a multiple of {divisor}"
                )
