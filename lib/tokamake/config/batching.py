"""How many samples a training step takes, which may grow at the beginning of a run.

A function of the samples consumed so far alone, so that a run goes on in the same way after a stop.
"""

import bisect
import functools
from dataclasses import dataclass

from tokamake.errors import UserError


@dataclass(frozen=True)
class Rampup:
    """A batch that grows in equal steps, as Megatron's --rampup-batch-size has it."""

    start: int
    """Samples of the first batches."""
    increment: int
    """Samples by which it grows."""
    samples: int
    """Samples within which it grows to its full size."""


@dataclass(frozen=True)
class BatchSizes:
    """Samples of each step.

    Raises:
        UserError: the ramp-up does not end at `global_batch_size`.
    """

    global_batch_size: int
    """Samples of a step once it has its full size."""
    rampup: Rampup | None = None
    """How it gets there; None: it has it at once."""

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
                f"rampup_batch_size: from {ramp.start} by {ramp.increment} it never gets to "
                f"global_batch_size {full}; give an increment that divides {full - ramp.start}"
            )

    def at(self, consumed_samples: int) -> int:
        """Samples of the step that begins after so many."""
        ramp = self.rampup
        if ramp is None or ramp.start == self.global_batch_size or consumed_samples > ramp.samples:
            return self.global_batch_size
        if not ramp.samples:
            return self.global_batch_size
        increments = (self.global_batch_size - ramp.start) // ramp.increment
        # In floating point, as Megatron does, which may round to the other side of a bound.
        grown = int(consumed_samples / (ramp.samples / increments))
        return min(ramp.start + grown * ramp.increment, self.global_batch_size)

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Samples before each step of the ramp-up, and before the first step of full size."""
        starts = [0]
        while self.rampup and starts[-1] <= self.rampup.samples:
            if (size := self.at(starts[-1])) == self.global_batch_size:
                break
            starts.append(starts[-1] + size)
        return starts

    def samples(self, steps: int) -> int:
        """Samples of the first so many steps."""
        ramped = len(self._starts) - 1
        if steps <= ramped:
            return self._starts[steps]
        return self._starts[-1] + (steps - ramped) * self.global_batch_size

    def whole_steps(self, samples: int) -> int:
        """Steps that so many samples fill."""
        ramped = len(self._starts) - 1
        if samples < self._starts[-1]:
            return bisect.bisect_right(self._starts, samples) - 1
        return ramped + (samples - self._starts[-1]) // self.global_batch_size

    def place(self, sample: int) -> tuple[int, int]:
        """Step, from 0, and row in its global batch, of a sample."""
        step = self.whole_steps(sample)
        return step, sample - self.samples(step)

    @property
    def all(self) -> list[int]:
        """Every size that a step may have, ascending."""
        ramp, full = self.rampup, self.global_batch_size
        return [*(range(ramp.start, full, ramp.increment) if ramp else ()), full]

    def check(self, micro_batch_size: int, data_parallel_size: int) -> None:
        """Make sure that all ranks have whole micro batches in every step.

        Raises:
            UserError: in some step they would not.
        """
        block = micro_batch_size * data_parallel_size
        for size in self.all:
            if size % block:
                raise UserError(
                    f"global_batch_size: {size} samples cannot be shared by {data_parallel_size} "
                    f"data-parallel ranks in micro batches of {micro_batch_size}; make it a "
                    f"multiple of {block}"
                )
