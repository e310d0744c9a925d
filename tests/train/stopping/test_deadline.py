"""Training as a chain of jobs: segment bounds, deadlines, and the same result as one job."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.runs import make_run, records, summary, train_here, weights
from tokamake import files
from tokamake.config.resolved_run import read_run, write_run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.runtime.exit_status import Stopped
from tokamake.train.plan_segments import plan_segments
from tokamake.train.stopping.deadline import (
    Deadline,
    Durations,
    end_of_job,
    read_durations,
    write_durations,
)


def assert_same_training(config: Path, single: Path) -> None:
    of_machine = ("second", "memory")  # the peak is that of the process, which has run other tests
    measured = [
        [
            {k: v for k, v in record.items() if not any(w in k for w in of_machine)}
            for record in each
        ]
        for each in (records(config), records(single))
    ]
    assert measured[0] == measured[1]
    there = weights(single)
    assert all(torch.equal(value, there[name]) for name, value in weights(config).items())


@pytest.mark.usefixtures("lone_rank")
def test_a_chain_of_jobs_is_the_same_run(
    root: Path, single: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(root, "chain", segment_steps=3)
    assert train_here(config, until_step=3) == 0
    first = files.read_json(config.with_name("train.3.json"), "")
    assert (first["step"], first["consumed_samples"]) == (3, 24)
    assert first["checkpoint"] == str(root / "chain/training/global_step3")
    assert first["last_loss"] == [r["loss"] for r in records(single) if "loss" in r][2]
    assert not config.with_name("train.json").exists()
    assert train_here(config) == 0
    assert_same_training(config, single)
    same = ("digest", "step", "first_loss", "last_loss", "validation_losses", "consumed_tokens")
    assert [summary(config)[key] for key in same] == [summary(single)[key] for key in same]

    # A record that is lost is written again, from the checkpoint of its step.
    capsys.readouterr()
    config.with_name("train.3.json").unlink()
    assert train_here(config, until_step=3) == 0
    assert "already at step 6, the last; nothing to train" in capsys.readouterr().out
    assert files.read_json(config.with_name("train.3.json"), "") == first


@pytest.mark.usefixtures("lone_rank")
def test_an_impossible_last_step_is_refused(root: Path, single: Path) -> None:
    with pytest.raises(UserError, match="until_step: 7: the run goes from step 0 to 6; give one"):
        train_here(single, until_step=7)
    with pytest.raises(UserError, match="until_step: 0: the run goes from step 0 to 6"):
        train_here(single, until_step=0)
    with pytest.raises(
        UserError, match="global_step5: missing, but the run is already past step 5"
    ):
        train_here(single, until_step=5)


@pytest.mark.usefixtures("lone_rank")
def test_a_job_stops_before_its_time_limit_and_the_next_continues(
    root: Path, single: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(root, "short", save_interval=100)
    assert train_here(config, minutes=0) == Stopped.TIME
    assert "stopped before the end of the job: saved at step 1, run" in capsys.readouterr().out
    monkeypatch.setenv("JOB_PROGRESS_FILE", str(root / "progress"))
    assert train_here(config, until_step=3, minutes=0) == Stopped.TIME
    assert "saved at step 2, the next job continues" in capsys.readouterr().out
    line = "stopped before the end of the job, saved at step 2\n"
    assert (root / "progress").read_text() == line
    assert not config.with_name("train.3.json").exists()
    assert train_here(config, until_step=3, minutes=0) == 0
    assert train_here(config, minutes=60) == 0
    assert_same_training(config, single)


def test_the_deadline_leaves_time_for_a_step_and_a_checkpoint() -> None:
    deadline = Deadline(1000, iter([0, 10, 40, 60, 160, 170, 300, 430, 441]).__next__)
    assert not deadline.near()  # at 10 s
    assert not deadline.near()
    deadline.begin_saving()
    deadline.end_saving()  # a checkpoint takes 100 s
    assert not deadline.near()  # at 170 s: a step takes up to 130 s
    assert not deadline.near()
    assert not deadline.near()
    assert deadline.near()  # at 441 s: two steps, two checkpoints and a margin of 100 s take 560 s


def test_the_deadline_leaves_time_for_an_unmeasured_checkpoint() -> None:
    times = iter([0, 790, 801])
    deadline = Deadline(1000, times.__next__)
    assert not deadline.near()
    assert deadline.near()


def test_without_a_time_limit_durations_are_still_measured() -> None:
    deadline = Deadline(None, iter([10, 40, 60, 160]).__next__)
    assert not deadline.near()
    assert not deadline.near()
    deadline.begin_saving()
    deadline.end_saving()
    assert deadline.measured == Durations(step=30, checkpoint=100)


def test_a_job_uses_the_durations_of_the_job_before() -> None:
    def ends_at(now: float, earlier: Durations) -> bool:
        return Deadline(1000, iter([0, now]).__next__, earlier=earlier).near()

    # Two steps, two checkpoints and a margin of 100 s; unknown durations are guessed.
    assert [ends_at(now, Durations(100, 150)) for now in (399, 401)] == [False, True]
    assert [ends_at(now, Durations(100)) for now in (599, 601)] == [False, True]
    assert [ends_at(now, Durations()) for now in (799, 801)] == [False, True]
    # What this job measures counts where it is more.
    deadline = Deadline(1000, iter([0, 0, 150, 450, 610]).__next__, earlier=Durations(100, 150))
    assert not deadline.near()
    assert not deadline.near()
    assert deadline.near()


def test_durations_are_used_only_for_the_same_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    assert read_durations(path, 2) == Durations()
    write_durations(path, 2, measured=Durations(1.5, 60))
    assert read_durations(path, 2) == Durations(1.5, 60)
    assert read_durations(path, 4) == Durations()
    for damaged in ("", "[]", "{}", '{"world_size": 2, "step_seconds": 1}'):
        path.write_text(damaged)
        assert read_durations(path, 2) == Durations()


@pytest.mark.usefixtures("lone_rank")
def test_the_second_job_of_a_chain_stops_in_time_for_a_slow_checkpoint(root: Path) -> None:
    config = make_run(root, "slow", segment_steps=3)
    assert train_here(config, until_step=3) == 0
    note = root / "slow/training/durations.json"
    durations = read_durations(note, 1)
    assert durations.step > 0
    assert durations.checkpoint > 0
    # In an hour there is room for all steps, but not for them and two checkpoints of half an hour.
    write_durations(note, 1, measured=durations._replace(checkpoint=1800))
    assert train_here(config, minutes=60) == Stopped.TIME
    assert (root / "slow/training/latest").read_text() == "global_step4"
    assert read_durations(note, 1).checkpoint < 1800
    assert train_here(config, minutes=60) == 0


def test_the_end_of_a_job_comes_from_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_END_TIME", "PBS_JOB_END_TIME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert end_of_job() is None
    now = 1_700_000_000.5
    monkeypatch.setattr("tokamake.train.stopping.deadline.time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr("tokamake.train.stopping.deadline._ANSWER_SECONDS", 300)
    assert end_of_job(2) == now + 120
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\ntest "$3" = --jobs=17 && echo 1-02:00:10\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert end_of_job() == now + 26 * 3600 + 10
    squeue.write_text("#!/bin/sh\necho slurm_load_jobs error >&2; exit 1\n")
    assert end_of_job() is None
    monkeypatch.setenv("PBS_JOB_END_TIME", "1500000000")  # of an earlier job
    assert end_of_job() is None
    monkeypatch.setenv("PBS_JOB_END_TIME", "4100000000")
    assert end_of_job() == 4_100_000_000
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4000000000")
    assert end_of_job() == 4_000_000_000
    assert end_of_job(1) == now + 60


def test_segments_end_at_multiples_of_their_steps() -> None:
    assert TrainSettings(train_steps=10, segment_steps=4).segments() == [4, 8]
    assert TrainSettings(train_steps=8, segment_steps=4).segments() == [4]
    assert TrainSettings(train_steps=8, segment_steps=4).segments(start_step=4) == []
    assert TrainSettings(train_steps=8).segments() == []
    tokens = TrainSettings(
        train_tokens=8 * 32 * 10, sequence_length=32, global_batch_size=8, segment_steps=4
    )
    assert tokens.segments() == [4, 8]
    assert TrainSettings(train_steps=None, segment_steps=4).segments() == []


def test_segments_are_planned_from_the_length_of_the_data(
    root: Path, single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = tmp_path / "segments.json"
    plan_segments(config=single, segment_steps=4, output=ends)
    assert capsys.readouterr().out == f"{ends}: 6 steps in 2 jobs\n"
    assert files.read_json(ends, "") == {"num_steps": 6, "segments": [4]}
    continued = read_run(single).model_copy(update={"step": 4})
    write_run(tmp_path / "run.yaml", continued)
    plan_segments(config=tmp_path / "run.yaml", segment_steps=2, output=ends)
    assert files.read_json(ends, "")["segments"] == []
    with pytest.raises(UserError, match="--segment-steps 0: give 1 or more"):
        plan_segments(config=single, segment_steps=0, output=ends)
