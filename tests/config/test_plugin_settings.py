"""A new optimizer or schedule is one file, also if it has settings of its own."""

from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from tests.support.plug_ins import add
from tests.support.runs import losses, make_run, prepare, train_here, weights
from tokamake.checkpoint.detect import open_any
from tokamake.config.optimization import optimizer_facts
from tokamake.config.resolved_run import read_run
from tokamake.config.root import Config
from tokamake.config.training import TrainSettings
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.train.memory import estimate
from tokamake.train.numerics import with_precision

OPTIMIZER = """
from tokamake.optim._optimizer_base import Rule

SETTINGS = {
    "weight_decay": 0.0,
    "sharpness": {"default": 2.0, "gt": 0, "le": 9, "description": "Factor of an update."},
    "norm": ("sign", "none"),
}
ELEMENTWISE = True
STATE = {"step": "replicated", "sums": "like_parameter"}
STATE_BYTES = 2
FLAT_BUFFERS = False


class Signs(Rule):
    zeros = ("sums",)

    def update(self, batch, group):
        batch.tick()
        for value, gradient, sums in zip(batch.values, batch.gradients, batch.state("sums")):
            sums.add_(gradient)
            direction = sums.sign() if group["norm"] == "sign" else sums
            value.add_(direction, alpha=-group["lr"] * group["sharpness"])


def build(groups, settings, whole):
    return Signs(groups, whole=whole, lr=settings.learning_rate, **settings.own)
"""
SCHEDULE = """
SETTINGS = {"warmup_steps": 0, "period": {"default": 4, "ge": 1}}


def factor(position, *, warmup, length, period):
    return 0.5 if position // period % 2 else 1.0
"""


@pytest.fixture(autouse=True)
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two new files beside the plug-ins of tokamake."""
    new: dict[str, str | Path] = {"optim/signs.py": OPTIMIZER, "schedules/square.py": SCHEDULE}
    add(tmp_path / "library", monkeypatch, new)


@pytest.mark.usefixtures("lone_rank")
def test_a_run_trains_with_a_new_optimizer_and_a_new_schedule(tmp_path: Path) -> None:
    folder = prepare(tmp_path)

    def run(name: str, schedule: dict[str, Any], **settings: Any) -> Path:
        optimizer = {"name": "signs", "learning_rate": 0.001, **settings}
        options = {"evaluation_steps": 0, "save_interval": 6}
        config = make_run(folder, name, optimizer=optimizer, schedule=schedule, **options)
        assert train_here(config) == 0
        return config

    square = {"name": "square", "period": 2}
    config = run("default", square)
    assert losses(config, "learning_rate") == [0.001, 0.001, 0.0005, 0.0005, 0.001, 0.001]
    assert losses(config)[-1] < losses(config)[0]
    sharper = losses(run("sharper", square, sharpness=4.0))
    assert sharper[0] == losses(config)[0]
    assert sharper[1] != losses(config)[1]
    train = read_run(config).train
    assert train.optimizer.own == {"sharpness": 2.0, "norm": "sign"}
    assert train.schedule.own == {"period": 2}
    written = yaml.safe_load(config.read_text())["train"]
    assert (written["optimizer"]["sharpness"], written["schedule"]["period"]) == (2.0, 2)


@pytest.mark.usefixtures("lone_rank")
def test_a_new_optimizer_resumes_from_its_states_and_its_memory_is_estimated(
    tmp_path: Path,
) -> None:
    optimizer = {"name": "signs", "learning_rate": 0.001}
    config = make_run(prepare(tmp_path), "signs", optimizer=optimizer)
    assert train_here(config) == 0
    expected, output = weights(config), read_run(config).output
    source = open_any(output).source
    sums = [key for key in source if key.startswith("optimizer.sums.")]
    assert len(sums) == len(expected)
    assert all(source.read(key).any() for key in sums)
    for step in (4, 6):
        rmtree(output / f"global_step{step}")
    (output / "latest").write_text("global_step2")
    assert train_here(config) == 0
    for name, tensor in weights(config).items():
        assert torch.equal(tensor, expected[name]), name
    device = torch.device("cpu")
    needed = estimate(with_precision(read_run(config), device), 1, device.type)
    assert needed.optimizer == 2 * sum(tensor.numel() for tensor in expected.values())


MISTAKES = {
    "train.optimizer.sharpness: 0.0: input should be greater than 0": {"sharpness": 0.0},
    "train.optimizer.sharpness: 'big': input should be a valid number": {"sharpness": "big"},
    "train.optimizer.norm: 'max': input should be 'sign' or 'none'": {"norm": "max"},
    "train.optimizer.sharpnes: unknown key": {"sharpnes": 1.0},
    "train.optimizer.beta1: 0.9: signs does not use it, only weight_decay, sharpness, norm": {
        "beta1": 0.9
    },
    "train.optimizer: sharpness: 2.0: adamw does not use it, only beta1": {
        "name": "adamw",
        "sharpness": 2.0,
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_in_own_settings_are_refused_like_those_in_fields(message: str) -> None:
    optimizer = {"name": "signs", **MISTAKES[message]}
    with pytest.raises(UserError) as error:
        validate(Config, {"train": {"optimizer": optimizer}}, "config.yaml")
    assert str(error.value).startswith(f"config.yaml: {message}")
    assert len(str(error.value).splitlines()) == 1


def test_literals_of_the_file_decide_how_others_treat_an_optimizer() -> None:
    facts = optimizer_facts("signs")
    assert (facts.state_bytes, facts.flat_buffers, facts.zero_files) == (2, False, False)
    optimizer = {"name": "signs"}
    with pytest.raises(ValidationError, match="states of adam and adamw, not of signs"):
        Config(train={"optimizer": optimizer}, convert="mds-dp2-zero1")


def test_other_runs_do_not_have_the_own_settings_of_a_plug_in() -> None:
    """Otherwise, a new plug-in would change their digests, and they could not resume."""
    settings = TrainSettings().model_dump()
    assert "sharpness" not in settings["optimizer"]
    assert "period" not in settings["schedule"]


def test_the_schema_has_the_own_settings_of_all_plug_ins() -> None:
    sections = Config.model_json_schema()["$defs"]
    sharpness = sections["OptimizerSettings"]["properties"]["sharpness"]
    assert sharpness["description"] == "Factor of an update."
    assert (sharpness["default"], sharpness["exclusiveMinimum"], sharpness["maximum"]) == (
        2.0,
        0,
        9,
    )
    assert sections["ScheduleSettings"]["properties"]["period"]["minimum"] == 1
