"""The workflow through profiles/slurm on a real Slurm of three nodes, with several failures."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.paths import ROOT
from tests.support.pbs_servers import wait_for
from tests.support.runs import launch, losses, weights
from tests.support.slurm_cluster import MISSING, PATIENCE, Slurm, slurm
from tests.support.workflows import CONFIG, make_workspace
from tokamake import files
from tokamake.batch_systems import seconds_of
from tokamake.config.resolved_run import read_run, write_run
from tokamake.doctor.profile import Profile
from tokamake.doctor.scheduler import check_scheduler

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"
    ),
]

DEADLINE = 900  # seconds for a step of the workflow on a busy machine
CANCELLED = 240  # seconds until a controller ends after a signal
STAGE = "results/data/batches/tokenize/{}.json"

# Replaces tokamake: records the job of each stage, and lets a stage fail or wait if the test has
# written a file for it. Training can hang, as on a node that hangs.
SHIM = """\
#!/bin/bash
stage=$1
[ "$stage" = tokenize ] && stage=tokenize-$5
echo "$SLURM_JOB_ID $SLURMD_NODENAME" >> "$SHIM/$stage.begun"
if rm "$SHIM/$stage.fails" 2>/dev/null; then echo failed on purpose >&2; exit 1; fi
while [ -e "$SHIM/$stage.waits" ]; do sleep 0.05; done
[ "$stage" = train ] && exec {python} "$SHIM/train.py" "$@"
exec {tokamake} "$@"
"""

# Training hangs after the checkpoint of a step with a file STEP.hangs, until the file is removed or
# a signal arrives; with STEP.deaf, only SIGKILL ends it.
TRAIN = """\
import os
import time
from pathlib import Path

from tokamake.cli import main
from tokamake.train import resume
from tokamake.train.stop_signals import StopRequest

commit, note, shim = resume.commit, StopRequest.note, Path(os.environ["SHIM"])
asked = []


def commit_and_hang(output, state):
    folder = commit(output, state)
    deaf = (shim / f"{state.step}.deaf").exists()
    while (shim / f"{state.step}.hangs").exists() and (deaf or not asked):
        (shim / f"{state.step}.hung").touch()
        time.sleep(0.05)
    return folder


def note_and_go_on(*arguments):
    note(*arguments)
    asked.append(True)


