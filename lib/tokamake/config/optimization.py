"""Settings of the optimizer: hyperparameters, and weight decay over a run.

Each optimizer uses only some of them. The constant SETTINGS of its plug-in lists these, with the
values from its publication as defaults; see `plugin_settings`.
"""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from tokamake import plugins
from tokamake.config.fields import plug_in
from tokamake.config.plugin_settings import PlugInSettings

FOLDER = "optim"

Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_FP32_BYTES = 4


class OptimizerFacts(NamedTuple):
    """Facts of an optimizer for callers: literals of its file, in upper case.

    A file states ELEMENTWISE and STATE, and other facts only if they differ from the default.
    """

    elementwise: bool
    """Whether the update of each element depends on that element only. Such optimizers work on any
    parts of the parameters."""
    state: dict[str, str]
    """Tensors of its state by name: "like_parameter" (shape and layout of the parameter) or
    "replicated" (the same on all ranks that hold parts of the parameter)."""
    state_bytes: float = _FP32_BYTES
    """Bytes of an element of a state that is like its parameter."""
    flat_buffers: bool = True
    """Whether parameters and states may be slices of flat buffers, as in DeepSpeed."""
    zero_files: bool = False
    """Whether the states are Adam's, so that files of DeepSpeed's ZeRO and Megatron hold them."""
    averages_weights: bool = False
    """Whether it averages weights, in place of a schedule that lowers the learning rate."""
    extra_pass: bool = False
    """Whether it needs a second pass over the batches of a step; its `prepare` starts it."""
    deterministic: bool = True
    """Whether all its algorithms are deterministic on accelerators, too."""


def optimizer_facts(name: str) -> OptimizerFacts:
    """Facts of an optimizer, read without importing it."""
    facts = {
        field: plugins.constant(
            FOLDER, name, field.upper(), default=OptimizerFacts._field_defaults.get(field)
        )
        for field in OptimizerFacts._fields
    }
    return OptimizerFacts(**facts)


def zero_file_optimizers() -> list[str]:
    """Names of the optimizers whose states DeepSpeed's ZeRO files can hold."""
    return [name for name in plugins.names(FOLDER) if optimizer_facts(name).zero_files]


class OptimizerSettings(PlugInSettings):
    """The optimizer. Empty settings take the published value, or this optimizer does not use them.
    Norms and biases have no weight decay."""

    folder: ClassVar[str] = FOLDER

    name: Annotated[str, plug_in(FOLDER)] = "adamw"
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
    """Learning rate of hidden matrices, relative to learning_rate. For muon."""
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
        value = self.own[name] if name in self.own else getattr(self, name)
        assert value is not None, f"SETTINGS of {self.name} has no {name}"
        return float(value)

    @property
    def facts(self) -> OptimizerFacts:
        return optimizer_facts(self.name)

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
