"""Settings of the optimizer: its rates, and the weight decay over a run.

An optimizer uses some of them only: its plug-in says which, and with which published values.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokamake.config.fields import Settings, plug_in
from tokamake.config.plugin_settings import fill_in

Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, allow_inf_nan=False)]

SOME = (
    *("weight_decay", "beta1", "beta2", "epsilon", "momentum", "rho", "hessian_interval"),
    *("newton_schulz_steps", "matrix_learning_rate_ratio"),
    *("beta2_decay", "epsilon2", "clip_threshold"),
)
"""Settings that some optimizers use; the constant SETTINGS of their plug-ins names them."""


class OptimizerSettings(Settings):
    """The optimizer; weight decay spares norms and biases. Empty settings are as published, or of
    no use to this optimizer."""

    name: Annotated[str, plug_in("optim")] = "adamw"
    """A file name in lib/tokamake/optim."""
    learning_rate: Positive = 3e-4
    """Peak learning rate, reached after warm-up."""
    beta1: Share | None = None
    """Decay of the mean of gradients."""
    beta2: Share | None = None
    """Decay of the mean of squared gradients; of Hessians with sophia_g."""
    epsilon: Positive | None = None
    """Added to the root of the second moment, or its least value."""
    momentum: Share | None = None
    """Decay of the sum of gradients: sgd, muon."""
    rho: Positive | None = None
    """Share of the Hessian that a gradient is divided by: sophia_g, whose paper calls it gamma."""
    hessian_interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between estimates of the Hessian: sophia_g."""
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100)] | None = None
    """Iterations that make an update orthogonal: muon."""
    matrix_learning_rate_ratio: Positive | None = None
    """Learning rate of hidden matrices as a share of that of other parameters: muon."""
    beta2_decay: Annotated[float, Field(lt=0, allow_inf_nan=False)] | None = None
    """Power of the step that the newest gradient counts by: adafactor."""
    epsilon2: Positive | None = None
    """Least root mean square of a parameter that its update is scaled by: adafactor."""
    clip_threshold: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Largest root mean square of an update: adafactor."""
    weight_decay: Decay | None = None
    """Weight decay: decoupled from the gradient, but for sgd and adam."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from its start to its end over the run."""
    start_weight_decay: Decay | None = None
    """Weight decay of the first step; empty: `weight_decay`."""
    end_weight_decay: Decay | None = None
    """Weight decay at the end of the run, where it is not constant."""

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, values: Any) -> Any:
        return fill_in(
            values, folder="optim", default="adamw", states={name: name for name in SOME}
        )

    @model_validator(mode="after")
    def _known_ends(self) -> "OptimizerSettings":
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
        """A setting that this optimizer uses."""
        value = getattr(self, name)
        assert value is not None, f"{self.name} states no {name} in its SETTINGS"
        return float(value)

    @property
    def betas(self) -> tuple[float, float]:
        """Decays of the first and the second moment."""
        return self.used("beta1"), self.used("beta2")

    def weight_decay_at(self, progress: float) -> float:
        """Weight decay once a share of the run, 0 to 1, is done.

        Linear, or half a cosine wave, as Megatron's --weight-decay-incr-style.
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
