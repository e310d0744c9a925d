"""Replies of a real server, complete and damaged, and the status of jobs in them."""

import json

import pytest

from snakemake_executor_plugin_pbs.base.commands import number
from snakemake_executor_plugin_pbs.base.states import JobState, JobStatus
from snakemake_executor_plugin_pbs.commands import parse
from snakemake_executor_plugin_pbs.states import STATES, read
from tests.support.paths import REPLIES

# Reply of the real server -> status of its job.
EXPECTED = {
    "ok": (JobState.SUCCEEDED, "finished"),
    "fail": (JobState.FAILED, "failed with exit status 7"),
    "walltime": (
        JobState.FAILED,
        "used more than it requested and was killed by PBS: walltime; raise runtime",
    ),
    "qdel_running": (JobState.DELETED, "was deleted while running by root@pbs01"),
    "qdel_queued": (JobState.DELETED, "was deleted while in the queue"),
    "held": (JobState.HELD, "held by a user"),
    "never": (
        JobState.NEVER,
        "can never run: Insufficient amount of resource: ncpus (R: 1872 A: 16 T: 16)",
    ),
    "running": (JobState.RUNNING, "running"),
}


def reply(name: str) -> str:
    return (REPLIES / f"{name}.json").read_text()


def job(name: str) -> dict:
    [attributes] = parse(0, reply(name), errors="").jobs.values()
    return attributes


@pytest.mark.parametrize("name", EXPECTED)
def test_each_captured_reply_has_its_status(name: str) -> None:
    assert read(job(name)) == JobStatus(*EXPECTED[name])


def test_messages_differ() -> None:
    assert len({message for _, message in EXPECTED.values()}) == len(EXPECTED)


def test_success_needs_state_exit_status_and_substate() -> None:
    ok = job("ok")
    for change in ({"substate": 91}, {"substate": 93}, {"Exit_status": 1}, {"job_state": "R"}):
        status = read({**ok, **change})
        assert status
        assert status.state is not JobState.SUCCEEDED
    for missing in ("substate", "Exit_status", "job_state"):
        status = read({key: value for key, value in ok.items() if key != missing})
        assert status is None or status.state is not JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("exit_status", "words"),
    [(-4, "lost with its node"), (-14, "lost with its node"), (-20, "lost with its node"),
     (-27, "memory"), (-17, "hook"), (-3, "could not be started"), (271, "killed by signal 15"),
     (-99, "unknown exit status -99"), (1, "failed with exit status 1")],
)  # fmt: skip
def test_exit_statuses_have_messages(exit_status: int, words: str) -> None:
    status = read({"job_state": "F", "substate": 93, "Exit_status": exit_status})
    assert status
    assert status.state is JobState.FAILED
    assert words in status.message


@pytest.mark.parametrize("letter", STATES)
def test_jobs_in_other_states_are_active(letter: str) -> None:
    status = read({"job_state": letter, "substate": 92, "Exit_status": 0})
    assert status
    assert status.active


def test_incomplete_attributes_have_no_status() -> None:
    for job in ({}, {"job_state": "?"}, {"job_state": "F"}, {"job_state": "F", "substate": "x"}):
        assert read(job) is None


def test_unknown_and_finished_jobs() -> None:
    answer = parse(153, reply("unknown"), errors=(REPLIES / "unknown.err").read_text())
    assert (answer.jobs, answer.unknown, answer.fault) == ({}, {"99999"}, "")
    # Without -x, a finished job is an error of its own, which is not the same as an unknown job.
    errors = (REPLIES / "finished_without_x.err").read_text()
    answer = parse(35, reply("finished_without_x"), errors=errors)
    assert (answer.jobs, answer.unknown) == ({}, set())
    assert "exit status 35" in answer.fault


def both() -> str:
    """Reply with two jobs."""
    first, second = json.loads(reply("ok")), json.loads(reply("running"))
    first["Jobs"] |= second["Jobs"]
    text = json.dumps(first, indent="\t", separators=(",", ":\t"))
    assert set(parse(0, text, errors="").jobs) == {"111", "110"}
    return text


def test_only_complete_jobs_of_a_truncated_reply_are_used() -> None:
    text = both()
    complete = parse(0, text, errors="").jobs
    counts = set()
    for length in range(0, len(text), 7):
        answer = parse(0, text[:length], errors="")
        assert answer.fault
        assert not answer.unknown
        for name, attributes in answer.jobs.items():
            assert read(attributes) == read(complete[name])
        counts.add(len(answer.jobs))
    assert counts == {0, 1, 2}


@pytest.mark.parametrize("value", ["005", "\\'x", '() {\necho "a"\n}', "NaN,"])
def test_all_jobs_of_a_reply_with_an_invalid_value_are_used(value: str) -> None:
    text = both().replace('"PBS_O_LANG":\t"C.UTF-8"', f'"PBS_O_LANG":\t{value}')
    answer = parse(0, text, errors="")
    assert {name: read(attributes) for name, attributes in answer.jobs.items()} == {
        "111": JobStatus(*EXPECTED["ok"]),
        "110": JobStatus(*EXPECTED["running"]),
    }


@pytest.mark.parametrize("text", ["", "\n", "[]", "null", "{}", '{"Jobs": []}', "qstat: error\n"])
def test_other_replies_have_a_fault_and_no_jobs(text: str) -> None:
    answer = parse(0, text, errors="")
    assert (answer.jobs, answer.unknown) == ({}, set())
    assert answer.fault


def test_a_reported_job_is_not_unknown() -> None:
    answer = parse(153, reply("running"), errors="qstat: Unknown Job Id 110.pbs01\n")
    assert set(answer.jobs) == {"110"}
    assert not answer.unknown


def test_ids_are_compared_by_number() -> None:
    assert number("123.server") == number("123.server.site.org\n") == "123"
