"""The workflow through profiles/slurm on a real Slurm of three nodes, and all that may end it."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml
from pbses import wait_for
from runs import launch, weights
from slurms import MISSING, Slurm, slurm
from workflows import CONFIG, make_workspace

from tokamake.config import read_run, write_run
from tokamake.doctor.profile import Profile
from tokamake.doctor.scheduler import check_scheduler

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"
    ),
]

DEADLINE = 240  # seconds for a step of the workflow on a busy machine
STAGE = "results/data/batches/tokenize/{}.json"

# Stands before tokamake: writes down in which job a stage began, has it fail or wait as the test
# asks, or stops training for ever once there is a checkpoint, as a node that hangs does.
SHIM = """\
#!/bin/bash
stage=$1
[ "$stage" = tokenize ] && stage=tokenize-$5
echo "$SLURM_JOB_ID $SLURMD_NODENAME" >> "$SHIM/$stage.begun"
if rm "$SHIM/$stage.fails" 2>/dev/null; then echo failed on purpose >&2; exit 1; fi
while [ -e "$SHIM/$stage.waits" ]; do sleep 0.05; done
[ -e "$SHIM/$stage.hangs" ] || exec {tokamake} "$@"
{tokamake} "$@" &
while [ ! -s results/smoke/training/latest ]; do sleep 0.05; done
kill -STOP $!
: > "$SHIM/$stage.hung"
wait
"""


@dataclass
class Site:
    """A user's folder on a cluster.

    Args:
        folder: the user's.
        shim: where the test says what stages do.
        slurm: the cluster.
    """

    folder: Path
    shim: Path
    slurm: Slurm
    profile: str = "slurm"
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start Snakemake."""
        environment = {
            **self.slurm.environment, "SHIM": str(self.shim), "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
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

    def say(self, stage: str, what: str) -> Path:
        """Have a stage fail once, wait or hang."""
        path = self.shim / f"{stage}.{what}"
        path.touch()
        return path

    def begun(self, stage: str) -> list[tuple[str, ...]]:
        """Jobs that a stage was begun in, with their nodes."""
        path = self.shim / f"{stage}.begun"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(line.split()) for line in lines]

    def await_begun(self, stage: str, times: int) -> tuple[str, ...]:
        """Wait until a stage has begun so often; the job and node of the last time."""
        wait_for(lambda: len(self.begun(stage)) >= times, f"{stage}\n{self.text}", DEADLINE)
        return self.begun(stage)[-1]

    @property
    def text(self) -> str:
        """What Snakemake has printed so far."""
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
            "train_steps": 12,
            "evaluation_interval": 12,
            "save_interval": 3,
        },
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    mine = folder / ".config/tokamake/slurm.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("account: mine\npartition: all\n")
    made = Site(folder, make_shim(folder / "shim"), cluster)
    yield made
    for controller in made.controllers:
        controller.kill()
        controller.wait()
    if left := cluster.jobs():
        cluster.run("scancel", *left)
    wait_for(cluster.is_idle, "idle nodes")


def make_shim(folder: Path) -> Path:
    """This Python's environment once more, with another `tokamake`; stages are found beside it."""
    programs, own = folder / "bin", Path(sys.prefix)
    programs.mkdir(parents=True)
    (folder / "lib").symlink_to(own / "lib")
    shutil.copy(own / "pyvenv.cfg", folder)
    (programs / "python").symlink_to(sys.executable)
    (programs / "tokamake").write_text(SHIM.replace("{tokamake}", str(own / "bin/tokamake")))
    (programs / "tokamake").chmod(0o755)
    return folder


