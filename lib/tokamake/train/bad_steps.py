"""Steps with bad numbers: the state that a run keeps of them, and words for its log.

`stability/spikes.py` judges a step.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

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


class GuardState(NamedTuple):
    """State of the guard that a checkpoint keeps."""

    recent: tuple[tuple[float, float], ...] = ()
    """Loss and gradient norm of the last good steps."""
    rate_factor: float = 1.0
    """Factor of the learning rate."""
    skipped: tuple[int, ...] = ()
    """Steps without an update besides those of `train.skip_data`; rewound ones may lie ahead."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "GuardState":
        """Read what `to_json` returned."""
        recent = tuple(zip(value["losses"], value["grad_norms"], strict=True))
        return cls(recent, float(value["rate_factor"]), tuple(value["skipped"]))

    def to_json(self) -> dict[str, Any]:
        """The state for state.json."""
        losses, norms = zip(*self.recent, strict=True) if self.recent else ((), ())
        return {
            "losses": losses,
            "grad_norms": norms,
            "rate_factor": self.rate_factor,
            "skipped": self.skipped,
        }

    def effect(self, step: int) -> dict[str, Any]:
        """Changes of the weights by bad steps up to a step; empty if there are none."""
        skipped = [number for number in self.skipped if number <= step]
        changed = skipped or self.rate_factor != 1.0
        return {"skipped": skipped, "rate_factor": self.rate_factor} if changed else {}

    def until(self, step: int) -> "GuardState":
        """The state without skipped steps that lie ahead: the journal knows them, too."""
        return self._replace(skipped=tuple(number for number in self.skipped if number <= step))

    def after_good(self, loss: float, grad_norm: float, *, window: int) -> "GuardState":
        """The state after a step that updated the weights."""
        return self._replace(recent=(*self.recent, (loss, grad_norm))[-window:])

    def after_skip(self, *steps: int) -> "GuardState":
        """The state with more skipped steps, past or future."""
        return self._replace(skipped=tuple(sorted({*self.skipped, *steps})))


def ranges_without_effect(ranges: Sequence[tuple[int, int]], step: int) -> str | None:
    """Name ranges of `train.skip_data` before the position of a run; None: there are none."""
    before = [
        f"{first} to {last}" if first < last else str(first)
        for first, last in ranges
        if last <= step
    ]
    if not before:
        return None
    return f"no effect on steps {', '.join(before)}: training is already at step {step:,}"


def bad_ranks(values: Sequence[tuple[float, float]]) -> list[int]:
    """Ranks that a bad step comes from, by each rank's loss and squared gradient norm.

    Returns:
        Ranks whose share of the loss is not finite; if there are none, those of the gradient; if
        there are none, ranks with the largest share of the loss.
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
