"""Metrics survive restarts: incomplete lines and steps that are done again disappear."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@pytest.mark.fault("full disk")
def test_sync_reports_a_full_disk(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, done=0)
    metrics._file._stream.close()
    with suppress(OSError), Path("/dev/full").open("ab", buffering=0) as metrics._file._stream:
        metrics.add({"step": 1, "loss": 1.0})  # not raised here: only rank 0 writes metrics
        with pytest.raises(OSError, match="No space left"):
            metrics.sync()
        metrics.close()


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size; Python ignores SIGXFSZ."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.fault("full disk")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_records_of_a_full_disk_are_written_once_it_has_space(tmp_path: Path) -> None:
    metrics, path = Metrics(tmp_path, done=0), tmp_path / "metrics.jsonl"
    metrics.add({"step": 1, "loss": 1.0})
    metrics.sync()
    with full_disk(path.stat().st_size + 5):
        for step in (2, 3):
            metrics.add({"step": step, "loss": float(step)})
        with pytest.raises(OSError, match="File too large"):
            metrics.sync()
    assert len(path.read_bytes().splitlines()) == 2  # half a record
    metrics.add({"step": 4, "loss": 4.0})
    metrics.sync()
    metrics.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [event.step for event in events] == [1, 2, 3, 4]


DAMAGES = {
    "torn line": b'{"step": 2, "lo{"step": 9, "loss": 9.0}\n',
    "NUL bytes": b"\0" * 4096 + b"\n",
    "not UTF-8": b'{"step": \xff}\n',
    "no record": b"17\n",
    "nested too deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_lines_are_named_and_left_out(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    first, last = b'{"step": 1, "loss": 1.0}\n', b'{"step": 3, "loss": 3.0}\n'
    path.write_bytes(first + DAMAGES[damage] + last)
    assert [record["step"] for record in read(path)] == [1, 3]
    Metrics(tmp_path, done=3).close()
    assert f"{path}: left out 1 damaged line\n" in capsys.readouterr().out
    assert path.read_bytes() == first + last


def test_a_record_after_nul_bytes_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\0" * 9 + b'{"step": 1, "loss": 1.0}\n')
    assert read(path) == [{"step": 1, "loss": 1.0}]


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
