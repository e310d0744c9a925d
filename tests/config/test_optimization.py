"""Settings of optimizers and schedules: published values, mistakes, resolved runs."""

from pathlib import Path
from typing import Any

import pytest

from tokamake import plugins
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.schedule import ScheduleSettings, unfinished_warmup
from tokamake.config.training import TrainSettings
from tokamake.config_files import validate
from tokamake.errors import UserError


@pytest.mark.parametrize("name", plugins.names("optim"))
def test_plug_ins_publish_their_settings(name: str) -> None:
    published = plugins.constant("optim", name, "SETTINGS")
    assert published == plugins.load("optim", name).SETTINGS
    settings = OptimizerSettings(name=name)
    names = plugins.names("optim")
    for key in {key for each in names for key in plugins.constant("optim", each, "SETTINGS")}:
        assert getattr(settings, key) == published.get(key)


@pytest.mark.parametrize("name", plugins.names("schedules"))
def test_schedules_publish_their_settings(name: str) -> None:
    published = plugins.constant("schedules", name, "SETTINGS")
    settings = ScheduleSettings(name=name)
    for key, value in published.items():
        assert getattr(settings, key) == value


def test_the_default_optimizer_does_not_change() -> None:
    settings = OptimizerSettings()
    assert (settings.name, settings.learning_rate, *settings.betas) == ("adamw", 3e-4, 0.9, 0.95)
    assert (settings.epsilon, settings.weight_decay) == (1e-8, 0.1)


@pytest.mark.parametrize("name", plugins.names("optim"))
def test_resolved_optimizers_read_back(name: str) -> None:
    for values in ({}, {"weight_decay": 0.3}):
        settings = OptimizerSettings(name=name, **values)
        assert OptimizerSettings(**settings.model_dump()) == settings


@pytest.mark.parametrize(
    "values",
    [
        *({"name": name} for name in plugins.names("schedules")),
        {"warmup_fraction": 0.01}, {"warmup_tokens": 10**6}, {"decay_samples": 500},
        {"min_learning_rate": 1e-6}, {"name": "wsd", "cooldown_steps": 10},
        {"name": "wsd", "cooldown_fraction": 0.0}, {"warmup_steps": 0, "unit": "tokens"},
    ],
)  # fmt: skip
def test_resolved_schedules_read_back(values: dict[str, Any]) -> None:
    settings = ScheduleSettings(**values)
    assert ScheduleSettings(**settings.model_dump()) == settings
    for key, value in values.items():
        assert getattr(settings, key) == value


def section(**values: Any) -> dict[str, Any]:
    return {"train_steps": 10, "global_batch_size": 4, "sequence_length": 16, **values}


