"""Restarts of the ranks of a job: what is restarted, how often, and after which pause."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.programs import torch_python
from tests.support.runs import losses, make_run, prepare
from tokamake.config.resolved_run import read_run
from tokamake.errors import RESTART_VARIABLE, TemporaryError, UserError, note_failure
from tokamake.runtime import restarts
from tokamake.runtime.exit_status import HUNG, Stopped
from tokamake.runtime.restarts import Restarter, describe, newest_step, pause

COMMAND = """
echo >> {folder}/starts
set -- {statuses}
shift $(($(wc -l < {folder}/starts) - 1))
status=${{1%%:*}}
[ "$status" = "$1" ] || echo global_step${{1#*:}} > {folder}/latest
exit "$status"
"""
"""Ends with the next status each time; `STATUS:STEP` saves a checkpoint before."""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_SECONDS", 0.0)


def run(folder: Path, statuses: Sequence[int | str], *, num_restarts: int = 3) -> tuple[int, int]:
    """Run a command that ends with these statuses; return the last one and the number of starts."""
    script = COMMAND.format(folder=folder, statuses=" ".join(map(str, statuses)))
    status = Restarter(["sh", "-c", script], folder, num_restarts=num_restarts).run()
    return status, len((folder / "starts").read_text().splitlines())


@pytest.mark.parametrize("status", [1, HUNG, 128 + signal.SIGKILL, 255])
def test_a_rank_that_dies_is_restarted(
    tmp_path: Path, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, [status, 0]) == (0, 2)
    assert "at step 0; restart 1 of 3 in 0 s" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 2, 130, *Stopped])
def test_an_end_that_a_restart_would_repeat_or_nobody_wants_undone(
    tmp_path: Path, status: int
) -> None:
    assert run(tmp_path, [status, 0]) == (status, 1)


def test_restarts_without_progress_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, [137] * 9, num_restarts=2) == (137, 3)
    assert "no restart is left (2 without a new checkpoint)" in capsys.readouterr().err


def test_a_new_checkpoint_resets_the_count(tmp_path: Path) -> None:
    assert run(tmp_path, ["137:10", 137, "137:20", 137, 137, 137], num_restarts=2) == (137, 5)


def test_an_older_checkpoint_is_no_progress(tmp_path: Path) -> None:
    assert run(tmp_path, ["1:20", "1:10", "1:20", 1], num_restarts=2) == (1, 3)


def test_without_restarts_the_command_runs_once(tmp_path: Path) -> None:
    assert run(tmp_path, [137, 0], num_restarts=0) == (137, 1)


@pytest.mark.parametrize("error", [UserError("wrong"), TemporaryError("no room")])
def test_an_error_of_a_rank_counts_whatever_the_launcher_returns(
    tmp_path: Path, error: UserError
) -> None:
    program = f"import os; open('{tmp_path}/starts', 'a').write('x'); "
    program += "open(os.environ['TOKAMAKE_ERROR_FILE'], 'w'); os._exit(137)"
    restarter = Restarter([sys.executable, "-c", program], tmp_path, num_restarts=3)
    assert restarter.run() == 137
    assert (tmp_path / "starts").read_text() == "x"
    assert not [*tmp_path.parent.glob(f".{tmp_path.name}.*")]


@pytest.mark.parametrize("kind", [UserError, TemporaryError])
def test_errors_of_the_user_and_the_system_prevent_a_restart(
    tmp_path: Path, kind: type[UserError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTART_VARIABLE, str(tmp_path / "error"))
    monkeypatch.setenv("JOB_FAILURE_FILE", str(tmp_path / "failure"))
    note_failure(kind("wrong"))
    assert (tmp_path / "error").exists()
    assert (tmp_path / "failure").exists() == (kind is UserError)


def test_nothing_is_restarted_after_a_signal(tmp_path: Path) -> None:
    """A launcher that dies of the signal, too, looks as if a rank had died."""
    script = f"echo >> {tmp_path}/starts; kill -USR1 $PPID; kill -TERM $PPID; exit 143"
    command = [sys.executable, "-m", "tokamake.runtime.restarts", "3", str(tmp_path), "sh", "-c"]
    done = subprocess.run([*command, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (143, "")
    assert (tmp_path / "starts").read_text() == "\n"


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [pause(used) for used in range(7)] == [1, 4, 16, 64, 256, 300, 300]


@pytest.mark.parametrize(
    ("status", "text"),
    [(75, "hung"), (137, "ended by signal 9"), (1, "ended with exit status 1")],
)
def test_statuses_in_words(status: int, text: str) -> None:
    assert describe(status) == text


def test_a_folder_without_a_checkpoint_is_at_step_0(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == 0
    (tmp_path / "latest").write_text("global_step40\n")
    assert newest_step(tmp_path) == 40
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    assert newest_step(tmp_path) == 0


DYING = """
import os, sys
from pathlib import Path
from tests.support.forked import killed_in_backward
from tokamake.cli import main
mark = Path(f"{sys.argv.pop(1)}.{os.environ['RANK']}")
if not mark.exists():
    mark.touch()
    killed_in_backward()
main()
"""


@pytest.mark.fault("kill in a step")
@pytest.mark.grid
@pytest.mark.ranks
def test_a_run_whose_rank_is_killed_ends_in_the_same_job(tmp_path: Path) -> None:
    config = make_run(prepare(tmp_path), "run")
    output = read_run(config).output
    train = [torch_python(), "-c", DYING, str(tmp_path / "mark"), "train", "--config", str(config)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tokamake.runtime.restarts", "1", str(output)),
            *(str(ROOT / "profiles/local/launch.sh"), "1", "2", *train),
        ],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "at step 2; restart 1 of 1 in 1 s" in done.stderr
    assert "continuing at step 2" in done.stdout
    assert len(losses(config)) == 6
