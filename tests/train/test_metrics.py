"""Metrics survive restarts: incomplete lines and steps that are done again disappear."""

from contextlib import suppress
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tokamake.train.metrics import Metrics, console_line, read, summary


def write(folder: Path, steps: range, *, done: int, scale: float = 1.0) -> None:
    metrics = Metrics(folder, done=done)
    for step in steps:
        metrics.add({"step": step, "loss": scale * step})
    metrics.close()


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "metrics.jsonl") == []


def test_a_restart_drops_later_and_incomplete_lines(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6), done=0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')
    write(tmp_path, range(4, 7), done=3, scale=10.0)
    assert [record["loss"] for record in read(path)] == [1, 2, 3, 40, 50, 60]


def test_sync_reports_a_full_disk(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, done=0)
    metrics._stream.close()
    with suppress(OSError), Path("/dev/full").open("a", encoding="utf-8") as metrics._stream:
        metrics.add({"step": 1, "loss": 1.0})  # not raised here: only rank 0 writes metrics
        with pytest.raises(OSError, match="No space left"):
            metrics.sync()
        metrics.close()


def test_a_new_start_drops_all_records(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3), done=0)
    write(tmp_path, range(1, 2), done=0, scale=5.0)
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 5.0}]


def test_tensorboard_shows_the_restarted_curve(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6), done=0)
    write(tmp_path, range(4, 7), done=3, scale=10.0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [
        *((1, 1), (2, 2), (3, 3)),
        *((4, 40), (5, 50), (6, 60)),
    ]


def test_the_summary_has_first_last_and_validation_losses() -> None:
    records = [
        {"step": 0, "validation_loss": 9.0},
        {"step": 1, "loss": 8.0},
        {"step": 2, "loss": 7.0},
        {"step": 2, "validation_loss": 7.5},
    ]
    assert summary(records) == {
        "first_loss": 8.0,
        "last_loss": 7.0,
        "validation_losses": [
            {"step": 0, "validation_loss": 9.0},
            {"step": 2, "validation_loss": 7.5},
        ],
    }


def test_the_console_line_has_loss_rate_speed_and_time_left() -> None:
    record = {
        "step": 120,
        "loss": 5.81234,
        "learning_rate": 9.1e-4,
        "grad_norm": 0.8123,
        "tokens_per_second": 10240.4,
    }
    line = "step 120/400 | loss 5.8123 | lr 9.10e-04 | grad norm 0.812 | 10,240 tokens/s"
    assert console_line(record, train_steps=400, seconds_left=84) == f"{line} | 1 min 24 s left"
