"""Loss scaling: keeps small gradients from vanishing in fp16, and skips overflows.

Micikevicius et al. 2018 (arXiv 1710.03740). The rules follow Megatron's DynamicGradScaler.
DeepSpeed's own scaler, which is not used, doubles its scale a step later.
"""

import math

from tokamake.config.train_sections import LossScalingSettings

_MAX = 2.0**32
_UNSCALED = (1.0, 0)
"""State of other precisions."""


class LossScale:
    """Factor of the loss; always 1 in other precisions than fp16.

    Attributes:
        value: the factor.
        num_tolerated: overflows since the scale has doubled that did not halve it.
    """

    def __init__(self, precision: str, settings: LossScalingSettings) -> None:
        self._scaled, self._settings = precision == "fp16", settings
        self.value = settings.initial_scale if self._scaled else 1.0
        self.num_tolerated = 0
        self._finite_steps = 0

    @property
    def state(self) -> tuple[float, int]:
        """The factor and the finite steps since it changed, which a checkpoint keeps."""
        return self.value, self._finite_steps

    @state.setter
    def state(self, state: tuple[float, int]) -> None:
        # A checkpoint of another precision has no scale: begin with the initial one.
        if self._scaled and not self._settings.static and state != _UNSCALED:
            self.value, self._finite_steps = state

    def overflowed(self, norm: float) -> bool:
        """Adapt the scale to the norm of a step's gradient.

        Returns:
            Whether the gradient overflowed because of the scale, so that its step is skipped. False
            for an overflow at the lowest scale: the gradient itself is not finite.
        """
        if not self._scaled:
            return False
        if self._settings.static:
            return not math.isfinite(norm)
        if math.isfinite(norm):
            self._count_finite()
            return False
        self._finite_steps = 0
        if self.num_tolerated < self._settings.hysteresis - 1:
            self.num_tolerated += 1
            return True
        if self.value <= self._settings.min_scale:
            return False
        self.value = max(self.value / 2, self._settings.min_scale)
        return True

    def _count_finite(self) -> None:
        self._finite_steps += 1
        if self._finite_steps >= self._settings.window:
            self.value, self._finite_steps = min(self.value * 2, _MAX), 0
            self.num_tolerated = 0
