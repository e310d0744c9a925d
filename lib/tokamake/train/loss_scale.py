"""Dynamic loss scaling: keeps small gradients from vanishing in fp16, and skips overflows.

Micikevicius et al. 2018 (arXiv 1710.03740); the constants are Megatron's.
"""

import math

from tokamake.errors import UserError

_INITIAL = 2.0**16
_MAX = 2.0**32
_MIN = 1.0
_UNSCALED = (1.0, 0)
"""State of other precisions."""
_WINDOW = 1000
"""Finite steps in a row after which the scale doubles."""


class LossScale:
    """Factor of the loss; always 1 in other precisions than fp16.

    Args:
        precision: precision of forward and backward passes.
    """

    def __init__(self, precision: str) -> None:
        self._dynamic = precision == "fp16"
        self.value = _INITIAL if self._dynamic else 1.0
        self._finite_steps = 0

    @property
    def state(self) -> tuple[float, int]:
        """Values that a checkpoint keeps."""
        return self.value, self._finite_steps

    @state.setter
    def state(self, state: tuple[float, int]) -> None:
        # A checkpoint of another precision has no scale: begin with the initial one.
        if self._dynamic and state != _UNSCALED:
            self.value, self._finite_steps = state

    def update(self, norm: float) -> bool:
        """Adapt the scale to the norm of a step's gradient; return whether to do the update.

        Raises:
            UserError: gradients overflow even at the lowest scale.
        """
        if not self._dynamic:
            return True
        if math.isfinite(norm):
            self._finite_steps += 1
            if self._finite_steps == _WINDOW:
                self.value, self._finite_steps = min(self.value * 2, _MAX), 0
            return True
        if self.value == _MIN:
            raise UserError(
                "train.precision: fp16: gradients overflow at a loss scale of 1; lower "
                "train.optimizer.learning_rate or take bf16"
            )
        self.value, self._finite_steps = max(self.value / 2, _MIN), 0
        return False
