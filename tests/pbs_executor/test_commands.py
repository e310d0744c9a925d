"""Commands of PBS: types of their errors, replies of qstat, and commands that hang."""

import itertools
import json
import os
import re
import select
import threading
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs import commands as pbs_commands
from snakemake_executor_plugin_pbs.base.commands import Later, Refused, Unreachable, Unsure
from snakemake_executor_plugin_pbs.commands import PBS, PbsCommands
from tests.support.pbs_servers import Pbs, stand_in


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


ERRORS = [
    *((text, Later) for text in pbs_commands._LATER),
    *((text, Unsure) for text in pbs_commands._UNSURE),
    ("Unauthorized Request", Refused),
    ("Job violates queue and/or server resource limits", Refused),
]


@pytest.mark.parametrize(("text", "error"), ERRORS)
def test_errors_of_qsub_have_types(programs: Path, text: str, error: type[Exception]) -> None:
    write(programs, "qsub", f"echo 'qsub: {text.capitalize()} (of some sort)' >&2; exit 1")
    with pytest.raises(error, match="of some sort"):
        PbsCommands(60).submit((), Path("job.sh"))


def test_a_missing_qsub_is_an_unreachable_server(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(Later, match="cannot connect: qsub: No such file"):
        PbsCommands(60).submit((), Path("job.sh"))


def test_a_command_that_hangs_is_killed_with_the_processes_of_its_wrapper(programs: Path) -> None:
    pids = programs / "pids"
    for name in ("qsub", "qstat", "qselect", "qdel"):
        write(programs, name, f"sh -c 'echo $$ >> {pids}; exec sleep 600'; true")
    server = PbsCommands(timeout=1)
    with pytest.raises(Unsure, match=r"no answer in 1 s"):
        server.submit((), Path("job.sh"))
    with pytest.raises(Unreachable, match=r"no answer in 1 s"):
        server.find("name")
    assert server.status(["1.pbs01"]).fault == server.delete(["1.pbs01"]) == "no answer in 1 s"
    started = pids.read_text().split()
    assert 1 <= len(started) <= 4  # the timeout may be over before one starts
    for pid in started:
        assert ends(int(pid))


def ends(pid: int) -> bool:
    """Whether a process has ended or ends soon: a kill takes a moment."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 60)[0])
    finally:
        os.close(process)


def test_a_status_call_behind_a_wrapper_is_killed_at_once(programs: Path) -> None:
    fifo = programs / "started"
    os.mkfifo(fifo)
    write(programs, "qstat", f"sh -c 'echo > {fifo}; exec sleep 600'; true")
    server = PbsCommands(timeout=600)
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(server.status(["1"]).fault))
    thread.start()
    fifo.read_text()  # waits until qstat has started
    server.stop_status()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert answers
    assert server.status(["1"]).fault == "exit status 1: stopped"


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pbs:
    """Stand-in whose jobs all wait."""
    server = stand_in(tmp_path / "server")
    monkeypatch.setenv("PATH", server.environment["PATH"])
    return server


def add_jobs(pbs: Pbs, count: int) -> list[str]:
    """Add waiting jobs to a server and return their ids."""
    template = {
        "name": "n", "state": "Q", "substate": 10, "queue": "debug", "account": None,
        "asked": {"select": "1:ncpus=1", "place": "free", "walltime": "1"}, "output": "",
        "held": False, "ctime": 1.0, "workdir": "/", "arguments": "", "script": "", "run_count": 0,
    }  # fmt: skip
    for number in range(100, 100 + count):
        job = json.dumps({**template, "number": number})
        (pbs.folder / "jobs" / f"{number}.json").write_text(job)
    return [f"{number}.pbs01" for number in range(100, 100 + count)]


def requests(pbs: Pbs) -> list[int]:
    """Number of status requests of each qstat."""
    return [int(line) for line in (pbs.folder / "requests").read_text().split()]


def test_two_thousand_jobs_are_one_request(pbs: Pbs) -> None:
    ids = add_jobs(pbs, 2000)
    pbs.set(first_only=True)
    answer = PbsCommands(600).status(ids)
    assert (len(answer.jobs), answer.unknown, answer.fault) == (2000, set(), "")
    assert requests(pbs) == [1]


def test_an_omitted_id_is_unknown_if_the_server_denies_it(pbs: Pbs) -> None:
    ids = add_jobs(pbs, 5)
    pbs.set(first_only=True, purged=[101, 103])
    server = PbsCommands(60)
    answer = server.status(ids)
    assert (set(answer.jobs), answer.unknown) == ({"100", "102", "104"}, {"101", "103"})
    assert (answer.fault, answer.omitted) == ("", 0)
    assert requests(pbs) == [1, 1]
    pbs.set(purged=[100, 101, 102, 103, 104])
    assert server.status(ids).unknown == {"100", "101", "102", "103", "104"}
    assert requests(pbs) == [1, 1, 1]


def test_a_qstat_that_does_not_know_express_is_called_without_it(pbs: Pbs) -> None:
    ids = add_jobs(pbs, 3)
    pbs.set(express=False, purged=[102])
    server = PbsCommands(60)
    for _ in range(2):
        answer = server.status(ids)
        assert (set(answer.jobs), answer.unknown, answer.fault) == ({"100", "101"}, {"102"}, "")
    assert [call[0] for _, call in pbs.calls("qstat")] == ["-E", "-x", "-x"]


def test_all_jobs_are_known_if_qstat_prints_only_the_first(pbs: Pbs) -> None:
    ids = add_jobs(pbs, 3)
    pbs.set(express=False, first_only=True)
    answer = PbsCommands(60).status(ids)
    assert (set(answer.jobs), answer.unknown, answer.omitted) == ({"100", "101"}, set(), 2)


def test_a_truncated_reply_denies_no_job(pbs: Pbs) -> None:
    ids = add_jobs(pbs, 3)
    pbs.faults("qstat", "truncated")
    answer = PbsCommands(60).status(ids)
    assert answer.fault
    assert not answer.unknown
    assert len(pbs.calls("qstat")) == 1


@pytest.mark.parametrize("code", [0, 1])
def test_qstat_is_called_without_x_if_the_server_has_no_history(programs: Path, code: int) -> None:
    calls = programs / "calls"
    text = "qstat: PBS is not configured to maintain job history"
    write(
        programs, "qstat",
        f'echo "$*" >> {calls}\n'
        f'test "$2" = -x && {{ echo \'{{"timestamp": 1}}\'; echo "{text}" >&2; exit {code}; }}\n'
        'case "$*" in *1.pbs01*) '
        'echo \'{"timestamp": 1, "Jobs": {"1.pbs01": {"job_state": "R"}}}\'; exit;; esac\n'
        'echo \'{"timestamp": 1}\'; echo "qstat: Unknown Job Id 2.pbs01" >&2; exit 153',
    )  # fmt: skip
    server = PbsCommands(60)
    for _ in range(2):
        answer = server.status(["1.pbs01", "2.pbs01"])
        assert (answer.jobs, answer.unknown) == ({"1": {"job_state": "R"}}, {"2"})
    asked = calls.read_text().splitlines()
    both, second = "-E -f -F json 1.pbs01 2.pbs01", "-E -f -F json 2.pbs01"
    assert asked == ["-E -x -f -F json 1.pbs01 2.pbs01", both, second, both, second]


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("qdel: Unknown Job Id 1.pbs01", 153, ""),
        ("qdel: Job has finished 1.pbs01", 35, ""),
        ("qdel: Unauthorized Request 1.pbs01", 159, "qdel: Unauthorized Request 1.pbs01"),
        ("qdel: cannot connect to server pbs01 (errno=111)", 111, "cannot connect"),
        ("", 1, "exit status 1"),
        ("a message of the site", 0, ""),
    ],
)
def test_qdel_returns_its_errors(programs: Path, text: str, code: int, expected: str) -> None:
    write(programs, "qdel", f'test -z "{text}" || echo "{text}" >&2; exit {code}')
    message = PbsCommands(60).delete(["1.pbs01"])
    assert (expected in message) if expected else not message


def test_no_error_has_two_types() -> None:
    for later, unsure in itertools.product(pbs_commands._LATER, pbs_commands._UNSURE):
        assert later not in unsure
        assert unsure not in later


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("/lus/flare/A project, 100 % (mine)", ""),
        ("/home/Münster", "has 'ü', and qsub takes only printable ASCII"),
        ("/tmp/a\tb", r"has '\\t', and qsub"),
        ("/tmp/a:b", "has a colon"),
        ("/tmp/" + "x" * 900, "has 905 characters, and qsub takes about 900"),
    ],
)
def test_folders_that_qsub_refuses_have_a_reason(folder: str, words: str) -> None:
    reason = PBS.refused(Path(folder))
    assert re.search(words, reason) if words else not reason


def test_messages_do_not_repeat_the_name_of_the_command(programs: Path) -> None:
    write(programs, "qsub", "echo 'qsub: Unknown queue' >&2; exit 170")
    with pytest.raises(Refused, match=r"^Unknown queue \(exit status 170\)$"):
        PbsCommands(60).submit((), Path("job.sh"))
