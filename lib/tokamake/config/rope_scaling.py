"""Settings that stretch rotary positions beyond the sequences of the first training."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokamake.config.fields import Settings

Positive = Annotated[float, Field(gt=0)]
SCALING = {
    "linear": (set(), set()),
    "llama3": ({"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}
"""Settings of each `rope_type` beside its factor: required ones, optional ones."""


class RopeScaling(Settings):
    """Rotary positions stretched beyond the sequences of the first training."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """linear stretches all frequencies (arXiv 2306.15595); llama3 the low ones (arXiv 2407.21783);
    yarn is arXiv 2309.00071."""
    factor: Annotated[float, Field(ge=1)]
    """How many times longer sequences become."""
    original_max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    """llama3 and yarn: longest sequence of the first training."""
    low_freq_factor: Positive | None = None
    """llama3: frequencies with fewer turns in such a sequence are stretched fully."""
    high_freq_factor: Positive | None = None
    """llama3: frequencies with more turns do not change."""
    beta_fast: Positive | None = None
    """yarn: frequencies with more turns do not change; empty: 32."""
    beta_slow: Positive | None = None
    """yarn: frequencies with fewer turns are stretched fully; empty: 1."""
    attention_factor: Positive | None = None
    """yarn: factor of cosines and sines; empty: 0.1 ln factor + 1."""
    mscale: float | None = None
    """yarn: multiplies 0.1 ln factor in that formula."""
    mscale_all_dim: float | None = None
    """yarn: divides the result by the same formula with this value."""
    truncate: bool | None = None
    """yarn: round the bounds of the stretched frequencies to whole pairs; empty: true."""

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
        if required and (self.high_freq_factor or math.inf) <= (self.low_freq_factor or 0.0):
            raise ValueError("high_freq_factor is not greater than low_freq_factor")
        return self
