"""The stand-in for PBS answers like the real server whose replies are in pbs_replies."""

import json
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.replies import parse
from snakemake_executor_plugin_pbs.states import read
from tests.support.paths import REPLIES
from tests.support.pbs_servers import Pbs, real, stand_in, wait_for

pytestmark = pytest.mark.grid
OPTIONS = ("-j", "oe", "-A", "proj", "-q", "debug", "-l", "filesystems=home:flare")


@pytest.fixture
def pbs(tmp_path: Path):
    server = stand_in(tmp_path / "server")
    yield server
    server.stop()


def submit(pbs: Pbs, text: str, *options: str) -> str:
    script = pbs.folder / "script.sh"
    script.write_text(text)
    output = str(pbs.folder / "out")
    done = pbs.run("qsub", *OPTIONS, "-o", output, *options, str(script))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def attributes(pbs: Pbs, job_id: str) -> dict:
    text = pbs.run("qstat", "-x", "-f", "-F", "json", job_id).stdout
    return json.loads(text)["Jobs"][job_id]


def await_state(pbs: Pbs, job_id: str, state: str) -> dict:
    wait_for(lambda: attributes(pbs, job_id)["job_state"] == state, f"state {state}")
    return attributes(pbs, job_id)


def make(pbs: Pbs, name: str) -> str:
    """Submit a job and bring it into the state of a captured reply."""
    scripts = {"fail": "exit 7", "ok": "true"}
    short = ("-l", "walltime=00:00:01") if name == "walltime" else ()
    hold = ("-h",) if name in ("held", "qdel_queued") else ()
    large = ("-l", "select=9:ncpus=208") if name == "never" else ("-l", "select=1:ncpus=1")
    job_id = submit(pbs, scripts.get(name, "sleep 600"), "-N", name, *short, *hold, *large)
    if name in ("running", "qdel_running"):
        await_state(pbs, job_id, "R")
    if name in ("held", "qdel_queued"):
        await_state(pbs, job_id, "H")
    if name.startswith("qdel"):
        assert pbs.run("qdel", job_id).returncode == 0
    if name not in ("running", "held", "never"):
        await_state(pbs, job_id, "F")
    return job_id


@pytest.mark.parametrize(
    "name", ["ok", "fail", "walltime", "qdel_running", "qdel_queued", "held", "never", "running"]
)
def test_replies_have_the_fields_and_form_of_real_replies(pbs: Pbs, name: str) -> None:
    text = (REPLIES / f"{name}.json").read_text()
    [real] = json.loads(text)["Jobs"].values()
    job_id = make(pbs, name)
    mine = attributes(pbs, job_id)
    unset = {"filesystems", "Account_Name"} if name == "never" else set()  # not requested there
    sometimes = {"session_id"}  # missing if the job ended before qstat was called
    assert [key for key in mine if key not in unset | sometimes] == [
        key for key in real if key not in sometimes
    ]
    for key in ("job_state", "substate", "Exit_status", "Hold_Types", "queue"):
        assert mine.get(key) == real.get(key), key
    assert set(mine["Resource_List"]) - unset == set(real["Resource_List"])
    assert set(mine["Variable_List"]) == set(real["Variable_List"])
    last_words = str(real.get("comment", "")).split(" on ")[-1].partition(") ")[2]
    assert last_words in mine.get("comment", "")
    assert name != "never" or mine["comment"] == real["comment"]
    # Tabs and line ends also match: the parser of invalid replies depends on them.
    form = [line.split(":")[0] for line in text.splitlines() if "Job_Name" in line]
    shown = pbs.run("qstat", "-x", "-f", "-F", "json", job_id).stdout
    assert [line.split(":")[0] for line in shown.splitlines() if "Job_Name" in line] == form


