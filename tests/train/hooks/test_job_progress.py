"""The note of progress: an executor submits a job again only if a checkpoint is new."""

from pathlib import Path

import pytest

from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.errors import UserError
from tokamake.runtime.exit_status import Stopped
from tokamake.runtime.ranks import Ranks
from tokamake.train.hooks.job_progress import JobProgress, retracted_on_error, say_stopped

RANKS = Ranks(0, 1, 0, 1)


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOB_PROGRESS_FILE", str(tmp_path / "progress"))
    return tmp_path / "progress"


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_notes_each_checkpoint(note: Path, rank: int) -> None:
    for step in (2, 4):
        JobProgress(rank).saved(ResumeState("digest", step, 8 * step, 1.0, 2))
    assert note.exists() == (rank == 0)
    assert rank or note.read_text() == "saved at step 4\n"


@pytest.mark.parametrize(
    ("reason", "line", "printed"),
    [
        (Stopped.TIME, "stopped before the end of the job, saved at step 4\n", "the next job"),
        (Stopped.FILE, "saved at step 4\n", "run the same command again to continue"),
    ],
)
def test_the_end_of_a_job_alone_is_a_planned_stop(
    note: Path, reason: Stopped, line: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    JobProgress(0).saved(ResumeState("digest", 4, 32, 1.0, 1))
    say_stopped(reason, 4, ranks=RANKS)
    assert note.read_text() == line
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(("error", "is_kept"), [(UserError("diverged"), False), (OSError(), True)])
def test_an_error_that_would_come_again_retracts_the_note(
    note: Path, error: Exception, is_kept: bool
) -> None:
    note.write_text("saved at step 4\n")
    with pytest.raises(type(error)), retracted_on_error(RANKS):
        raise error
    assert note.exists() == is_kept
