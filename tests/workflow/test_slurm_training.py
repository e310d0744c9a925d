"""Training jobs on a real Slurm of three nodes are interrupted and continue on other nodes, too."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.pbs_servers import wait_for
from tests.support.runs import launch, losses, weights
from tests.support.slurm_cluster import PATIENCE
from tests.support.slurm_site import DEADLINE, MARKS, Site
from tokamake.config.resolved_run import read_run, write_run
from tokamake.scheduler_formats import seconds_of

pytestmark = MARKS

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
    moved = (
        rf"job {job} of rule train stopped before the end of the job, saved at step \d+; a new job"
    )
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
