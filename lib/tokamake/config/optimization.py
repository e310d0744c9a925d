"""Settings of the optimizer: hyperparameters, and weight decay over a run.

Each optimizer uses only some of them. The constant SETTINGS of its plug-in lists these, with the
values from its publication as defaults.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokamake.config.fields import Settings, plug_in
from tokamake.config.plugin_settings import add_published_values

Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, allow_inf_nan=False)]

OPTIONAL = (
    *("weight_decay", "beta1", "beta2", "epsilon", "momentum", "rho", "hessian_interval"),
    *("newton_schulz_steps", "matrix_learning_rate_ratio"),
    *("beta2_decay", "epsilon2", "clip_threshold"),
)
"""Settings that only some optimizers use."""


class OptimizerSettings(Settings):
    """The optimizer. Empty settings take the published value, or this optimizer does not use them.
    Norms and biases have no weight decay."""

    name: Annotated[str, plug_in("optim")] = "adamw"
    """Name of a file in lib/tokamake/optim."""
    learning_rate: Positive = 3e-4
    """Peak learning rate, reached after warm-up."""
    beta1: Share | None = None
    """Decay rate of the moving average of gradients (first moment)."""
    beta2: Share | None = None
    """Decay rate of the moving average of squared gradients (second moment); with sophia_g, of the
    Hessian."""
    epsilon: Positive | None = None
    """Small number that prevents division by zero: added to the root of the second moment, or the
    minimum of the second moment."""
    momentum: Share | None = None
    """Decay rate of the sum of gradients. For sgd and muon."""
    rho: Positive | None = None
    """Factor of the Hessian in the denominator of an update; gamma in the paper. For sophia_g."""
    hessian_interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between estimates of the Hessian. For sophia_g."""
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100)] | None = None
    """Newton-Schulz iterations that orthogonalize an update. For muon."""
    matrix_learning_rate_ratio: Positive | None = None
    """Learning rate of hidden matrices, relative to that of the other parameters. For muon."""
    beta2_decay: Annotated[float, Field(lt=0, allow_inf_nan=False)] | None = None
    """Exponent d in the weight of the newest squared gradient, step ** d. For adafactor."""
    epsilon2: Positive | None = None
    """Minimum of the root mean square of a parameter, which scales its update. For adafactor."""
    clip_threshold: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Maximum root mean square of an update. For adafactor."""
    weight_decay: Decay | None = None
    """Weight decay, decoupled from the gradient except in sgd and adam."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Change of weight decay from its start to its end value over the run."""
    start_weight_decay: Decay | None = None
    """Weight decay of the first step. Empty: the value of weight_decay."""
    end_weight_decay: Decay | None = None
    """Weight decay at the end of the run. Required unless weight_decay_schedule is constant."""

    @model_validator(mode="before")
    @classmethod
    def _add_published_values(cls, values: Any) -> Any:
        return add_published_values(
            values, folder="optim", default="adamw", quantities={name: name for name in OPTIONAL}
        )

    @model_validator(mode="after")
    def _check_weight_decay_schedule(self) -> "OptimizerSettings":
        if self.weight_decay_schedule != "constant":
            if self.end_weight_decay is None:
                raise ValueError(
                    f"weight_decay_schedule: {self.weight_decay_schedule}: give end_weight_decay"
                )
            return self
        for name in ("start_weight_decay", "end_weight_decay"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}: {value}: set weight_decay_schedule to linear or cosine")
        return self

    def used(self, name: str) -> float:
        """Value of a setting that this optimizer uses."""
        value = getattr(self, name)
        assert value is not None, f"SETTINGS of {self.name} has no {name}"
        return float(value)

    @property
    def betas(self) -> tuple[float, float]:
        """Decay rates of the first and the second moment."""
        return self.used("beta1"), self.used("beta2")

    def weight_decay_at(self, progress: float) -> float:
        """Weight decay at `progress`, the completed share of the run from 0 to 1.

        Constant, linear, or half a cosine wave, as Megatron's --weight-decay-incr-style.
        """
        end, start = self.end_weight_decay, self.start_weight_decay
        if start is None:
            start = self.used("weight_decay")
        if end is None:
            return start
        progress = min(1.0, progress)
        if self.weight_decay_schedule == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return start + progress * (end - start)