MISTAKES = {
    "train.optimizer.momentum: 0.9: adamw does not use it, only beta1, beta2, epsilon, "
    "weight_decay; remove it": {"optimizer": {"momentum": 0.9}},
    "train.optimizer.beta1: 0.9: sgd does not use it": {"optimizer": {"name": "sgd", "beta1": 0.9}},
    "train.optimizer.beta2: 1.0: input should be less than 1": {"optimizer": {"beta2": 1.0}},
    "train.optimizer.weight_decay_schedule: linear: give end_weight_decay": {
        "optimizer": {"weight_decay_schedule": "linear"}
    },
    "train.optimizer.end_weight_decay: 0.2: set weight_decay_schedule to linear or cosine": {
        "optimizer": {"end_weight_decay": 0.2}
    },
    "train.schedule.warmup_steps and warmup_tokens set the same quantity; keep one of them": {
        "schedule": {"warmup_steps": 5, "warmup_tokens": 5}
    },
    "train.schedule.min_ratio and min_learning_rate set the same quantity": {
        "schedule": {"min_ratio": 0.1, "min_learning_rate": 1e-5}
    },
    "train.schedule.cooldown_steps: 3: cosine does not use it": {"schedule": {"cooldown_steps": 3}},
    "train.schedule.cooldown_shape: 'round': input should be": {
        "schedule": {"name": "wsd", "cooldown_shape": "round"}
    },
    "train: schedule.decay_steps: 4: ends before schedule.warmup_steps: 5; raise it": {
        "schedule": {"warmup_steps": 5, "decay_steps": 4}
    },
    "train: schedule.warmup_steps: 5, schedule.cooldown_fraction: 0.6: their sum is more than "
    "train_steps 10; lower one of them": {
        "schedule": {"name": "wsd", "warmup_steps": 5, "cooldown_fraction": 0.6}
    },
    "train: schedule.min_learning_rate: 0.001: more than optimizer.learning_rate 0.0003": {
        "schedule": {"min_learning_rate": 1e-3}
    },
    "train: schedule.annealing_shape: exponential: never reaches 0; raise schedule.min_ratio": {
        "schedule": {"name": "infinite", "min_ratio": 0.0}
    },
    "train: schedule.name: cosine: schedule_free_adamw averages weights instead; set it to": {
        "optimizer": {"name": "schedule_free_adamw"}
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_line_each(message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(TrainSettings, section(**MISTAKES[message]), "train")
    assert message.removeprefix("train.") in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_phases_may_fill_the_run_exactly() -> None:
    """0.1 + 0.2 + 0.7 of 10 is not 10 in floating point."""
    schedule = {"name": "infinite", "warmup_fraction": 0.1, "cooldown_fraction": 0.2}
    validate(TrainSettings, section(schedule=schedule | {"annealing_fraction": 0.7}), "train")


@pytest.mark.parametrize(
    ("schedule", "note"),
    [
        ({"warmup_steps": 11}, "warmup_steps: 11: more than train_steps 10; the learning rate"),
        ({"warmup_samples": 41}, "warmup_samples: 41: more than the run's 40 samples"),
        ({"warmup_tokens": 641}, "warmup_tokens: 641: more than the run's 40 samples"),
        ({"name": "wsd", "warmup_steps": 2000, "cooldown_steps": 500}, "warmup_steps: 2000"),
        ({"warmup_steps": 100, "decay_steps": 500}, "warmup_steps: 100"),
        ({"warmup_steps": 10}, ""),
    ],
)
def test_a_try_out_may_end_within_the_warm_up(schedule: dict[str, Any], note: str) -> None:
    """`train_steps` alone makes any config a small one; the first steps have the same rates."""
    train = validate(TrainSettings, section(schedule=schedule), "train")
    assert train.span
    found = unfinished_warmup(train.schedule, train.span)
    assert note in found
    assert bool(note) == bool(found)


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "expected"),
    [
        (1, {}, 2),
        (24, {}, 48),
        (24, {"tensor_parallel_size": 4}, 12),
        (2, {"pipeline_parallel_size": 4}, 2),
    ],
)
def test_a_global_batch_may_follow_the_ranks(
    num_ranks: int, parallel: dict[str, int], expected: int
) -> None:
    values = {"global_batch_size": None, "micro_batch_size": 2, "parallel": parallel}
    context = {"num_ranks": num_ranks}
    assert TrainSettings.model_validate(values, context=context).global_batch_size == expected


def test_lengths_are_checked_once_the_run_has_a_length() -> None:
    values = section(train_steps=None, schedule={"warmup_steps": 10**6})
    assert validate(TrainSettings, values, "train").num_steps is None


def test_a_plug_in_without_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/mine.py").write_text("from math import pi\n\nOTHER = 3\n")
    monkeypatch.setattr(plugins, "_ROOT", tmp_path)
    plugins.constant.cache_clear()
    assert plugins.constant("optim", "mine", "OTHER") == 3
    with pytest.raises(UserError, match=r"mine\.py: has no constant SETTINGS; add it"):
        plugins.constant("optim", "mine", "SETTINGS")
    plugins.constant.cache_clear()
