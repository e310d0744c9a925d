"""Settings of the optimizer and of what changes over a run: learning rate, weight decay."""

from typing import Annotated

from pydantic import Field

from tokamake.config.fields import Settings, plug_in


class OptimizerSettings(Settings):
    """The optimizer; weight decay spares norms and biases."""

    name: Annotated[str, plug_in("optim")] = "adamw"
    """A file name in lib/tokamake/optim."""
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3e-4
    """Peak learning rate, reached after warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean of squared gradients."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay."""


class ScheduleSettings(Settings):
    """Learning rate over the run, as a share of the peak."""

    name: Annotated[str, plug_in("schedules")] = "cosine"
    """A file name in lib/tokamake/schedules."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly from 0 to its peak."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the peak at the end of the run."""