def test_the_workflow_ends_whatever_meets_its_jobs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard fails and is redone alone; training on two nodes outlasts its time, and goes on."""
    site.say("tokenize-all-00000", "fails")
    site.say("train", "hangs")
    controller = site.start(
        "--retries", "1", "--set-resources", "train:nodes=2", "train:tasks=2", "train:runtime=5",
        "--", "train",
    )  # fmt: skip
    wait_for(
        lambda: (site.shim / "train.hung").exists() or controller.poll() is not None,
        "training to hang", DEADLINE,
    )  # fmt: skip
    assert controller.poll() is None, site.text
    (site.shim / "train.hangs").unlink()
    job = site.begun("train")[0][0]
    assert site.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%D %a") == "2 mine\n"
    # The least that Slurm knows is a minute.
    site.slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now+1")
    assert controller.wait(DEADLINE) == 0, site.text
    assert (
        f"Slurm job {job} used more than was asked for and was killed by Slurm: time" in site.text
    )
    assert [len(site.begun(f"tokenize-all-0000{batch}")) for batch in range(2)] == [2, 1]
    first, second = site.begun("train")[:2], site.begun("train")[2:]
    for ranks in (first, second):
        assert len({job for job, _ in ranks}) == 1
        assert len({node for _, node in ranks}) == len(ranks) == 2

    found = site.folder / "results/smoke/run.yaml"
    assert "continuing at step 3" in (site.folder / "logs/smoke/train.log").read_text()
    undisturbed = site.folder / "undisturbed/run.yaml"
    undisturbed.parent.mkdir()
    run = read_run(found)
    write_run(undisturbed, run.model_copy(update={"output": undisturbed.parent / "training"}))
    monkeypatch.chdir(site.folder)
    launch(undisturbed, ranks=2)
    expected, trained = weights(undisturbed), weights(found)
    assert expected.keys() == trained.keys()
    assert all(torch.equal(expected[name], trained[name]) for name in expected)


def test_signals_cancel_and_a_killed_controller_finds_its_jobs_again(site: Site) -> None:
    target = STAGE.format("all-00000")
    waits = site.say("tokenize-all-00000", "waits")
    for count, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
        controller = site.start("--", target)
        site.await_begun("tokenize-all-00000", count)
        controller.send_signal(number)
        assert controller.wait(DEADLINE) == 1, site.text
        wait_for(lambda: not site.slurm.jobs(), "an empty queue")
        assert not (site.folder / target).exists()
        assert not list((site.folder / "results/data").rglob("*.bin"))

    controller = site.start("--", target)
    job, _ = site.await_begun("tokenize-all-00000", 3)
    controller.kill()
    controller.wait()
    assert list(site.slurm.jobs()) == [job]
    unlock = site.start("--unlock")
    assert unlock.wait(DEADLINE) == 0, site.text
    controller = site.start("--", target)
    wait_for(lambda: f"is {job} in Slurm: found again, running" in site.text, "it", DEADLINE)
    waits.unlink()
    assert controller.wait(DEADLINE) == 0, site.text
    assert (site.folder / target).exists()
    assert len(site.begun("tokenize-all-00000")) == 3  # of which the last one was the first to end
    controller = site.start("--", target)
    assert controller.wait(DEADLINE) == 0
    assert "Nothing to be done" in site.text


def test_a_job_moves_on_when_its_node_dies(site: Site) -> None:
    waits = site.say("tokenize-all-00001", "waits")
    controller = site.start("--", STAGE.format("all-00001"))
    job, node = site.await_begun("tokenize-all-00001", 1)
    site.slurm.kill_node(node)
    # Slurm lets a job whose node was lost wait, in case it is the job's fault.
    site.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    again, other = site.await_begun("tokenize-all-00001", 2)
    assert again == job
    assert other != node
    waits.unlink()
    assert controller.wait(DEADLINE) == 0, site.text
    assert (site.folder / STAGE.format("all-00001")).exists()
    site.slurm.start_node(node)
    site.slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    wait_for(site.slurm.is_idle, "the node", DEADLINE)


@pytest.mark.parametrize(
    ("profile", "mine", "expected"),
    [
        ("perlmutter", "account: m1\n", "m1 all gpu"),
        ("aws-parallelcluster", "partition: all\n", "(null) all (null)"),
    ],
)
def test_a_sites_profile_runs_a_rule(site: Site, profile: str, mine: str, expected: str) -> None:
    site.profile = profile
    waits = site.say("tokenize-all-00000", "waits")
    (site.folder / f".config/tokamake/{profile}.yaml").write_text(mine)
    controller = site.start("--", STAGE.format("all-00000"))
    job, _ = site.await_begun("tokenize-all-00000", 1)
    listed = site.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%a %P %f")
    waits.unlink()
    assert listed.strip() == expected
    assert controller.wait(DEADLINE) == 0, site.text


def test_the_doctor_asks_slurm_and_its_ranks(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    told = [one.line for one in check_scheduler(Profile(None, {"executor": "sbatch"}))]
    assert told[0] == "ok       scheduler: scontrol answers, 1 queue"
    assert told[-1].startswith("ok       limits for other rules: 1 node, time not known in all; ")
    script, printed = tmp_path / "job.sh", tmp_path / "job.log"
    python = f"{sys.executable} -m tokamake doctor --ranks"
    script.write_text(f"#!/bin/sh\nexec {ROOT}/profiles/slurm/launch.sh 2 2 {python}\n")
    command = ["sbatch", "--wait", "--nodes=2", "--ntasks=2", f"--output={printed}", str(script)]
    result = subprocess.run(
        command, cwd=tmp_path, env=cluster.environment, check=False, timeout=DEADLINE
    )
    assert result.returncode == 0, printed.read_text()
    assert printed.read_text().count("sums of the all-reduce: right on 2 ranks, cpu\n") == 1
