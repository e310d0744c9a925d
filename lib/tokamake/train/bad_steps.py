"""Steps with bad numbers, and words for the log. `stability/spikes.py` finds them."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

Case = Literal["not_finite", "spike"]
ACTED = ("skip", "rewind", "lower_rate")
"""Actions that use up the budget."""


class BadStep(NamedTuple):
    """A step with bad numbers."""

    case: Case
    action: str
    """Setting of `train.on_bad_step` for this case."""
    reason: str
    """The bad value, such as `loss: nan`."""

    @property
    def updates(self) -> bool:
        """Whether the step updates the weights."""
        return self.action == "journal"


def bad_ranks(values: Sequence[tuple[float, float]]) -> list[int]:
    """Ranks that a bad step comes from, by each rank's loss and squared gradient norm.

    Returns:
        Ranks whose share of the loss is not finite; else ranks whose gradient is not finite;
        else ranks with the largest share of the loss.
    """
    for kind in zip(*values, strict=True):
        if ranks := [rank for rank, value in enumerate(kind) if not math.isfinite(value)]:
            return ranks
    largest = max(loss for loss, _ in values)
    return [rank for rank, (loss, _) in enumerate(values) if loss == largest]


def described(ranks: Sequence[int]) -> str:
    """Ranks as text, with ranges: `ranks 0-3, 7`."""
    breaks = [position for position, (a, b) in enumerate(pairwise(ranks), 1) if b != a + 1]
    runs = [ranks[start:stop] for start, stop in pairwise([0, *breaks, len(ranks)])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"
