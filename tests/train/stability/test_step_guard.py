"""Runs with bad numbers: skipped, rewound, slowed down, stopped, journaled."""

import errno
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_numbers import (
    NAN,
    QUICK,
    Settings,
    bad_run,
    events,
    poison,
    steps,
)
from tests.support.forked import train
from tests.support.runs import hashes, losses, make_run, records, train_here
from tokamake import files
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.errors import TemporaryError, UserError
from tokamake.runtime.exit_status import Stopped
from tokamake.train import metrics
from tokamake.train.metrics import Metrics, Record
from tokamake.train.stability.events import documents_of
from tokamake.train.stability.step_guard import StepGuard
from tokamake.train.trace.trace_sample import trace_sample
from tokamake.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("lone_rank")

SPIKE = {35: 30.0}


@pytest.fixture(scope="module")
def without_data(root: Path) -> Path:
    """A run that leaves out the data of step 5 from the start; do not write here."""
    config = bad_run(root, "without-data", {}, skip_data=[[5, 5]])
    train(config)
    return config


@pytest.mark.fault("numbers that are not finite")
def test_a_skipped_step_does_not_update_and_is_journaled(
    root: Path,
    without_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = bad_run(root, "skipped", {"not_finite": "skip"})
    poison(config, NAN, patch=monkeypatch)
    assert train_here(config) == 0
    run = read_run(config)
    (event,) = events(config)
    samples = training_samples(run)
    assert event == {
        "step": 5,
        "case": "not_finite",
        "reason": "loss: nan",
        "action": "skip",
        "ranks": [0],
        "loss": "nan",
        "grad_norm": "nan",
        "samples": [32, 39],
        "documents": documents_of(samples, range(32, 40), data_root=root),
    }
    assert len(event["documents"]["corpus"]) > 2
    printed = capsys.readouterr().out
    assert "step 5: loss: nan, from rank 0: the step is skipped; its documents are in" in printed
    assert hashes(config) == hashes(without_data)
    assert steps(config) == [1, 2, 3, 4, 6]
    assert all(math.isfinite(loss) for loss in losses(config))
    state = files.read_json(run.output / "global_step6/state.json", "")
    assert state["guard"]["skipped"] == [5]
    assert len(state["guard"]["losses"]) == 5


def test_data_that_are_left_out_are_not_read_and_count(without_data: Path) -> None:
    run = read_run(without_data)
    assert steps(without_data) == [1, 2, 3, 4, 6]
    assert [record["consumed_samples"] for record in records(without_data)][-1] == 48
    rates = losses(without_data, "learning_rate")
    assert rates == sorted(rates, reverse=True)
    assert not events(without_data)
    assert (run.output / "latest").read_text() == "global_step6"


@pytest.mark.fault("numbers that are not finite")
@pytest.mark.parametrize("once", [False, True], ids=["data", "hardware"])
def test_a_rewound_run_has_the_bytes_of_one_without_the_data(
    root: Path, without_data: Path, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    config = bad_run(root, f"rewound-{once}", {"not_finite": "rewind"})
    poison(config, NAN, once=once, patch=monkeypatch)
    assert train_here(config) == 0
    (event,) = events(config)
    assert (event["action"], event["checkpoint"]) == ("rewind", "global_step4")
    assert hashes(config) == hashes(without_data)
    assert losses(config) == losses(without_data)
    assert steps(config) == [1, 2, 3, 4, 6]


def test_a_spike_is_rewound_with_the_steps_since_the_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Settings = {"save_interval": 3, "train_steps": 9}
    on_bad_step: Settings = {"spike": "rewind", "spike_window": 4}
    config = bad_run(root, "spike", on_bad_step, **settings)
    poison(config, {7 * 8: 30.0, 8 * 8 + 1: 40.0}, patch=monkeypatch)
    assert train_here(config) == 0
    assert [(event["step"], event["action"]) for event in events(config)] == [
        (8, "rewind"),
        (9, "rewind"),
    ]
    assert "robust standard deviations above the median" in events(config)[0]["reason"]
    expected = bad_run(root, "spike-left-out", on_bad_step, skip_data=[[8, 9]], **settings)
    train_here(expected)
    assert hashes(config, 9) == hashes(expected, 9)
    assert steps(config) == steps(expected) == [1, 2, 3, 4, 5, 6, 7]


def test_a_spike_is_only_journaled_by_default(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = bad_run(root, "journaled", {"spike_window": 4})
    poison(config, SPIKE, patch=monkeypatch)
    assert train_here(config) == 0
    assert [event["action"] for event in events(config)] == ["journal"]
    assert steps(config) == [1, 2, 3, 4, 5, 6]
    assert "from rank 0: training continues; its documents" in capsys.readouterr().out


def test_the_rate_is_lower_after_each_bad_step(
    root: Path, without_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_bad_step: Settings = {"not_finite": "lower_rate", "rate_factor": 0.25}
    config = bad_run(root, "slower", on_bad_step, train_steps=8)
    plain = bad_run(root, "plain", {}, train_steps=8)
    train_here(plain)
    poison(config, {16: math.nan, 35: math.nan}, patch=monkeypatch)
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        assert train_here(config) == Stopped.SIGTERM
    assert train_here(config) == 0
    rates = dict(zip(steps(config), losses(config, "learning_rate"), strict=True))
    expected = losses(plain, "learning_rate")
    assert [rates[step] / expected[step - 1] for step in rates] == [1, 1, 0.25, *[0.0625] * 3]


def stop_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """Send this process SIGTERM after a step; it ends after the next one."""
    add = Metrics.add

    def add_and_stop(instance: Metrics, record: Record) -> None:
        add(instance, record)
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Metrics, "add", add_and_stop)


def test_the_budget_ends_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bad_run(root, "budget", {"not_finite": "rewind", "budget": 1})
    poison(config, {**NAN, 40: math.inf}, patch=monkeypatch)
    with pytest.raises(UserError, match=r"step 6: loss: inf: .*on_bad_step.budget 1 is used up"):
        train_here(config)
    # A job that repeats the steps does not count the rewound one twice, nor repeat its event.
    with pytest.raises(UserError, match=r"raise the budget; last good .*global_step4"):
        train_here(config)
    assert [(event["step"], event["action"]) for event in events(config)] == [
        (5, "rewind"),
        (6, "stop"),
    ]
    make_run(root, "budget", on_bad_step={"not_finite": "rewind", "budget": 2}, **QUICK)
    assert train_here(config) == 0  # the run has not changed
    assert [event["step"] for event in events(config)] == [5, 6]


@pytest.mark.fault("numbers that are not finite")
def test_by_default_the_run_stops_and_names_the_documents(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bad_run(root, "stopped", {})
    poison(config, NAN, patch=monkeypatch)
    with pytest.raises(UserError) as caught:
        train_here(config)
    output = read_run(config).output
    assert str(caught.value) == (
        f"step 5: loss: nan: training has diverged; check the documents of the step "
        f"({output}/events.jsonl), or lower train.optimizer.learning_rate and set train.on_change "
        f"to continue; last good checkpoint: {output}/global_step4"
    )
    assert [event["action"] for event in events(config)] == ["stop"]


def test_without_a_checkpoint_a_rewind_is_a_skip(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bad_run(root, "early", {"not_finite": "rewind"})
    poison(config, {8: math.nan}, patch=monkeypatch)
    assert train_here(config) == 0
    assert [(event["step"], event["action"]) for event in events(config)] == [(2, "skip")]


@pytest.mark.fault("numbers that are not finite")
@pytest.mark.grid
def test_an_interrupted_run_goes_on_bit_by_bit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between a rewind and the next checkpoint, where only the journal knows of it."""
    on_bad_step: Settings = {"not_finite": "rewind", "spike": "skip", "spike_window": 4}
    settings: Settings = {"train_steps": 9, "save_interval": 4}
    bad = {6 * 8: 30.0, 7 * 8 - 1 - 8: math.nan}  # steps 7 and 6
    whole = bad_run(root, "whole", on_bad_step, **settings)
    poison(whole, bad, patch=monkeypatch)
    assert train_here(whole) == 0
    assert [(e["step"], e["action"]) for e in events(whole)] == [(6, "rewind"), (7, "skip")]
    config = bad_run(root, "interrupted", on_bad_step, **settings)
    with monkeypatch.context() as patch:
        add = metrics.RecordFile.add

        def add_and_die(file: metrics.RecordFile, record: Any) -> None:
            add(file, record)
            if record.get("case") == "spike":
                file.sync()
                raise SystemExit(137)

        patch.setattr(metrics.RecordFile, "add", add_and_die)
        with pytest.raises(SystemExit):
            train_here(config)
    assert [event["step"] for event in events(config)] == [6, 7]
    journal = read_run(config).output / "events.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"step": 8, "ca')
    assert train_here(config) == 0
    assert events(config) == events(whole)
    assert hashes(config, 9) == hashes(whole, 9)
    states = [
        files.read_json(read_run(each).output / "global_step9/state.json", "")["guard"]
        for each in (config, whole)
    ]
    assert states[0] == states[1]


def test_data_of_a_rewind_stay_left_out_with_another_batch_size(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_bad_step: Settings = {"not_finite": "rewind"}
    config = bad_run(root, "halved", on_bad_step, save_interval=4)
    poison(config, NAN, patch=monkeypatch)
    with monkeypatch.context() as patch:

        def die(*_: Any) -> None:
            raise SystemExit(137)

        patch.setattr(Trainer, "_go_back", die)
        with pytest.raises(SystemExit):
            train_here(config)
    changed: Settings = {"global_batch_size": 4, "train_steps": 12, "on_change": "continue"}
    config = bad_run(root, "halved", on_bad_step, save_interval=4, **changed)
    assert train_here(config) == 0
    assert "training continues at step 4 with the change, and ends at step 8, with as many " in (
        capsys.readouterr().out
    )
    assert [event["step"] for event in events(config)] == [5]
    with pytest.raises(UserError, match=r"row 4: does not exist; give 0 to 3"):
        trace_sample(config, 7, 4)
    capsys.readouterr()
    trace_sample(config, 7, 0)
    trace_sample(config, 3, 7)  # until step 4, steps had 8 samples
    printed = capsys.readouterr().out
    assert "step 7, row 0: sample 40, of" in printed
    assert "step 3, row 7: sample 23, of" in printed
    # Samples 32 to 39 were those of step 5; now steps 5 and 6 have them.
    assert steps(config) == [1, 2, 3, 4, 7, 8]
    assert records(config)[-1]["consumed_samples"] == 48
    state = files.read_json(read_run(config).output / "global_step8/state.json", "")
    assert state["guard"]["skipped"] == [5, 6]


@pytest.mark.fault("full disk")
def test_a_full_disk_at_the_journal_ends_the_job_and_the_next_one_goes_on(
    root: Path, without_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bad_run(root, "journal-full", {"not_finite": "skip"})
    poison(config, NAN, patch=monkeypatch)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(metrics.RecordFile, "_write", fail)
        with pytest.raises(TemporaryError, match=r"No space left on device"):
            train_here(config)
    assert train_here(config) == 0
    assert [(event["step"], event["action"]) for event in events(config)] == [(5, "skip")]
    assert hashes(config) == hashes(without_data)


@pytest.mark.parametrize("once", [False, True], ids=["data", "hardware"])
def test_a_recomputed_step_is_reproducible_or_transient(
    root: Path, without_data: Path, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    config = bad_run(root, f"recomputed-{once}", {"not_finite": "skip", "recompute": True})
    poison(config, NAN, once=once, patch=monkeypatch)
    assert train_here(config) == 0
    (event,) = events(config)
    assert event["recomputed"] == ("transient" if once else "reproducible")
    assert event["ranks"] == [0]
    assert hashes(config) == hashes(without_data)


@pytest.mark.fault("damaged checkpoint")
def test_a_damaged_checkpoint_is_not_the_one_to_go_back_to(
    root: Path, without_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bad_run(root, "damaged", {"not_finite": "rewind"})
    poison(config, NAN, patch=monkeypatch)
    respond, output = StepGuard.respond, read_run(config).output

    def damage_and_respond(guard: StepGuard, *arguments: Any, **options: Any) -> Any:
        options["newest"]()  # the checkpoint of step 4 is on disk then
        (output / "global_step4/.metadata").unlink()
        return respond(guard, *arguments, **options)

    monkeypatch.setattr(StepGuard, "respond", damage_and_respond)
    assert train_here(config) == 0
    assert events(config)[0]["checkpoint"] == "global_step2"
    assert hashes(config) == hashes(without_data)


# Settings of a run that has a checkpoint.


def test_settings_for_bad_steps_do_not_change_a_run(root: Path) -> None:
    config = bad_run(root, "unchanged", {})
    train_here(config, until_step=4)
    bad_run(root, "unchanged", {"not_finite": "skip", "spike": "stop"})
    assert train_here(config) == 0
    assert steps(config) == [1, 2, 3, 4, 5, 6]


def test_data_to_leave_out_are_a_change_to_continue_with(
    root: Path, without_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = bad_run(root, "left-out", {})
    train_here(config, until_step=4)
    bad_run(root, "left-out", {}, skip_data=[[1, 2], [5, 5]])
    message = (
        "train.skip_data [] -> [[1, 2], [5, 5]] (no effect on steps 1 to 2: training is already at "
        "step 4)"
    )
    with pytest.raises(UserError) as caught:
        train_here(config)
    assert str(caught.value).startswith(f"{message}; 4 steps are trained in ")
    bad_run(root, "left-out", {}, skip_data=[[1, 2], [5, 5]], on_change="continue")
    assert train_here(config) == 0
    assert message in capsys.readouterr().out
    assert hashes(config) == hashes(without_data)


def test_a_run_without_an_update_is_an_error_after_a_stop_too(root: Path) -> None:
    """The checkpoint counts the updates, so that later jobs know of those before them."""
    config = bad_run(root, "untrained", {}, skip_data=[[1, 6]])
    assert train_here(config, until_step=3) == 0
    with pytest.raises(UserError) as caught:
        train_here(config)
    assert str(caught.value).startswith(f"{config.parent / 'training'}: no step has updated the")
    assert "and check train.skip_data" in str(caught.value)
    config = bad_run(root, "trained-first", {}, skip_data=[[3, 6]])
    assert train_here(config, until_step=2) == train_here(config) == 0
