"""Dynamic loss scaling: fp16 gradients are kept from vanishing, and steps that overflow skipped.

Micikevicius et al. 2018 (arXiv 1710.03740); the numbers are Megatron's.
"""

import math

from tokamake.errors import UserError

_INITIAL = 2.0**16
_MOST = 2.0**32
_LEAST = 1.0
_NONE = (1.0, 0)
_WINDOW = 1000
"""Good steps in a row after which the scale doubles."""


class LossScale:
    """What the loss is multiplied with; always 1 but in fp16.

    Args:
        precision: of forward and backward passes.
    """

    def __init__(self, precision: str) -> None:
        self._dynamic = precision == "fp16"
        self.value = _INITIAL if self._dynamic else 1.0
        self._good = 0

    @property
    def state(self) -> tuple[float, int]:
        """What a checkpoint keeps."""
        return self.value, self._good

    @state.setter
    def state(self, state: tuple[float, int]) -> None:
        """Take what a checkpoint has kept; of another precision it has none."""
        if self._dynamic and state != _NONE:
            self.value, self._good = state

    def update(self, norm: float) -> bool:
        """Hear the norm of a step's gradient, and say whether it may be taken.

        Raises:
            UserError: not even the least scale keeps gradients finite.
        """
        if not self._dynamic:
            return True
        if math.isfinite(norm):
            self._good += 1
            if self._good == _WINDOW:
                self.value, self._good = min(self.value * 2, _MOST), 0
            return True
        if self.value == _LEAST:
            raise UserError(
                "train.precision: fp16: gradients overflow at a loss scale of 1; lower "
                "train.optimizer.learning_rate or take bf16"
            )
        self.value, self._good = max(self.value / 2, _LEAST), 0
        return False
