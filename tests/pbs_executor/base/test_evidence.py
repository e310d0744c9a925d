"""Evidence from the server and from the exit-status file, and the verdict."""

import pytest

from snakemake_executor_plugin_pbs.base.evidence import Evidence, Verdict
from snakemake_executor_plugin_pbs.base.states import JobState, JobStatus

PATIENCE = 300.0

RUNNING = JobStatus(JobState.RUNNING, "running")
DONE = JobStatus(JobState.SUCCEEDED, "finished")
BAD = JobStatus(JobState.FAILED, "failed with exit status 7")


def verdicts(
    answers: list[JobStatus | str | None], exit_status: int | None, interval: float = 10.0
) -> str:
    """First letters of the verdicts after each answer; "unknown" is a denial."""
    evidence, letters = Evidence(), ""
    for step, answer in enumerate(answers):
        now = step * interval
        if isinstance(answer, str):
            evidence.note_denial(now)
        else:
            evidence.note_status(answer, now)
        evidence.note_exit_status(exit_status, now)
        verdict, _ = evidence.verdict(now, PATIENCE)
        letters += verdict.name[0]
        if verdict is not Verdict.OPEN:
            break
    return letters


@pytest.mark.parametrize(
    ("answers", "exit_status", "expected"),
    [
        ([DONE], 0, "S"),
        ([DONE], 3, "F"),  # the exit-status file reports a failure
        ([DONE] * 31, None, "O" * 30 + "F"),  # no success without an exit-status file
        ([BAD], 7, "F"),
        ([BAD, RUNNING, BAD, RUNNING], None, "OOOO"),  # a server with false reports
        ([BAD] * 7, None, "OOOOOOF"),
        ([BAD] * 7, 0, "OOOOOOF"),  # killed while it ended
        ([RUNNING] * 31, 0, "O" * 30 + "S"),  # state E forever
        ([RUNNING] * 31, 4, "O" * 30 + "F"),
        ([RUNNING] * 40, None, "O" * 40),
        ([None] * 40, None, "O" * 40),  # a server that is down
        ([None] * 31, 0, "O" * 30 + "S"),
        (["unknown", "unknown"], 0, "OS"),  # purged history
        (["unknown", "unknown"], 1, "OF"),
        (["unknown"] * 31, None, "O" * 30 + "F"),
        ((["unknown"] * 20 + [RUNNING]) * 2, None, "O" * 42),
    ],
)
def test_verdicts_need_both_sources_or_patience(
    answers: list[JobStatus | str | None], exit_status: int | None, expected: str
) -> None:
    assert verdicts(answers, exit_status) == expected


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (JobStatus(JobState.DELETED, "was deleted while running"), "was deleted while running"),
        (JobStatus(JobState.FAILED, "used more than it requested: walltime"), "walltime"),
        (JobStatus(JobState.SUCCEEDED, "finished"), "failed with exit status 75"),
    ],
)
def test_the_end_of_a_bundle_explains_the_failure_of_its_current_task(
    reading: JobStatus, words: str
) -> None:
    evidence = Evidence()
    evidence.note_status(JobStatus(JobState.RUNNING, "ending"), 0.0)
    evidence.note_exit_status(75, 0.0)
    assert evidence.verdict(10.0, 300.0, bundled=True)[0] is Verdict.OPEN
    evidence.note_status(reading, 20.0)
    verdict, message = evidence.verdict(20.0, 300.0, bundled=True)
    assert verdict is Verdict.FAILED
    assert words in message


def test_a_failure_in_a_running_bundle_is_believed_after_a_while() -> None:
    evidence = Evidence()
    evidence.note_status(JobStatus(JobState.RUNNING, "running"), 0.0)
    evidence.note_exit_status(7, 0.0)
    verdicts = [evidence.verdict(now, 300.0, bundled=True) for now in (59.0, 61.0)]
    assert verdicts == [(Verdict.OPEN, ""), (Verdict.FAILED, "failed with exit status 7")]
