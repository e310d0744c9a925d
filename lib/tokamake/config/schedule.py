"""Settings of the learning rate schedule: lengths of its phases and shape of their curves.

A length is in steps, samples, tokens, or a fraction of the run. `lengths` converts all of them to
the unit in which lib/tokamake/schedules counts progress.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tokamake.config.batching import BatchSizes
from tokamake.config.fields import plug_in
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.plugin_settings import PlugInSettings

Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Shape = Literal["1-sqrt", "linear", "cosine", "exponential"]

PHASES = ("warmup", "decay", "cooldown", "annealing")
FORMS = ("steps", "samples", "tokens", "fraction")

_QUANTITIES = {f"{phase}_{form}": phase for phase in PHASES for form in FORMS} | {
    "min_ratio": "minimum",
    "min_learning_rate": "minimum",
    **{name: name for name in ("constant_ratio", "cooldown_shape", "annealing_shape")},
}
"""Setting → quantity that it sets. Settings of the same quantity exclude each other."""


@dataclass(frozen=True)
class Span:
    """Length of a run in all units."""

    steps: int
    """Optimizer steps of the whole run."""
    sizes: BatchSizes
    """Samples of each step."""
    sequence_length: int
    """Tokens of a sample."""


class ScheduleSettings(PlugInSettings):
    """Learning rate schedule. Give the length of a phase in one unit only. Empty settings take the
    published value, or this schedule does not use them."""

    folder: ClassVar[str] = "schedules"
    quantities: ClassVar[dict[str, str]] = _QUANTITIES

    name: Annotated[str, plug_in("schedules")] = "cosine"
    """Name of a file in lib/tokamake/schedules."""
    unit: Literal["steps", "samples", "tokens"] | None = None
    """Unit of progress. It matters only with rampup_batch_size. Empty: samples if the length of a
    phase is in samples or tokens, else steps."""
    warmup_steps: Count | None = None
    """Length of the warm-up in steps. The learning rate rises linearly to its peak."""
    warmup_samples: Count | None = None
    """Length of the warm-up in samples."""
    warmup_tokens: Count | None = None
    """Length of the warm-up in tokens."""
    warmup_fraction: Fraction | None = None
    """Length of the warm-up as a share of the run."""
    warmup_start_ratio: Fraction = 0.0
    """Learning rate at the start of the warm-up, as a share of the peak."""
    decay_steps: Count | None = None
    """Steps from the start of the run to the minimum learning rate. For cosine and linear."""
    decay_samples: Count | None = None
    """Samples from the start of the run to the minimum learning rate."""
    decay_tokens: Count | None = None
    """Tokens from the start of the run to the minimum learning rate."""
    decay_fraction: Annotated[float, Field(gt=0)] | None = None
    """Share of the run from its start to the minimum learning rate. With more than 1, the run ends
    before the minimum."""
    cooldown_steps: Count | None = None
    """Length of the cooldown in steps. It is at the end of the run with wsd, and after the warm-up
    with infinite."""
    cooldown_samples: Count | None = None
    """Length of the cooldown in samples."""
    cooldown_tokens: Count | None = None
    """Length of the cooldown in tokens."""
    cooldown_fraction: Fraction | None = None
    """Length of the cooldown as a share of the run."""
    cooldown_shape: Shape | None = None
    """Curve of the learning rate in the cooldown."""
    constant_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Learning rate between cooldown and annealing, as a share of the peak. For infinite."""
    annealing_steps: Count | None = None
    """Length in steps of the annealing at the end of the run. The learning rate falls to its
    minimum. For infinite."""
    annealing_samples: Count | None = None
    """Length of the annealing in samples."""
    annealing_tokens: Count | None = None
    """Length of the annealing in tokens."""
    annealing_fraction: Fraction | None = None
    """Length of the annealing as a share of the run."""
    annealing_shape: Shape | None = None
    """Curve of the learning rate in the annealing."""
    min_ratio: Fraction | None = None
    """Minimum learning rate, as a share of the peak."""
    min_learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Minimum learning rate. Excludes min_ratio."""

    @property
    def counts_samples(self) -> bool:
        """Whether the unit of progress is samples (also for tokens) instead of steps."""
        if self.unit is not None:
            return self.unit != "steps"
        return any(self.phase_length(phase)[0] in ("samples", "tokens") for phase in PHASES)

    def phase_length(self, phase: str) -> tuple[str, float]:
        """Form (one of FORMS) and value of the length of a phase; "" and 0 without a length."""
        for form in FORMS:
            if (value := getattr(self, f"{phase}_{form}")) is not None:
                return form, value
        return "", 0

    def length(self, span: Span) -> int:
        """Length of the whole run in the unit of progress."""
        return span.sizes.samples(span.steps) if self.counts_samples else span.steps

    def lengths(self, span: Span) -> dict[str, float]:
        """Length of each phase of the schedule in the unit of progress.

        Conversion to steps rounds down.
        """
        lengths = {}
        for phase in PHASES:
            form, value = self.phase_length(phase)
            if form == "fraction":
                lengths[phase] = value * self.length(span)
            elif form:
                lengths[phase] = self._convert(form, value, span=span)
        return lengths

    def _convert(self, form: str, value: float, *, span: Span) -> float:
        if form == "steps":
            return span.sizes.samples(int(value)) if self.counts_samples else value
        samples = value / span.sequence_length if form == "tokens" else value
        return samples if self.counts_samples else span.sizes.whole_steps(int(samples))

    def options(self, peak: float) -> dict[str, Any]:
        """Options of the schedule besides lengths. Rates are shares of `peak`."""
        names = ("min_ratio", "constant_ratio", "cooldown_shape", "annealing_shape")
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.min_learning_rate is not None:
            options["min_ratio"] = self.min_learning_rate / peak
        return options | self.own


def check_schedule(schedule: ScheduleSettings, optimizer: OptimizerSettings, *, span: Span) -> None:
    """Check that the phases of a schedule fit into the run."""
    if optimizer.facts.averages_weights and schedule.name != "constant":
        raise ValueError(
            f"schedule.name: {schedule.name}: {optimizer.name} averages weights instead; "
            "set it to constant"
        )
    min_ratio = schedule.options(optimizer.learning_rate).get("min_ratio", 0.0)
    if min_ratio > 1:
        raise ValueError(
            f"schedule.min_learning_rate: {schedule.min_learning_rate}: more than "
            f"optimizer.learning_rate {optimizer.learning_rate}; lower it"
        )
    for phase in ("cooldown", "annealing"):
        if getattr(schedule, f"{phase}_shape") == "exponential" and min_ratio == 0:
            raise ValueError(
                f"schedule.{phase}_shape: exponential: never reaches 0; raise schedule.min_ratio"
            )
    _check_lengths(schedule, span)


def unfinished_warmup(schedule: ScheduleSettings, span: Span) -> str:
    """Note about a warm-up that is longer than the run, as in a try-out; empty: it is not."""
    if schedule.lengths(span)["warmup"] <= schedule.length(span):
        return ""
    form, value = schedule.phase_length("warmup")
    return (
        f"train.schedule.warmup_{form}: {value}: more than {_length_of_run(schedule, span)}; the "
        "learning rate does not reach its peak"
    )


def _length_of_run(schedule: ScheduleSettings, span: Span) -> str:
    total = schedule.length(span)
    return f"the run's {total} samples" if schedule.counts_samples else f"train_steps {total}"


def _check_lengths(schedule: ScheduleSettings, span: Span) -> None:
    lengths, total = schedule.lengths(span), schedule.length(span)
    settings = {
        phase: f"schedule.{phase}_{form}: {value:g}"
        if isinstance(value, float)
        else f"schedule.{phase}_{form}: {value}"
        for phase in lengths
        for form, value in [schedule.phase_length(phase)]
    }
    if lengths["warmup"] > total:  # a try-out of the first steps; no other phase begins
        return
    if lengths.get("decay", total) < lengths["warmup"]:
        raise ValueError(f"{settings['decay']}: ends before {settings['warmup']}; raise it")
    # Decay counts from the start of the run, so it overlaps the other phases.
    phases = [phase for phase in lengths if phase != "decay"]
    if sum(lengths[phase] for phase in phases) > total * (1 + 1e-9):
        names = ", ".join(settings[phase] for phase in phases)
        raise ValueError(
            f"{names}: their sum is more than {_length_of_run(schedule, span)}; lower one of them"
        )
