"""What asks a run to stop: signals, the time of its job, a file; limits in samples and tokens."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import spawn
from tests.support.runs import losses, make_run, records, train_here
from tokamake.config.resolved_run import read_run
from tokamake.errors import FAILURE_VARIABLE, UserError
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.ranks import Ranks
from tokamake.train.metrics import Metrics, Record
from tokamake.train.stopping import stopping
from tokamake.train.stopping.deadline import Deadline
from tokamake.train.stopping.stopping import FILE, Stopping, StopRequest, describe
from tokamake.train.train import train

ALONE = Ranks(0, 1, 0, 1)


def test_rank_0_looks_for_the_file_from_time_to_time(tmp_path: Path) -> None:
    now = 0.0
    watch = Stopping(tmp_path, ALONE, deadline=Deadline(None), clock=lambda: now)
    other = Stopping(tmp_path, Ranks(1, 2, 1, 2), deadline=Deadline(None), clock=lambda: now)
    assert not watch.is_asked()
    (tmp_path / FILE).touch()
    assert not watch.is_asked()
    now = stopping._LOOK_SECONDS
    assert watch.is_asked()
    assert not other.is_asked()


def test_a_signal_counts_before_the_time(tmp_path: Path) -> None:
    watch = Stopping(tmp_path, ALONE, deadline=Deadline(1.0))
    assert watch.is_asked()
    assert watch._reason == "TIME"
    watch.signals.note(signal.SIGUSR1, None)
    assert watch.is_asked()
    assert watch._reason == "SIGUSR1"


def agreed(folder: Path) -> tuple[int, bool]:
    """A reason that only the last rank knows, and whether the file is left."""
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), 2, 0, 1)
    watch = Stopping(folder, ranks, deadline=Deadline(None))
    if ranks.rank:
        watch.signals.note(signal.SIGTERM, None)
    watch.is_asked()
    return int(watch.agree()), (folder / FILE).exists()


@pytest.mark.ranks
def test_ranks_agree_on_a_reason(tmp_path: Path) -> None:
    assert spawn(agreed, 2, tmp_path) == [(Stopped.SIGTERM, False)] * 2
    (tmp_path / FILE).touch()  # rank 0 finds it; the signal of rank 1 comes second
    assert [status for status, _ in spawn(agreed, 2, tmp_path)] == [Stopped.FILE] * 2
    assert not (tmp_path / FILE).exists()


def test_reasons_in_words() -> None:
    words = [describe(reason) for reason in Stopped]
    assert words[0] == "by SIGTERM"
    assert words[3:] == ["before the end of the job", "by the file stop"]


@pytest.mark.usefixtures("lone_rank")
def test_the_file_stops_a_run_which_is_saved_and_validated(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, add = make_run(root, "filed", log_interval=6), Metrics.add
    output, failure = read_run(config).output, tmp_path / "failure"

    def add_and_create(metrics: Metrics, record: Record) -> None:
        add(metrics, record)
        if record["step"] == 3:
            (output / FILE).touch()

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "add", add_and_create)
        patch.setattr(stopping, "_LOOK_SECONDS", 0.0)
        patch.setenv(FAILURE_VARIABLE, str(failure))
        assert train_here(config) == Stopped.FILE
    assert "stopped by the file stop: saved at step 4, run" in capsys.readouterr().out
    assert [record["step"] for record in records(config) if "loss" in record] == [1, 4]
    assert [record["step"] for record in records(config) if "validation_loss" in record][-1] == 4
    assert not (output / FILE).exists()
    # No executor submits the job again, and its message ends with this text.
    assert failure.read_text() == "it was asked to stop, so there is no retry"
    assert train_here(config) == 0
    assert len(losses(config, "validation_loss")) == 4


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("limit", [{"until_samples": 31}, {"until_tokens": 31 * 16}])
def test_a_job_ends_before_it_exceeds_a_limit(root: Path, limit: dict[str, int]) -> None:
    config = make_run(root, f"limited-{next(iter(limit))}")
    train(config=config, **limit)
    assert (read_run(config).output / "latest").read_text() == "global_step3"  # 8 samples a step
    assert config.with_name("train.3.json").exists()


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("samples", [0, 7, 49])
def test_a_limit_beyond_the_run_is_refused(root: Path, samples: int) -> None:
    config = make_run(root, "beyond")
    match = rf"until_samples: {samples} .* the run goes from 0 to 48 samples, 8 a step; give a num"
    with pytest.raises(UserError, match=match):
        train_here(config, until_samples=samples)


@pytest.mark.usefixtures("lone_rank")
def test_a_job_has_one_limit(root: Path) -> None:
    config = make_run(root, "limits")
    with pytest.raises(UserError, match="--until-step, --until-samples and --until-tokens: give"):
        train(config=config, until_step=1, until_samples=16)


TWICE = """
import os, signal, time
from tokamake.train.stopping import stopping
stopping._REPEAT_SECONDS = {least}
request = stopping.StopRequest(reports=True)
with stopping.on_signals(request.note):
    os.kill(os.getpid(), signal.{first})
    os.kill(os.getpid(), signal.{second})
    os.write(1, request.by.encode())
"""


@pytest.mark.parametrize(
    ("first", "second", "least", "code", "printed"),
    [
        ("SIGINT", "SIGINT", 0, 130, "ended by a second Ctrl-C; the same command continues"),
        ("SIGTERM", "SIGINT", 0, 130, "ended by a second Ctrl-C; the same command continues"),
        ("SIGINT", "SIGINT", 1e9, 0, "SIGINT"),
        ("SIGINT", "SIGTERM", 0, 0, "SIGINT"),
        ("SIGTERM", "SIGTERM", 0, 0, "SIGTERM"),
    ],
)
def test_a_second_ctrl_c_ends_the_process_at_once(
    first: str, second: str, least: float, code: int, printed: str
) -> None:
    program = TWICE.format(first=first, second=second, least=least)
    # A shell ignores SIGINT in its background jobs; on_signals must install its handler even so.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(printed)


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    request = StopRequest(reports=False)
    with stopping.on_signals(request.note):
        os.kill(os.getpid(), signal.SIGINT)
    assert request.by == "SIGINT"
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