def test_unknown_and_finished_jobs(pbs: Pbs) -> None:
    done = pbs.run("qstat", "-x", "-f", "-F", "json", "99999.pbs01")
    assert (done.returncode, done.stderr) == (153, (REPLIES / "unknown.err").read_text())
    assert set(json.loads(done.stdout)) == set(json.loads((REPLIES / "unknown.json").read_text()))
    job_id = make(pbs, "ok")
    done = pbs.run("qstat", "-f", "-F", "json", job_id)
    real = (REPLIES / "finished_without_x.err").read_text()
    assert (done.returncode, done.stderr) == (35, real.replace("111.pbs01", job_id))


@pytest.mark.parametrize(("options", "code"), [(("-q", "none"), 170), (("-l", "unheard=1"), 187)])
def test_qsub_refuses_wrong_options(pbs: Pbs, options: tuple[str, ...], code: int) -> None:
    done = pbs.run("qsub", *options, "/dev/null")
    assert done.returncode == code


def test_a_job_ends_although_its_output_cannot_be_written(pbs: Pbs) -> None:
    job_id = submit(pbs, "echo words", "-o", str(pbs.folder / "gone" / "out"))
    assert await_state(pbs, job_id, "F")["Exit_status"] == 0


def test_jobs_run_in_their_own_environment(pbs: Pbs) -> None:
    job_id = submit(pbs, 'echo "$PBS_JOBID $VIRTUAL_ENV $PATH"', "-N", "env")
    await_state(pbs, job_id, "F")
    assert (pbs.folder / "out").read_text() == f"{job_id}  /usr/bin:/bin\n"


@pytest.fixture
def front(tmp_path: Path, pbs: Pbs):
    """Front of a real PBS, with the stand-in in place of that PBS."""
    yield real(tmp_path / "front", pbs.folder / "bin")
    pbs.stop()


def parsed_reply(pbs: Pbs, fault: str, *ids: str) -> tuple:
    """Reply of qstat with a fault, as the executor parses it."""
    pbs.faults("qstat", fault)
    done = pbs.run("qstat", "-x", "-f", "-F", "json", *ids)
    answer = parse(done.returncode, done.stdout, errors=done.stderr)
    jobs = {number: read(job) for number, job in answer.jobs.items()}
    return jobs, answer.unknown, answer.fault, done.returncode


def test_a_front_makes_a_server_fail_like_the_stand_in(front: Pbs, pbs: Pbs) -> None:
    ids = [make(front, name) for name in ("ok", "running")]
    assert {job["id"]: job["state"] for job in front.jobs()} == dict(zip(ids, "FR", strict=True))
    faults = (
        "", "down", "empty", "forgetful", "lie-failed", "lie-finished", "first", "truncated",
        "malformed",
    )  # fmt: skip
    replies = [parsed_reply(front, fault, *ids) for fault in faults]
    assert replies == [parsed_reply(pbs, fault, *ids) for fault in faults]
    assert all(reply != replies[0] for reply in replies[1:-1])
    for server in (front, pbs):
        server.set(purged=[100])
    assert parsed_reply(front, "", *ids) == parsed_reply(pbs, "", *ids)
    for command, fault in (
        ("qsub", "down"),
        ("qsub", "full"),
        ("qselect", "down"),
        ("qdel", "down"),
    ):
        for server in (front, pbs):
            server.faults(command, fault)
        codes = [server.run(command, "-N", "name").returncode for server in (front, pbs)]
        assert codes[0] == codes[1] > 0
    assert (
        pbs.run("qselect", "-N", "running").stdout == front.run("qselect", "-N", "running").stdout
    )


def test_a_front_holds_jobs_without_room(front: Pbs) -> None:
    front.set(slots=1)
    first = submit(front, "sleep 600")
    second = submit(front, "true")
    assert await_state(front, first, "R")
    assert attributes(front, second)["Hold_Types"] == "u"
    assert front.run("qdel", first).returncode == 0
    assert await_state(front, second, "F")["Exit_status"] == 0
