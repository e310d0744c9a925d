"""The schedule in a Megatron checkpoint, and `train.on_change` if the config has another one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_optimizers import SCHEDULER
from tests.support.runs import ARCHITECTURE, make_run, prepare, train_here
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.megatron_model.optimizer_states import LR_SCHEDULER
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.initial_checkpoint import decide_schedule

SAME: dict[str, Any] = {
    "finetune": False,
    "train_samples": 100,
    "global_batch_size": 4,
    "optimizer": {"name": "adam", "learning_rate": 1e-3, "weight_decay": 0.1},
    "schedule": {"name": "cosine", "warmup_samples": 0, "min_learning_rate": 0},
}
"""Settings of the schedule that megatron-core wrote: 100 samples, without a warm-up."""


def compared(recorded: dict[str, Any], **train: Any) -> str:
    notes = {LR_SCHEDULER: {**SCHEDULER, **recorded}}
    start = Checkpoint("megatron", Path("release"), ARCHITECTURE, TensorSource([], {}), notes=notes)
    return decide_schedule(start, TrainSettings.model_validate({**SAME, **train}))


def test_the_same_schedule_in_samples_or_steps_is_no_difference() -> None:
    assert compared({}) == ""
    steps = {"name": "cosine", "warmup_steps": 5, "min_learning_rate": 0, "decay_steps": 20}
    recorded = {"lr_warmup_steps": 20, "lr_decay_steps": 80, "max_lr": 0.00100000000001}
    assert compared(recorded, train_samples=None, train_steps=25, schedule=steps) == ""


@pytest.mark.parametrize(
    ("recorded", "line"),
    [
        ({"max_lr": 3e-4}, "train.optimizer.learning_rate 0.0003 -> 0.001"),
        ({"min_lr": 1e-5}, "train.schedule.min_learning_rate 1e-05 -> 0"),
        ({"lr_decay_style": "linear"}, "train.schedule.name linear -> cosine"),
        ({"lr_decay_style": "WSD"}, "train.schedule.name wsd -> cosine"),
        ({"lr_warmup_steps": 8}, "train.schedule.warmup in samples 8 -> 0"),
        ({"lr_decay_steps": 200}, "end of the decay in samples 200 -> 100"),
        ({"end_wd": 0.2}, "train.optimizer.weight_decay (end) 0.2 -> 0.1"),
    ],
)
def test_a_difference_is_named_and_on_change_decides(recorded: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        compared(recorded)
    assert str(caught.value) == (
        f"release: the schedule of the checkpoint and of the config differ: {line}. "
        "train.on_change is refuse: set these as they were, or train.on_change to 'continue', "
        "which takes the values of the config"
    )
    text = compared(recorded, on_change="continue")
    assert text.endswith(
        f"{line}. train.on_change is continue: training takes the values of the config"
    )


def test_lengths_in_tokens_and_other_checkpoints_are_not_compared() -> None:
    tokens = {"lr_decay_steps": 0, "lr_decay_tokens": 5000}
    assert compared(tokens) == ""
    assert compared({"lr_decay_style": None, "max_lr": 5.0}) == ""
    assert compared({"max_lr": 5.0}, finetune=True) == ""


@pytest.mark.usefixtures("lone_rank")
def test_training_stops_or_continues(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedule survives the conversion to the native format, which a run starts from."""
    root = prepare(tmp_path_factory.mktemp("schedule"))
    start = open_any(root / "start")
    (root / "start").rename(root / "plain")
    start = replace(open_any(root / "plain"), notes={**start.notes, LR_SCHEDULER: SCHEDULER})
    writer.write(root / "start", start, "native", Target())
    settings = {"finetune": False, "load_optimizer": False}
    with pytest.raises(UserError, match=r"train\.schedule\.name cosine -> constant"):
        train_here(make_run(root, "refused", schedule={"name": "constant"}, **settings))
    config = make_run(
        root, "continued", schedule={"name": "constant"}, on_change="continue", **settings
    )
    capsys.readouterr()
    assert train_here(config) == 0
    assert "training takes the values of the config" in capsys.readouterr().out
