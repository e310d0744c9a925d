"""Settings of the learning rate over a run: phases in steps, samples, tokens or shares of the run.

`lengths` brings them to one unit, in which lib/tokamake/schedules counts.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokamake.config.batching import BatchSizes
from tokamake.config.fields import Settings, plug_in
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.plugin_settings import fill_in

Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Shape = Literal["1-sqrt", "linear", "cosine", "exponential"]

PHASES = ("warmup", "decay", "cooldown", "annealing")
FORMS = ("steps", "samples", "tokens", "fraction")

_STATES = {f"{phase}_{form}": phase for phase in PHASES for form in FORMS} | {
    "min_ratio": "minimum",
    "min_learning_rate": "minimum",
    **{name: name for name in ("constant_ratio", "cooldown_shape", "annealing_shape")},
}


@dataclass(frozen=True)
class Span:
    """Length of a run, as a schedule needs it."""

    steps: int
    """Optimizer steps of the whole run."""
    sizes: BatchSizes
    """Samples of each step."""
    sequence_length: int
    """Tokens of a sample."""


class ScheduleSettings(Settings):
    """Learning rate over the run, as a share of the peak; of each phase's lengths give one. Empty
    settings are as published, or of no use to this schedule."""

    name: Annotated[str, plug_in("schedules")] = "cosine"
    """A file name in lib/tokamake/schedules."""
    unit: Literal["steps", "samples", "tokens"] | None = None
    """What progress is counted in, which matters while batches grow; empty: samples if a length is
    given in samples or tokens, else steps."""
    warmup_steps: Count | None = None
    """Steps over which the rate rises linearly to its peak."""
    warmup_samples: Count | None = None
    """Samples over which it does."""
    warmup_tokens: Count | None = None
    """Tokens over which it does."""
    warmup_fraction: Fraction | None = None
    """Share of the run over which it does."""
    warmup_start_ratio: Fraction = 0.0
    """Share of the peak that warm-up starts from."""
    decay_steps: Count | None = None
    """Steps from the start of the run until the rate is lowest: cosine, linear."""
    decay_samples: Count | None = None
    """Samples until then."""
    decay_tokens: Count | None = None
    """Tokens until then."""
    decay_fraction: Annotated[float, Field(gt=0)] | None = None
    """Share of the run until then; more than 1 where the run ends before it."""
    cooldown_steps: Count | None = None
    """Steps of the cooldown: the last ones with wsd, those after warm-up with infinite."""
    cooldown_samples: Count | None = None
    """Samples of it."""
    cooldown_tokens: Count | None = None
    """Tokens of it."""
    cooldown_fraction: Fraction | None = None
    """Share of the run that it takes."""
    cooldown_shape: Shape | None = None
    """How the rate falls in it."""
    constant_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the peak between cooldown and annealing: infinite."""
    annealing_steps: Count | None = None
    """Last steps, over which the rate falls to its lowest: infinite."""
    annealing_samples: Count | None = None
    """Samples of it."""
    annealing_tokens: Count | None = None
    """Tokens of it."""
    annealing_fraction: Fraction | None = None
    """Share of the run that it takes."""
    annealing_shape: Shape | None = None
    """How the rate falls in it."""
    min_ratio: Fraction | None = None
    """Share of the peak at the end of the run."""
    min_learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Learning rate at the end of the run, instead of its share."""

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, values: Any) -> Any:
        return fill_in(values, folder="schedules", default="cosine", states=_STATES)

    @property
    def counts_samples(self) -> bool:
        """Whether progress is counted in samples, as tokens are too, rather than in steps."""
        if self.unit is not None:
            return self.unit != "steps"
        return any(self.stated(phase)[0] in ("samples", "tokens") for phase in PHASES)

    def stated(self, phase: str) -> tuple[str, float]:
        """The form in which a phase's length is given, and the length; no form if it has none."""
        for form in FORMS:
            if (value := getattr(self, f"{phase}_{form}")) is not None:
                return form, value
        return "", 0

    def length(self, span: Span) -> int:
        """The whole run in the unit that progress is counted in."""
        return span.sizes.samples(span.steps) if self.counts_samples else span.steps

    def lengths(self, span: Span) -> dict[str, float]:
        """Length of each phase that the schedule has, in that unit.

        Samples that fill no step count for none where progress is counted in steps.
        """
        found = {}
        for phase in PHASES:
            form, value = self.stated(phase)
            if form == "fraction":
                found[phase] = value * self.length(span)
            elif form:
                found[phase] = self._counted(form, value, span)
        return found

    def _counted(self, form: str, value: float, span: Span) -> float:
        if form == "steps":
            return span.sizes.samples(int(value)) if self.counts_samples else value
        samples = value / span.sequence_length if form == "tokens" else value
        return samples if self.counts_samples else span.sizes.whole_steps(int(samples))

    def options(self, peak: float) -> dict[str, Any]:
        """What the schedule uses beside lengths, for a peak learning rate."""
        names = ("min_ratio", "constant_ratio", "cooldown_shape", "annealing_shape")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.min_learning_rate is not None:
            found["min_ratio"] = self.min_learning_rate / peak
        return found


def check_schedule(schedule: ScheduleSettings, optimizer: OptimizerSettings, span: Span) -> None:
    """Make sure that a schedule's phases find room in the run.

    Raises:
        ValueError: they do not, or the schedule does not go with the optimizer.
    """
    if optimizer.name.startswith("schedule_free") and schedule.name != "constant":
        raise ValueError(
            f"schedule.name: {schedule.name}: {optimizer.name} averages weights instead; "
            "set it to constant"
        )
    lowest = schedule.options(optimizer.learning_rate).get("min_ratio", 0.0)
    if lowest > 1:
        raise ValueError(
            f"schedule.min_learning_rate: {schedule.min_learning_rate}: more than "
            f"optimizer.learning_rate {optimizer.learning_rate}; lower it"
        )
    for phase in ("cooldown", "annealing"):
        if getattr(schedule, f"{phase}_shape") == "exponential" and lowest == 0:
            raise ValueError(
                f"schedule.{phase}_shape: exponential: never gets to 0; raise schedule.min_ratio"
            )
    _check_room(schedule, span)


def _check_room(schedule: ScheduleSettings, span: Span) -> None:
    lengths, whole = schedule.lengths(span), schedule.length(span)
    run = f"the run's {whole} samples" if schedule.counts_samples else f"train_steps {whole}"
    said = {
        phase: f"schedule.{phase}_{form}: {value:g}"
        if isinstance(value, float)
        else f"schedule.{phase}_{form}: {value}"
        for phase in lengths
        for form, value in [schedule.stated(phase)]
    }
    if lengths["warmup"] > whole:
        raise ValueError(
            f"{said['warmup']}: more than {run}; the rate would never reach its peak, lower it"
        )
    if lengths.get("decay", whole) < lengths["warmup"]:
        raise ValueError(f"{said['decay']}: ends before {said['warmup']} does; raise it")
    parts = [phase for phase in lengths if phase != "decay"]
    if sum(lengths[phase] for phase in parts) > whole * (1 + 1e-9):
        told = ", ".join(said[phase] for phase in parts)
        raise ValueError(f"{told}: more together than {run}; lower one of them")
