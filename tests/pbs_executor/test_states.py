"""What the executor makes of replies of a real server, whole and damaged, and of two witnesses."""

import json

import pytest

from snakemake_executor_plugin_pbs.evidence import Belief, Evidence
from snakemake_executor_plugin_pbs.replies import number, parse
from snakemake_executor_plugin_pbs.states import STATES, Kind, Reading, read
from tests.support.paths import REPLIES

PATIENCE = 300.0

# Reply of the real server -> what is made of it.
EXPECTED = {
    "ok": (Kind.SUCCEEDED, "finished"),
    "fail": (Kind.FAILED, "failed with exit status 7"),
    "walltime": (
        Kind.FAILED,
        "used more than was asked for and was killed by PBS: walltime; raise runtime",
    ),
    "qdel_running": (Kind.DELETED, "was deleted while running by root@pbs01"),
    "qdel_queued": (Kind.DELETED, "was deleted while in the queue"),
    "held": (Kind.HELD, "held by a user"),
    "never": (
        Kind.NEVER,
        "can never run: Insufficient amount of resource: ncpus (R: 1872 A: 16 T: 16)",
    ),
    "running": (Kind.RUNNING, "running"),
}


def reply(name: str) -> str:
    return (REPLIES / f"{name}.json").read_text()


def job(name: str) -> dict:
    [found] = parse(0, reply(name), "").jobs.values()
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_each_captured_state_is_told_apart(name: str) -> None:
    assert read(job(name)) == Reading(*EXPECTED[name])


def test_messages_differ() -> None:
    assert len({message for _, message in EXPECTED.values()}) == len(EXPECTED)


def test_success_needs_state_exit_status_and_substate() -> None:
    ok = job("ok")
    for change in ({"substate": 91}, {"substate": 93}, {"Exit_status": 1}, {"job_state": "R"}):
        found = read({**ok, **change})
        assert found
        assert found.kind is not Kind.SUCCEEDED
    for missing in ("substate", "Exit_status", "job_state"):
        found = read({key: value for key, value in ok.items() if key != missing})
        assert found is None or found.kind is not Kind.SUCCEEDED


@pytest.mark.parametrize(
    ("status", "words"),
    [(-4, "lost with its node"), (-14, "lost with its node"), (-20, "lost with its node"),
     (-27, "memory"), (-17, "hook"), (-3, "could not be started"), (271, "killed by signal 15"),
     (-99, "unknown exit status -99"), (1, "failed with exit status 1")],
)  # fmt: skip
def test_exit_statuses_have_words(status: int, words: str) -> None:
    found = read({"job_state": "F", "substate": 93, "Exit_status": status})
    assert found
    assert found.kind is Kind.FAILED
    assert words in found.message


@pytest.mark.parametrize("state", STATES)
def test_no_other_state_is_an_end(state: str) -> None:
    found = read({"job_state": state, "substate": 92, "Exit_status": 0})
    assert found
    assert found.active


def test_what_says_too_little_is_no_reading() -> None:
    for told in ({}, {"job_state": "?"}, {"job_state": "F"}, {"job_state": "F", "substate": "x"}):
        assert read(told) is None


def test_unknown_and_finished_jobs() -> None:
    answer = parse(153, reply("unknown"), (REPLIES / "unknown.err").read_text())
    assert (answer.jobs, answer.unknown, answer.fault) == ({}, {"99999"}, "")
    # Asked without history, a finished job is not told of; that is not the same as unknown.
    errors = (REPLIES / "finished_without_x.err").read_text()
    answer = parse(35, reply("finished_without_x"), errors)
    assert (answer.jobs, answer.unknown) == ({}, set())
    assert "exit status 35" in answer.fault


def both() -> str:
    """One reply about two jobs."""
    first, second = json.loads(reply("ok")), json.loads(reply("running"))
    first["Jobs"] |= second["Jobs"]
    text = json.dumps(first, indent="\t", separators=(",", ":\t"))
    assert set(parse(0, text, "").jobs) == {"111", "110"}
    return text


def test_of_a_reply_cut_off_anywhere_only_whole_jobs_are_used() -> None:
    text = both()
    whole = parse(0, text, "").jobs
    seen = set()
    for length in range(0, len(text), 7):
        answer = parse(0, text[:length], "")
        assert answer.fault
        assert not answer.unknown
        for name, found in answer.jobs.items():
            assert read(found) == read(whole[name])
        seen.add(len(answer.jobs))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("value", ["005", "\\'x", '() {\necho "a"\n}', "NaN,"])
def test_a_value_that_is_no_json_hides_no_job(value: str) -> None:
    text = both().replace('"PBS_O_LANG":\t"C.UTF-8"', f'"PBS_O_LANG":\t{value}')
    answer = parse(0, text, "")
    assert {name: read(found) for name, found in answer.jobs.items()} == {
        "111": Reading(*EXPECTED["ok"]),
        "110": Reading(*EXPECTED["running"]),
    }


@pytest.mark.parametrize("text", ["", "\n", "[]", "null", "{}", '{"Jobs": []}', "qstat: error\n"])
def test_other_replies_tell_nothing(text: str) -> None:
    answer = parse(0, text, "")
    assert (answer.jobs, answer.unknown) == ({}, set())
    assert answer.fault


def test_a_job_that_is_told_of_is_not_unknown() -> None:
    answer = parse(153, reply("running"), "qstat: Unknown Job Id 110.pbs01\n")
    assert set(answer.jobs) == {"110"}
    assert not answer.unknown


def test_ids_are_compared_by_number() -> None:
    assert number("123.server") == number("123.server.site.org\n") == "123"


RUNNING, DONE = Reading(*EXPECTED["running"]), Reading(*EXPECTED["ok"])
BAD = Reading(*EXPECTED["fail"])


def believed(readings: list[Reading | str | None], status: int | None, every: float = 10.0) -> str:
    """Belief after these answers, one an interval; "unknown" is a denial."""
    evidence, found = Evidence(), ""
    for step, reading in enumerate(readings):
        now = step * every
        if isinstance(reading, str):
            evidence.note_denial(now)
        else:
            evidence.note_reading(reading, now)
        evidence.note_exit_status(status, now)
        belief, _ = evidence.belief(now, PATIENCE)
        found += belief.name[0]
        if belief is not Belief.OPEN:
            break
    return found


@pytest.mark.parametrize(
    ("readings", "status", "expected"),
    [
        ([DONE], 0, "S"),
        ([DONE], 3, "F"),  # its own word is the worse one
        ([DONE] * 31, None, "O" * 30 + "F"),  # never a success without its own word
        ([BAD], 7, "F"),
        ([BAD, RUNNING, BAD, RUNNING], None, "OOOO"),  # a server that lies now and then
        ([BAD] * 7, None, "OOOOOOF"),
        ([BAD] * 7, 0, "OOOOOOF"),  # killed while it was ending
        ([RUNNING] * 31, 0, "O" * 30 + "S"),  # for ever in the state E
        ([RUNNING] * 31, 4, "O" * 30 + "F"),
        ([RUNNING] * 40, None, "O" * 40),
        ([None] * 40, None, "O" * 40),  # a server that is down
        ([None] * 31, 0, "O" * 30 + "S"),
        (["unknown", "unknown"], 0, "OS"),  # history that was purged
        (["unknown", "unknown"], 1, "OF"),
        (["unknown"] * 31, None, "O" * 30 + "F"),
        ((["unknown"] * 20 + [RUNNING]) * 2, None, "O" * 42),
    ],
)
def test_two_witnesses(
    readings: list[Reading | str | None], status: int | None, expected: str
) -> None:
    assert believed(readings, status) == expected