resume.commit, StopRequest.note = commit_and_hang, note_and_go_on
main()
"""

# Replaces sbatch: submits, then delays its answer while the file sbatch.waits exists.
SBATCH = """\
#!/bin/bash
answer=$({sbatch} "$@") || exit
while [ -e "$SHIM/sbatch.waits" ]; do : > "$SHIM/sbatch.stalls"; sleep 0.05; done
echo "$answer"
"""


@dataclass
class Site:
    """A user's folder on a cluster.

    Args:
        folder: the user's.
        shim: files by which the test controls stages.
        slurm: the cluster.
    """

    folder: Path
    shim: Path
    slurm: Slurm
    profile: str = "slurm"
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start Snakemake."""
        path = f"{self.shim}/commands:{self.slurm.environment['PATH']}"
        environment = {
            **self.slurm.environment, "PATH": path, "SHIM": str(self.shim),
            "HOME": str(self.folder), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (self.folder / "controller.log").open("a") as log:
            process = subprocess.Popen(
                [
                    self.shim / "bin/python", "-m", "snakemake",
                    "--profile", f"profiles/{self.profile}",
                    "--configfile", "my.yaml", "--seconds-between-status-checks", "1",
                    "--latency-wait", "10", "--sbatch-patience", "10",
                    "--set-threads", "tokenize=1", "train=1", *arguments,
                ],
                cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.controllers.append(process)
        return process

    def control(self, stage: str, action: str) -> Path:
        """Let a stage fail once, wait or hang."""
        path = self.shim / f"{stage}.{action}"
        path.touch()
        return path

    def begun(self, stage: str) -> list[tuple[str, ...]]:
        """Jobs in which a stage began, with their nodes."""
        path = self.shim / f"{stage}.begun"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(line.split()) for line in lines]

    def await_begun(self, stage: str, times: int) -> tuple[str, ...]:
        """Wait until a stage has begun `times` times; return its last job and node."""
        wait_for(lambda: len(self.begun(stage)) >= times, f"{stage}\n{self.text}", DEADLINE)
        return self.begun(stage)[-1]

    def await_hang(self, step: int) -> str:
        """Wait until training hangs after the checkpoint of a step; return its job."""
        hung = self.shim / f"{step}.hung"
        ended = self.controllers[-1].poll
        wait_for(lambda: hung.exists() or ended() is not None, f"{hung}\n{self.text}", DEADLINE)
        assert ended() is None, self.text
        return self.begun("train")[-1][0]

    def stopped(self, why: str) -> int:
        """Step at which training stopped, from the log of a job."""
        texts = [path.read_text() for path in self.folder.glob(".snakemake/slurm/*/*.log")]
        text = "\n".join([self.text, *texts])
        match = re.search(rf"^stopped {why}: saved at step (\d+), run the same", text, re.M)
        assert match, text
        return int(match[1])

    def log(self, segment: str = "") -> str:
        """Output of a training job."""
        return (self.folder / f"logs/smoke/train{segment}.log").read_text()

    @property
    def text(self) -> str:
        """Output of Snakemake so far."""
        return (self.folder / "controller.log").read_text()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as running:
        yield running


@pytest.fixture
def site(tmp_path: Path, sampled: Path, cluster: Slurm) -> Iterator[Site]:
    folder = make_workspace(tmp_path)
    row = f"all\t{sampled}/raw/*/*-00.jsonl\ttext\t1\n"
    (folder / "corpora.tsv").write_text(f"corpus\tfiles\ttext_key\tweight\n{row}")
    config = {
        **CONFIG,
        "sample_corpus": {},
        "tokenizer": {"path": str(sampled / "tokenizer")},
        "plan": {"shard_bytes": 1000, "max_jobs": 2},
        "train": {
            **CONFIG["train"],
            "train_steps": 30,
            "segment_steps": 10,
            "evaluation_interval": 10,
            "save_interval": 2,
        },
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    user_file = folder / ".config/tokamake/slurm.yaml"
    user_file.parent.mkdir(parents=True)
    user_file.write_text("account: mine\npartition: all\n")
    workspace = Site(folder, make_shim(folder / "shim"), cluster)
    yield workspace
    for controller in workspace.controllers:
        controller.kill()
        controller.wait()
    if jobs := cluster.jobs():
        cluster.run("scancel", *jobs)
    wait_for(cluster.is_idle, "idle nodes")


def make_shim(folder: Path) -> Path:
    """Copy this Python environment, with the shim as its `tokamake`."""
    programs, own = folder / "bin", Path(sys.prefix)
    programs.mkdir(parents=True)
    (folder / "lib").symlink_to(own / "lib")
    shutil.copy(own / "pyvenv.cfg", folder)
    (programs / "python").symlink_to(sys.executable)
    (folder / "commands").mkdir()
    (folder / "train.py").write_text(TRAIN)
    real = {"tokamake": str(own / "bin/tokamake"), "python": sys.executable, "sbatch": _sbatch()}
    for path, text in ((programs / "tokamake", SHIM), (folder / "commands/sbatch", SBATCH)):
        for name, command in real.items():
            text = text.replace(f"{{{name}}}", command)
        path.write_text(text)
        path.chmod(0o755)
    return folder


def _sbatch() -> str:
    return str(shutil.which("sbatch"))


TRAINING = (
    "train:nodes=2",
    "train:tasks=2",
    # Jobs of the first segment have little time, but enough to start on a busy machine.
    "train:runtime=6 if '10' in wildcards.segment else 10",
    "train:signal='TERM@120'",
)


@pytest.mark.grid
def test_a_chain_of_jobs_survives_time_limits_signals_and_a_lost_node(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed shard reruns alone; training on two nodes is interrupted in four ways."""
    site.control("tokenize-all-00000", "fails")
    # Checkpoints are two steps apart at most; a job that is asked to stop does one more step.
    for step in (2, 6, 12, 22):
        site.control(str(step), "hangs")
    evaluations = [f"results/smoke/evaluate.{step}.json" for step in (10, 20)]
    site.control("12", "deaf")
    controller = site.start(
        "--retries", "2", "--set-resources", *TRAINING, "--", "train", *evaluations
    )
    _runs_out_of_time(site)
    undisturbed = _resolved_again(site)
    monkeypatch.chdir(site.folder)
    with ThreadPoolExecutor(1) as pool:  # meanwhile the cluster waits for the clock of Slurm
        trained_here = pool.submit(launch, undisturbed, ranks=2)
        _is_warned(site)
        killed = _is_killed_by_slurm(site)
        requeued = _loses_a_node(site)
        assert controller.wait(DEADLINE) == 0, site.text
        trained_here.result()
    why = "used more than it requested and was killed by Slurm: time"
    assert re.search(rf"job {killed}( of rule train)? {why}", site.text), site.text
    assert "continuing at step 22" in site.log()
    assert [len(site.begun(f"tokenize-all-0000{batch}")) for batch in range(2)] == [2, 1]
    assert all((site.folder / path).exists() for path in evaluations)
    for segment in (".10", ".20", ""):
        assert (site.folder / f"results/smoke/train{segment}.json").exists()
    begun = site.begun("train")
    pairs = [begun[place : place + 2] for place in range(0, len(begun), 2)]
    assert len(pairs) == 7
    assert all(first[0] == second[0] and first[1] != second[1] for first, second in pairs)
    assert [pair[0][0] for pair in pairs].count(requeued) == 2

    expected, trained = weights(undisturbed), weights(site.folder / "results/smoke/run.yaml")
    assert expected.keys() == trained.keys()
    assert all(torch.equal(expected[name], trained[name]) for name in expected)


def _resolved_again(site: Site) -> Path:
    """Copy of the run with its own folder."""
    path = site.folder / "undisturbed/run.yaml"
    path.parent.mkdir()
    run = read_run(site.folder / "results/smoke/run.yaml")
    write_run(path, run.model_copy(update={"output": path.parent / "training"}))
    return path


def _runs_out_of_time(site: Site) -> None:
    """A slow job stops itself before Slurm ends it."""
    job = site.await_hang(2)
    listed = site.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%D %a")
    assert listed == "2 mine\n"

    def remaining() -> float:
        seconds = site.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%L")
        return seconds_of(seconds.strip()) or 0

    at_first = remaining()
    # Two such steps and two such checkpoints do not fit here, but they do in the next job.
    wait_for(lambda: remaining() <= 0.8 * at_first, "time to pass", DEADLINE)
    (site.shim / "2.hangs").unlink()
    site.await_begun("train", 4)
    assert site.stopped("before the end of the job")
    # A job that made progress is no failure: the executor submits the next job.
    moved = rf"job {job} of rule train failed with exit status 1; saved at step \d+; a new job"
    assert re.search(moved, site.text), site.text


def _is_warned(site: Site) -> None:
    """Slurm sends the signal of the profile, and the ranks save."""
    job = site.await_hang(6)
    step = site.stopped("before the end of the job")
    assert f"continuing at step {step}" in site.log(".10")
    site.slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now+135")
    site.await_begun("train", 6)
    assert site.stopped("by SIGTERM")


def _is_killed_by_slurm(site: Site) -> str:
    """Slurm kills a job that ignores SIGTERM at its time limit; return its id."""
    job = site.await_hang(12)
    assert "continuing at step 10" in site.log(".20")
    site.slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now+1")
    site.await_begun("train", 10)
    return job


def _loses_a_node(site: Site) -> str:
    """The node of the batch script dies, and Slurm requeues the job; return its id."""
    job = site.await_hang(22)
    assert "continuing at step 12" in site.log(".20")
    assert "continuing at step 20" in site.log()
    batch = _batch_node(site, job)
    with _lost(site, batch):
        (site.shim / "22.hangs").unlink()
        site.await_begun("train", 14)
    assert batch not in {node for _, node in site.begun("train")[12:]}
    return job


@pytest.mark.grid
@pytest.mark.fault("lost node")
def test_spare_nodes_replace_lost_ones_in_the_same_job(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks continue without a node that they lose; without that of the script, in a new job."""
    config = yaml.safe_load((site.folder / "my.yaml").read_text())
    config["train"] |= {"train_steps": 10, "segment_steps": None}
    (site.folder / "my.yaml").write_text(yaml.safe_dump(config))
    for step in (4, 6):
        site.control(str(step), "hangs")
    controller = site.start("--set-resources", *TRAINING, "train:spare_nodes=1", "--", "train")
    first = site.await_hang(4)
    assert site.slurm.run("squeue", "--noheader", f"--jobs={first}", "--format=%D") == "3\n"
    (node,) = {node for _, node in site.begun("train")} - {_batch_node(site, first)}
    with _lost(site, node):
        assert site.await_hang(6) == first
    begun = site.begun("train")
    assert {job for job, _ in begun} == {first}
    assert len({lost for _, lost in begun[:2]} - {kept for _, kept in begun[2:]}) == 1
    assert re.search(
        rf"^tokamake: {node} does not answer; continues on n\d, n\d$", site.log(), re.M
    )
    assert "continuing at step 4" in site.log()

    with _lost(site, _batch_node(site, first)):
        (site.shim / "6.hangs").unlink()
        text = f"job {first} of rule train lost the node of its script"
        wait_for(lambda: text in site.text, f"it\n{site.text}", DEADLINE)
    assert controller.wait(DEADLINE) == 0, site.text
    assert "continuing at step 6" in site.log()
    undisturbed = _resolved_again(site)
    monkeypatch.chdir(site.folder)
    launch(undisturbed, ranks=2)
    trained = site.folder / "results/smoke/run.yaml"
    assert len(losses(trained)) == 10
    for key in ("loss", "grad_norm"):
        assert losses(trained, key) == losses(undisturbed, key)


def _batch_node(site: Site, job: str) -> str:
    """Node on which the script of a job runs."""
    return site.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%B").strip()


@contextmanager
def _lost(site: Site, node: str) -> Iterator[None]:
    """Lose a node for a while."""
    site.slurm.set_patience(10)
    site.slurm.kill_node(node)
    try:
        yield
    finally:  # for the other tests
        site.slurm.set_patience(PATIENCE)
        site.slurm.start_node(node)


@pytest.mark.fault("kill of the controller")
def test_signals_cancel_jobs_and_a_new_controller_adopts_jobs_of_a_killed_one(site: Site) -> None:
    target = STAGE.format("all-00000")
    waits = site.control("tokenize-all-00000", "waits")
    for count, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
        controller = site.start("--", target)
        site.await_begun("tokenize-all-00000", count)
        controller.send_signal(number)
        assert controller.wait(CANCELLED) == 1, site.text
        wait_for(lambda: not site.slurm.jobs(), "an empty queue")
        assert not (site.folder / target).exists()
        assert not list((site.folder / "results/data").rglob("*.bin"))

    # Kill the controller before sbatch answers, and again once the job id is known.
    answer = site.control("sbatch", "waits")
    controller = site.start("--", target)
    job, _ = site.await_begun("tokenize-all-00000", 3)
    wait_for((site.shim / "sbatch.stalls").exists, "sbatch to stall")
    controller.kill()
    controller.wait()
    (record,) = (site.folder / ".snakemake/slurm").glob("*/record.json")
    assert files.read_json(record, "")["job_id"] is None
    assert list(site.slurm.jobs()) == [job]
    unlock = site.start("--unlock")
    assert unlock.wait(DEADLINE) == 0, site.text
    again = f"is {job} in Slurm: found again, running"
    controller = site.start("--", target)
    wait_for(lambda: site.text.count(again) == 1, f"it\n{site.text}", DEADLINE)
    answer.unlink()
    controller.kill()
    controller.wait()
    controller = site.start("--nolock", "--", target)
    wait_for(lambda: site.text.count(again) == 2, f"it\n{site.text}", DEADLINE)
    assert list(site.slurm.jobs()) == [job]
    waits.unlink()
    assert controller.wait(DEADLINE) == 0, site.text
    assert (site.folder / target).exists()
    assert len(site.begun("tokenize-all-00000")) == 3  # the first two were cancelled
    controller = site.start("--", target)
    assert controller.wait(DEADLINE) == 0
    assert "Nothing to be done" in site.text


@pytest.mark.grid
@pytest.mark.parametrize(
    ("profile", "mine", "expected"),
    [
        ("perlmutter", "account: m1\n", "m1 all gpu"),
        ("aws-parallelcluster", "partition: all\n", "(null) all (null)"),
    ],
)
def test_a_sites_profile_runs_a_rule(site: Site, profile: str, mine: str, expected: str) -> None:
    site.profile = profile
    waits = site.control("tokenize-all-00000", "waits")
    (site.folder / f".config/tokamake/{profile}.yaml").write_text(mine)
    controller = site.start("--", STAGE.format("all-00000"))
    job, _ = site.await_begun("tokenize-all-00000", 1)
    listed = site.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%a %P %f")
    waits.unlink()
    assert listed.strip() == expected
    assert controller.wait(DEADLINE) == 0, site.text
    if profile == "perlmutter":  # its groups make one job of quick rules
        controller = site.start("--", "results/smoke/index/index.json")
        assert controller.wait(DEADLINE) == 0, site.text
        (job,) = set(re.findall(r"\(group prepare\) is (\d+) in Slurm: submitted", site.text))
        stages = [site.begun(stage) for stage in ("describe", "weigh", "index")]
        assert [jobs for ((jobs, _),) in stages] == [job] * 3


def test_the_doctor_checks_slurm_and_ranks(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    lines = [result.line for result in check_scheduler(Profile(None, {"executor": "sbatch"}))]
    assert lines[0] == "ok       scheduler: scontrol answers, 1 queue"
    assert lines[-1].startswith("ok       limits for other rules: 1 node, time not known in all; ")
    script, printed = tmp_path / "job.sh", tmp_path / "job.log"
    python = f"{sys.executable} -m tokamake doctor --ranks"
    script.write_text(f"#!/bin/sh\nexec {ROOT}/profiles/slurm/launch.sh 2 2 {python}\n")
    command = ["sbatch", "--wait", "--nodes=2", "--ntasks=2", f"--output={printed}", str(script)]
    result = subprocess.run(
        command, cwd=tmp_path, env=cluster.environment, check=False, timeout=DEADLINE
    )
    assert result.returncode == 0, printed.read_text()
    assert printed.read_text().count("sums of the all-reduce: correct on 2 ranks, cpu\n") == 1
