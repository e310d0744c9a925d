"""Compare learning-rate schedules with those of transformers and Megatron, and with formulas."""

import inspect
import math
from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from tokamake import plugins
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.schedule import ScheduleSettings
from tokamake.config.training import TrainSettings
from tokamake.schedules._schedule import Schedule

WARMUP, STEPS = 7, 40


def rates(make: Any, steps: int = STEPS + 5, **arguments: Any) -> list[float]:
    """Rates of a schedule of transformers with a peak of 1, also after the end of the run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, num_warmup_steps=WARMUP, **arguments)
    shares = []
    for _ in range(steps):
        shares.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return shares


def schedule(steps: int = STEPS, *, optimizer: dict | None = None, **values: Any) -> Schedule:
    """A schedule with a peak of 1; batches of 4 samples of 16 tokens."""
    train = TrainSettings(
        train_steps=steps,
        global_batch_size=4,
        sequence_length=16,
        optimizer=OptimizerSettings(**{"learning_rate": 1.0, **(optimizer or {})}),
        schedule=ScheduleSettings(**values),
    )
    return Schedule(train)


def ours(name: str, steps: int = STEPS, **values: Any) -> list[float]:
    built = schedule(steps, name=name, **{"warmup_steps": WARMUP, **values})
    return [built.learning_rate(step, 4 * step) for step in range(steps + 5)]


@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
def test_cosine_equals_transformers(min_ratio: float) -> None:
    theirs = rates(
        get_cosine_with_min_lr_schedule_with_warmup,
        num_training_steps=STEPS,
        min_lr_rate=min_ratio,
    )
    # After the end, theirs rises again; ours stays constant.
    shares = ours("cosine", min_ratio=min_ratio)
    assert shares[: STEPS + 1] == pytest.approx(theirs[: STEPS + 1])
    assert shares[STEPS:] == pytest.approx([min_ratio] * 5)


def test_cosine_never_changes_by_a_bit() -> None:
    """Runs of the first versions, whose schedules had no lengths of phases, must continue."""
    built = schedule(warmup_steps=WARMUP, optimizer={"learning_rate": 3e-4})
    for step in range(STEPS):
        if step < WARMUP:
            share = step / WARMUP
        else:
            progress = min(1.0, (step - WARMUP) / max(1, STEPS - WARMUP))
            share = 0.1 + (1.0 - 0.1) * 0.5 * (1.0 + math.cos(math.pi * progress))
        assert built.learning_rate(step, 4 * step) == 3e-4 * share
        assert built.weight_decay(step, 4 * step) == 0.1


def test_linear_equals_transformers() -> None:
    theirs = rates(get_linear_schedule_with_warmup, num_training_steps=STEPS)
    assert ours("linear", min_ratio=0.0) == pytest.approx(theirs)


def test_linear_ends_at_the_minimum() -> None:
    shares = ours("linear", min_ratio=0.2)
    assert shares[WARMUP] == 1.0
    assert shares[(WARMUP + STEPS) // 2] == pytest.approx(1 - 0.8 * 16 / 33)
    assert shares[STEPS:] == pytest.approx([0.2] * 5)


def test_constant_equals_transformers() -> None:
    assert ours("constant") == pytest.approx(rates(get_constant_schedule_with_warmup))


def test_decay_may_end_before_the_run_or_after() -> None:
    early = ours("cosine", decay_steps=20)
    assert early[:20] == ours("cosine", 20)[:20]
    assert early[20:] == pytest.approx([0.1] * 25)
    assert ours("cosine", decay_fraction=2.0)[:STEPS] == ours("cosine", 2 * STEPS)[:STEPS]


@pytest.mark.parametrize("shape", ["1-sqrt", "linear", "cosine"])
def test_wsd_equals_transformers(shape: str) -> None:
    theirs = rates(
        get_wsd_schedule,
        num_decay_steps=10,
        num_training_steps=STEPS,
        decay_type=shape,
        min_lr_ratio=0.2,
    )
    # Theirs starts warm-up at the minimum.
    values = {"cooldown_shape": shape, "min_ratio": 0.2, "warmup_start_ratio": 0.2}
    shares = ours("wsd", cooldown_steps=10, **values)
    assert shares == pytest.approx(theirs)


def test_wsd_cools_down_by_a_root_to_zero() -> None:
    shares = ours("wsd")
    assert shares[WARMUP:33] == [1.0] * (33 - WARMUP)
    assert shares[34] == pytest.approx(1 - math.sqrt(2 / 8))
    assert shares[STEPS:] == [0.0] * 5


def test_inverse_sqrt_equals_its_paper() -> None:
    """Vaswani et al. 2017, equation 3, whose peak is warmup^-0.5, scaled to a peak of 1."""
    shares = ours("inverse_sqrt")
    for step in range(STEPS):
        expected = min(step**-0.5 if step else math.inf, step * WARMUP**-1.5)
        assert shares[step] == pytest.approx(expected * WARMUP**0.5)
    assert ours("inverse_sqrt", min_ratio=0.6)[STEPS] == 0.6


def test_inverse_sqrt_equals_megatron() -> None:
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = megatron(scheduler, optimizer, lr_decay_style="inverse-square-root", min_lr=0.5)
    shares = ours("inverse_sqrt", min_ratio=0.5)
    assert shares[:STEPS] == pytest.approx([theirs.get_lr(g) for g in walk(theirs, STEPS)])


def megatron(module: Any, optimizer: Any, **values: Any) -> Any:
    defaults = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.1, "lr_decay_style": "cosine"}
    defaults |= {"lr_warmup_steps": WARMUP, "lr_decay_steps": STEPS, "start_wd": 0.1, "end_wd": 0.1}
    defaults |= {"wd_incr_steps": STEPS, "wd_incr_style": "constant"}
    return module.OptimizerParamScheduler(optimizer, **{**defaults, **values})


def walk(scheduler: Any, steps: int) -> Any:
    for step in range(steps):
        scheduler.num_steps = step
        yield scheduler.optimizer.param_groups[0]


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decay_equals_megatron(style: str) -> None:
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    start, end = (0.1, 0.1) if style == "constant" else (0.02, 0.3)
    theirs = megatron(scheduler, optimizer, start_wd=start, end_wd=end, wd_incr_style=style)
    expected = [theirs.get_wd() for _ in walk(theirs, STEPS)]
    values: dict[str, Any] = {"weight_decay_schedule": style}
    if style != "constant":
        values |= {"start_weight_decay": start, "end_weight_decay": end}
    built = schedule(optimizer=values)
    assert [built.weight_decay(step, 4 * step) for step in range(STEPS)] == pytest.approx(expected)
    assert built.weight_decay(2 * STEPS, 0) == pytest.approx(end)


def test_weight_decay_starts_from_its_constant() -> None:
    built = schedule(
        optimizer={"weight_decay": 0.5, "weight_decay_schedule": "linear", "end_weight_decay": 0.0}
    )
    assert [built.weight_decay(step, 0) for step in (0, 20, 40)] == [0.5, 0.25, 0.0]


def test_infinite_equals_its_paper() -> None:
    """Ibrahim et al. 2024, section 7, with phases that end at 7, 27, 32 and 40 steps."""
    shares = ours(
        "infinite", cooldown_steps=20, annealing_steps=8, constant_ratio=0.5, min_ratio=0.05
    )
    for step in range(STEPS + 1):
        if step <= 7:
            expected = step / 7
        elif step <= 27:
            expected = 0.5 + 0.5 / 2 * (1 + math.cos(math.pi * (step - 7) / 20))
        elif step <= 32:
            expected = 0.5
        else:
            expected = 0.5 * (0.05 / 0.5) ** ((step - 32) / 8)
        assert shares[step] == pytest.approx(expected), step
    assert shares[STEPS:] == pytest.approx([0.05] * 5)


def test_infinite_takes_other_shapes() -> None:
    shares = ours(
        "infinite",
        100,
        cooldown_shape="linear",
        annealing_shape="linear",
        min_ratio=0.0,
        cooldown_fraction=0.4,
        annealing_fraction=0.1,
        constant_ratio=0.5,
    )
    assert shares[27] == pytest.approx(0.75)
    assert shares[95] == pytest.approx(0.25)
    assert shares[100] == 0.0


def test_warm_up_starts_at_its_start_ratio() -> None:
    shares = ours("constant", warmup_steps=4, warmup_start_ratio=0.2)
    assert shares[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_the_minimum_is_a_rate_or_a_share() -> None:
    assert ours("cosine", min_learning_rate=0.3)[STEPS] == pytest.approx(0.3)
    built = schedule(min_learning_rate=1e-5, optimizer={"learning_rate": 1e-3})
    assert built.learning_rate(STEPS, 0) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    "warmup",
    [
        {"warmup_steps": 10}, {"warmup_fraction": 0.25},
        {"warmup_samples": 40}, {"warmup_tokens": 640},
        {"warmup_steps": 10, "unit": "samples"}, {"warmup_tokens": 640, "unit": "steps"},
    ],
)  # fmt: skip
def test_units_agree_with_constant_batches(warmup: dict[str, Any]) -> None:
    assert ours("cosine", **{"warmup_steps": None, **warmup}) == pytest.approx(
        ours("cosine", warmup_steps=10)
    )


def test_samples_and_steps_differ_with_growing_batches() -> None:
    """Batches of 2, 2, 4, 4, ... samples, 36 in 10 steps."""
    values = {"train_steps": 10, "global_batch_size": 4, "rampup_batch_size": (2, 2, 4)}
    by_steps, by_samples = (
        Schedule(
            TrainSettings(
                **values,
                optimizer=OptimizerSettings(learning_rate=1.0),
                schedule=ScheduleSettings(name="linear", min_ratio=0.0, unit=unit, **warmup),
            )
        )
        for unit, warmup in (("steps", {"warmup_samples": 4}), (None, {"warmup_samples": 4}))
    )
    assert by_steps.learning_rate(1, 2) == 0.5
    assert by_samples.learning_rate(1, 2) == 0.5
    assert by_steps.learning_rate(4, 12) == pytest.approx(1 - 2 / 8)
    assert by_samples.learning_rate(4, 12) == pytest.approx(1 - 8 / 32)
    assert by_steps.learning_rate(10, 36) == by_samples.learning_rate(10, 36) == 0.0
    assert by_samples.learning_rate(1, 2) == pytest.approx(0.5)
    assert by_samples.learning_rate(2, 4) == 1.0
    assert by_samples.learning_rate(3, 8) == pytest.approx(1 - 4 / 32)


@pytest.mark.parametrize("name", plugins.names("schedules"))
def test_phases_without_length(name: str) -> None:
    assert plugins.load("schedules", name).factor(1, **extreme(name)) >= 0.0
    phases = {
        key: 0 for key in plugins.constant("schedules", name, "SETTINGS") if "fraction" in key
    }
    phases.pop("decay_fraction", None)
    built = schedule(1, name=name, **phases)
    assert built.learning_rate(0, 0) == (0.55 if name == "infinite" else 1.0)
    ramp = schedule(4, name=name, warmup_steps=4, **phases)
    assert ramp.learning_rate(3, 12) == 0.75
    for step in range(4, 9):
        assert 0.0 <= ramp.learning_rate(step, 4 * step) <= 1.0


def extreme(name: str) -> dict[str, Any]:
    """Arguments of `factor` if phases have no length."""
    settings = plugins.constant("schedules", name, "SETTINGS")
    known = inspect.signature(plugins.load("schedules", name).factor).parameters
    lengths = {key: 1 for key in ("warmup", "length", "decay") if key in known}
    lengths |= {key: 0 for key in ("cooldown", "annealing") if key in known}
    return lengths | {
        key: value for key, value in settings.items() if not key.endswith(("_steps", "_fraction"))
    }
