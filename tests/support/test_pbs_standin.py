"""The stand-in for PBS answers like the real server whose replies are in pbs_replies."""

import json
from pathlib import Path

import pytest

from tests.support.paths import REPLIES
from tests.support.pbs_servers import Pbs, stand_in, wait_for

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
