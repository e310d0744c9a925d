"""Settings that stretch rotary positions beyond the sequences of the first training."""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from tokamake.config.fields import Settings

Positive = Annotated[float, Field(gt=0)]
SCALING = {
    "linear": (set(), set()),
    "dynamic": (set(), set()),
    "llama3": ({"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        {"original_max_position_embeddings", "short_factor", "long_factor"},
        {"attention_factor"},
    ),
}
"""Settings of each `rope_type` beside its factor: required ones, optional ones."""


class RopeScaling(Settings):
    """Rotary positions stretched beyond the sequences of the first training."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """linear stretches all frequencies (arXiv 2306.15595); llama3 the low ones (arXiv 2407.21783);
    yarn is arXiv 2309.00071; longrope (arXiv 2402.13753) stretches each by its own factor. dynamic
    stretches nothing up to max_position_embeddings; here no sequence is longer."""
    factor: Annotated[float, Field(ge=1)]
    """How many times longer sequences become."""
    original_max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    """llama3, yarn and longrope: longest sequence of the first training."""
    low_freq_factor: Positive | None = None
    """llama3: frequencies with fewer turns in such a sequence are stretched fully."""
    high_freq_factor: Positive | None = None
    """llama3: frequencies with more turns do not change."""
    beta_fast: Positive | None = None
    """yarn: frequencies with more turns do not change; empty: 32."""
    beta_slow: Positive | None = None
    """yarn: frequencies with fewer turns are stretched fully; empty: 1."""
    attention_factor: Positive | None = None
    """yarn and longrope: factor of cosines and sines; empty: 0.1 ln factor + 1, for longrope
    √(1 + ln factor / ln original_max_position_embeddings)."""
    mscale: float | None = None
    """yarn: multiplies 0.1 ln factor in that formula."""
    mscale_all_dim: float | None = None
    """yarn: divides the result by the same formula with this value."""
    truncate: bool | None = None
    """yarn: round the bounds of the stretched frequencies to whole pairs; empty: true."""

    short_factor: tuple[Positive, ...] | None = None
    """longrope: divisor of each frequency, for rows no longer than the first training's."""
    long_factor: tuple[Positive, ...] | None = None
    """longrope: divisor of each frequency, for longer rows."""

    @model_serializer(mode="wrap")
    def _without_later_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Digests of runs from before there were these fields must stay.
        values: dict[str, Any] = handler(self)
        later = ("short_factor", "long_factor")
        return {key: value for key, value in values.items() if key not in later or value}

    @model_validator(mode="after")
    def _fit_type(self) -> "RopeScaling":
        required, optional = SCALING[self.rope_type]
        keys = self.model_dump(exclude_none=True).keys() - {"rope_type", "factor"}
        if missing := sorted(required - keys):
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}; add it")
        if useless := sorted(keys - required - optional):
            raise ValueError(
                f"rope_type {self.rope_type} does not use {', '.join(useless)}; leave it out"
            )
        if self.rope_type == "llama3" and (self.high_freq_factor or math.inf) <= (
            self.low_freq_factor or 0.0
        ):
            raise ValueError("high_freq_factor is not greater than low_freq_factor")
        return self


def check_rotary_positions(
    scaling: RopeScaling | None, *, head_dim: int, share: float, width: int
) -> None:
    """Raise ValueError unless heads have pairs to rotate, and factors for each of them.

    Args:
        share: share of a head's width that rotates, which gives the `width`.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary needs pairs")
    if not 2 <= width <= head_dim or width % 2:
        raise ValueError(
            f"partial_rotary_factor: {share}: {width} numbers of heads of width {head_dim} would "
            "rotate; give a share that rotates an even number"
        )
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name, None)
        if factors is not None and len(factors) != width // 2:
            raise ValueError(
                f"rope_scaling.{name}: {len(factors)} numbers: heads have {width // 2} "
                "frequencies; give as many numbers"
            )
