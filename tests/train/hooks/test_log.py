"""Records and lines of training and validation."""

import math
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.megatron_logs import megatron_lines
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.train_sections import RouterSettings, TrackerSettings
from tokamake.runtime.ranks import Ranks
from tokamake.train import metrics
from tokamake.train.hooks import FinishedStep
from tokamake.train.hooks import log as log_module
from tokamake.train.hooks.log import TrainingLog
from tokamake.train.metrics import Validation, read
from tokamake.train.step_result import NO_RESULT, StepResult

pytestmark = pytest.mark.usefixtures("lone_rank")
RESULT = StepResult(loss=2.0, grad_norm=0.5, stop=False, saved=False, skipped=False, num_rows=8)


def state(step: int) -> ResumeState:
    return ResumeState("digest", step, consumed_samples=8 * step, seconds=1.0, world_size=1)


@pytest.fixture(autouse=True)
def _ten_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model need ten floating-point operations for a token."""
    monkeypatch.setattr(metrics, "model_flops_per_token", lambda _: 10)


def finished(
    number: int,
    result: StepResult = RESULT,
    *,
    samples: int = 8,
    seconds: float = 1.0,
    rate: float = 0.01,
    next_rate: float = 0.01,
    is_logged: bool = True,
) -> FinishedStep:
    """A step; of no seconds if its data are left out."""
    return FinishedStep(
        state(number), result, rate, next_rate, samples, seconds, reading=0.0, is_logged=is_logged
    )


def log(
    folder: Path,
    *,
    rank: int = 0,
    done: int = 0,
    precision: str = "bf16",
    log_style: str = "plain",
    device: torch.device | None = None,
) -> TrainingLog:
    train = SimpleNamespace(
        train_steps=10,
        sequence_length=16,
        precision=precision,
        log_style=log_style,
        router=RouterSettings(),
        trackers=TrackerSettings(),
    )
    run: Any = SimpleNamespace(output=folder, train=train, step=0)
    return TrainingLog(run, Ranks(rank, 1, 0, 1), done=done, device=device)


@pytest.mark.parametrize("name", ["NVIDIA H200", "Another 9000"])
def test_a_record_has_memory_and_the_share_of_a_known_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(log_module, "device_name", lambda _: name)
    training_log = log(tmp_path, precision="bf16", device=torch.device("cpu"))
    training_log.end_step(finished(1, seconds=3.0))
    training_log.close()
    (record,) = read(tmp_path / "metrics.jsonl")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0.5 * peak < record["peak_memory_bytes"] <= peak
    share = record["model_flops_per_second"] / 989.4e12
    assert record.get("mfu") == (pytest.approx(share) if name == "NVIDIA H200" else None)


def test_a_record_has_the_mean_speed_since_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training_log = log(tmp_path)
    training_log.end_step(finished(1, seconds=3.0))
    training_log.end_step(finished(2, is_logged=False))
    # Six rows hold 24 samples.
    last = RESULT._replace(loss=1.5, num_rows=6)
    training_log.end_step(finished(3, last, samples=24, seconds=3.0, rate=0.02))
    training_log.sync()
    training_log.close()
    first, second = read(tmp_path / "metrics.jsonl")
    assert (first["tokens_per_second"], first["step_seconds"]) == (8 * 16 / 3, 3.0)
    assert second == {
        "step": 3,
        "consumed_samples": 24,
        "consumed_tokens": 384,
        "batch_size": 24,
        "loss": 1.5,
        "learning_rate": 0.02,
        "grad_norm": 0.5,
        "tokens_per_second": 128.0,
        "model_flops_per_second": 560.0,
        "step_seconds": 2.0,
    }
    # 7 steps of 2 s are left.
    assert (
        "step 3/10 | loss 1.5000 | lr 2.00e-02 | grad norm 0.500 | 128 tokens/s | 14.0 s left"
        in (capsys.readouterr().out)
    )


def test_a_norm_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    training_log = log(tmp_path)
    further = (math.nan, 1.0)
    result = RESULT._replace(grad_norm=math.inf, skipped=True, further_losses=further)
    training_log.end_step(finished(1, result))
    training_log.close()
    assert not {"grad_norm", "mtp_loss", "mtp_loss/2"} & {*read(tmp_path / "metrics.jsonl")[0]}


def test_fp16_records_its_loss_scale(tmp_path: Path) -> None:
    for precision, expected in (("bf16", None), ("fp16", 128.0)):
        training_log = log(tmp_path / precision, precision=precision)
        training_log.end_step(finished(1, RESULT._replace(loss_scale=128.0)))
        training_log.close()
        assert read(tmp_path / precision / "metrics.jsonl")[0].get("loss_scale") == expected


def test_validation_losses_have_the_names_of_their_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training_log = log(tmp_path)
    training_log.validated(state(4), {"valid": Validation(2.0), "hard": Validation(3.0)})
    training_log.close()
    losses = {"validation_loss": 2.0, "validation_loss/hard": 3.0}
    record = {"step": 4, **losses}
    assert read(tmp_path / "metrics.jsonl") == [record]
    assert capsys.readouterr().out == (
        "step 4/10 | validation loss 2.0000 | validation loss (hard) 3.0000\n"
    )


def test_records_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    for done, steps in ((0, (1, 2, 3)), (2, (3,))):
        training_log = log(tmp_path, done=done)
        for step in steps:
            training_log.end_step(finished(step, RESULT._replace(loss=10.0 * done + step)))
        training_log.close()
    assert [record["loss"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 23]


def test_records_that_were_lost_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(tmp_path, done=2).close()
    assert (
        capsys.readouterr().out
        == f"{tmp_path}/metrics.jsonl: has no records of the 2 steps before\n"
    )


def test_other_ranks_write_and_print_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training_log = log(tmp_path, rank=1)
    training_log.end_step(finished(1))
    training_log.validated(state(1), {"valid": Validation(2.0)})
    training_log.sync()
    training_log.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_megatron_style_averages_over_the_steps_since_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training_log = log(tmp_path, precision="fp16", log_style="megatron")
    before = ({"loss": 3.0}, {"loss": 9.0, "skipped": True}, {"loss": math.nan})
    for number, values in enumerate(before, 1):
        training_log.end_step(finished(number, RESULT._replace(**values), is_logged=False))
    last = RESULT._replace(loss=2.0, loss_scale=128.0)
    training_log.end_step(finished(4, last, samples=16))
    training_log.end_step(finished(5, last, samples=16, seconds=0.5))
    training_log.validated(state(5), {"valid": Validation(2.0), "hard": Validation(30.0)})
    training_log.close()
    first, second, *validation = megatron_lines(capsys.readouterr().out)
    assert first == {
        "iteration": 4,
        "train iterations": 10,
        "consumed samples": 32,
        "elapsed time per iteration (ms)": 1000.0,
        "learning rate": 0.01,
        "global batch size": 16,
        "lm loss": 2.5,
        "loss scale": 128.0,
        "grad norm": 0.5,
        "number of skipped iterations": 1,
        "number of nan iterations": 1,
        "throughput per GPU (TFLOP/s/GPU)": 0.0,
    }
    counts = ("lm loss", "number of skipped iterations", "number of nan iterations")
    assert [second[name] for name in counts] == [2.0, 0, 0]
    assert validation == [
        {"split": "", "iteration": 5, "lm loss value": 2.0, "lm loss PPL": 7.389056},
        {"split": "-hard", "iteration": 5, "lm loss value": 30.0, "lm loss PPL": 485165200.0},
    ]
    assert [record["loss"] for record in read(tmp_path / "metrics.jsonl")[:2]] == [2.0, 2.0]


def test_megatron_style_has_a_line_for_a_loss_that_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training_log = log(tmp_path, log_style="megatron")
    training_log.end_step(finished(1, NO_RESULT, seconds=0.0))  # data were left out
    assert capsys.readouterr().out == ""
    for step, loss in enumerate((4.0, math.nan, 2.0), 1):
        result = RESULT._replace(loss=loss)
        training_log.end_step(finished(step, result, next_rate=0.01 * step, is_logged=step > 1))
    training_log.close()
    first, second = megatron_lines(capsys.readouterr().out)
    names = ("iteration", "lm loss", "number of nan iterations", "learning rate")
    assert [first[name] for name in names] == [2, 4.0, 1, 0.02]
    assert [second[name] for name in names] == [3, 2.0, 0, 0.03]
    # The record is that of the plain style: its speed is the mean of all three steps.
    (record,) = read(tmp_path / "metrics.jsonl")
    assert (record["step"], record["loss"], record["learning_rate"]) == (3, 2.0, 0.01)


def test_megatron_style_has_megatrons_tags(tmp_path: Path) -> None:
    for done in (0, 2):
        training_log = log(tmp_path, done=done, log_style="megatron")
        for step in range(done + 1, done + 4):
            training_log.end_step(finished(step, RESULT._replace(loss=float(step))))
        training_log.validated(state(done + 3), {"valid": Validation(2.0), "hard": Validation(3.0)})
        training_log.sync()
        training_log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        *("learning-rate", "batch-size", "lm loss", "grad-norm", "iteration-time"),
        *("learning-rate vs samples", "batch-size vs samples", "lm loss vs samples"),
        *("grad-norm vs samples", "lm loss validation", "lm loss validation-hard"),
        *("lm loss validation vs samples", "lm loss validation-hard vs samples"),
        *("loss-scale", "loss-scale vs samples"),
    }
    losses = sorted((event.step, event.value) for event in events.Scalars("lm loss vs samples"))
    assert losses == [(8, 1), (16, 2), (24, 3), (24, 3), (32, 4), (40, 5)]
