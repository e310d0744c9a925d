"""Training equals PyTorch and transformers: over ranks, ZeRO stages, signals and kills."""

import errno
import json
import os
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from tests.support.forked import train
from tests.support.interrupted_runs import assert_same_end
from tests.support.megatron_logs import megatron_lines
from tests.support.proofs import loss_of, their_model
from tests.support.runs import (
    copy,
    losses,
    make_index,
    make_run,
    prepare,
    records,
    summary,
    train_here,
    vouch,
    weights,
    whole_batches,
)
from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import Run, read_run, write_run
from tokamake.data.samples.index import index
from tokamake.data.samples.steps import StepBatch
from tokamake.errors import UserError
from tokamake.parallel.mesh import Mesh
from tokamake.runtime.exit_status import Stopped
from tokamake.schedules import cosine
from tokamake.train import train as train_stage
from tokamake.train import trainer
from tokamake.train.metrics import Metrics, Record, read
from tokamake.train.sampler import Sampler

pytestmark = pytest.mark.usefixtures("lone_rank")


def plain_training(
    root: Path, sizes: tuple[int, ...] = (8,) * 6
) -> tuple[list[float], list[float], list[float], Any]:
    """Train transformers' Llama with torch; return losses, norms, validation losses, the model."""
    model = their_model(root / "start")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    valid = torch.from_numpy(next(whole_batches(root, "valid", size=16)))
    results: tuple[list[float], list[float], list[float]] = ([], [], [])
    rows = (row for (row,) in whole_batches(root, "train", size=1))
    for step, size in enumerate((*sizes, 0)):
        if step % 3 == 0:
            with torch.no_grad():
                results[2].append(loss_of(model, valid).item())
        if not size:
            break
        loss = loss_of(model, torch.from_numpy(np.stack([*islice(rows, size)])))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            share = cosine.factor(step, warmup=2, length=6, decay=6, min_ratio=0.1)
            group["lr"] = 0.01 * (step / 2 if step < 2 else share)
        optimizer.step()
        results[0].append(loss.item())
        results[1].append(norm.item())
    return (*results, model)


RAMPED = {"rampup_batch_size": [4, 4, 10], "micro_batch_size": 1}


@pytest.mark.parametrize(
    "zero_stage", [*(pytest.param(n, marks=pytest.mark.grid) for n in (0, 1, 2)), 3]
)
def test_a_batch_size_ramp_up_equals_torch(root: Path, zero_stage: int) -> None:
    config = make_run(root, f"ramped-{zero_stage}", zero_stage=zero_stage, **RAMPED)
    assert train_here(config) == 0
    expected, norms, validation, _ = plain_training(root, (4, 4, 4, 8, 8, 8))
    assert losses(config) == pytest.approx(expected, rel=1e-5)
    assert losses(config, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert losses(config, "validation_loss") == pytest.approx(validation, rel=1e-5)
    assert summary(config)["consumed_samples"] == 36
    consumed = [record["consumed_samples"] for record in records(config) if "loss" in record]
    assert consumed == [4, 8, 12, 20, 28, 36]


@pytest.mark.grid
@pytest.mark.ranks
def test_a_batch_size_ramp_up_is_the_same_over_ranks(root: Path) -> None:
    config = make_run(root, "ramped-ranks", zero_stage=2, **RAMPED)
    train(config, ranks=2)
    expected, *_ = plain_training(root, (4, 4, 4, 8, 8, 8))
    assert losses(config) == pytest.approx(expected, rel=1e-5)


def test_training_equals_transformers_and_torch(root: Path, single: Path) -> None:
    expected, norms, validation, model = plain_training(root)
    assert losses(single) == pytest.approx(expected, rel=1e-5)
    assert losses(single, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert losses(single, "validation_loss") == pytest.approx(validation, rel=1e-5)
    assert expected[-1] < expected[0] - 0.1
    for name, tensor in weights(single).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-3, atol=1e-4)


class InMemory(Sampler):
    """Samples of an objective that reads no index: two steps of rows in memory."""

    rows = np.random.default_rng(7).integers(0, 64, (2, 8, 17))

    def steps(
        self,
        state: ResumeState,
        mesh: Mesh,  # noqa: ARG002
        *,
        left_out: Sequence[tuple[int, int]],  # noqa: ARG002
    ) -> Iterator[StepBatch]:
        for step in range(state.step, 2):
            numbers = np.arange(8).reshape(4, 2) + 8 * step
            yield StepBatch(8 * step, 8, [*self.rows[step].reshape(4, 2, 17)], numbers)


def test_a_run_can_have_a_sampler_of_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_trainer = train_stage.run_trainer

    def run_in_memory(run: Run, *arguments: Any, **options: Any) -> int:
        options["make_sampler"] = lambda: InMemory(run)
        return run_trainer(run, *arguments, **options)

    monkeypatch.setattr(train_stage, "run_trainer", run_in_memory)
    config = make_run(root, "in-memory", train_steps=2, save_interval=1)
    assert train_here(config) == 0
    first, _ = losses(config)
    expected = loss_of(their_model(root / "start"), torch.from_numpy(InMemory.rows[0]))
    assert first == pytest.approx(expected.item(), rel=1e-5)
    saved = read_run(read_run(config).output / "global_step2/run.yaml")
    assert saved.architecture == read_run(config).architecture


def test_files_of_a_finished_run(root: Path, single: Path) -> None:
    written, steps = summary(single), [r["step"] for r in records(single) if "loss" in r]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert written["step"] == 6
    assert written["consumed_tokens"] == 6 * 8 * 16
    assert (written["first_loss"], written["last_loss"]) == tuple(losses(single)[:: len(steps) - 1])
    assert [entry["step"] for entry in written["validation_losses"]] == [0, 3, 6]
    assert written["tokens_per_second"] * written["seconds"] == pytest.approx(6 * 8 * 16)
    output = read_run(single).output
    assert sorted(path.name for path in output.glob("global_step*")) == [
        f"global_step{step}" for step in (2, 4, 6)
    ]
    assert written["checkpoint"] == str(output / "global_step6")


def test_a_finished_run_has_nothing_to_do(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy(single, tmp_path / "again")
    config.with_name("train.json").unlink()
    assert train_here(config) == 0
    assert "already at step 6, the last; nothing to train" in capsys.readouterr().out
    checkpoint = {"checkpoint": str(tmp_path / "again" / "training" / "global_step6")}
    assert summary(config) == {**summary(single), **checkpoint}


def test_other_settings_move_the_old_run_aside(
    root: Path, single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy(single, tmp_path / "run")
    text = config.read_text()
    text = text.replace("learning_rate: 0.01", "learning_rate: 0.02")
    config.write_text(text.replace("on_change: refuse", "on_change: restart"))
    assert train_here(config) == 0
    (aside,) = tmp_path.glob("run/training.*")
    assert aside.name == f"training.{summary(single)['digest'][:8]}"
    assert str(aside) in capsys.readouterr().out
    assert (aside / "global_step6" / "state.json").is_file()
    assert losses(config)[0] == losses(single)[0]
    assert losses(config)[5] != losses(single)[5]


def test_a_parser_of_megatrons_logs_reads_the_metrics(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(root, "megatron", log_style="megatron", evaluation_interval=3)
    capsys.readouterr()
    assert train_here(config) == 0
    lines = megatron_lines(capsys.readouterr().out)
    records = read(read_run(config).output / "metrics.jsonl")
    assert len(lines) == len(records) > 6
    rates = {record["step"]: record["learning_rate"] for record in records if "loss" in record}
    for line, record in zip(lines, records, strict=True):
        assert line["iteration"] == record["step"]
        if "loss" in record:
            assert line["train iterations"] == 6
            assert line["consumed samples"] == record["consumed_samples"]
            assert line["global batch size"] == record["batch_size"] == 8
            assert line["lm loss"] == pytest.approx(record["loss"], rel=1e-6)
            # Megatron prints the rate after its scheduler's step.
            next_rate = rates.get(record["step"] + 1, line["learning rate"])
            assert line["learning rate"] == pytest.approx(next_rate, rel=1e-6)
            assert line["grad norm"] == pytest.approx(record["grad_norm"], abs=5e-4)
        else:
            assert line["lm loss value"] == pytest.approx(record["validation_loss"], rel=1e-6)


def test_settings_without_effect_on_weights_do_not_restart_the_run(
    single: Path, tmp_path: Path
) -> None:
    config = copy(single, tmp_path / "run")
    config.write_text(config.read_text().replace("log_interval: 1", "log_interval: 5"))
    assert train_here(config) == 0
    assert not list(tmp_path.glob("run/training.*"))


def test_other_validation_samples_do_not_restart_the_run(
    root: Path, single: Path, tmp_path: Path
) -> None:
    config = copy(single, tmp_path / "run")
    described = json.loads((root / "index/index.json").read_text())
    index(
        weights=root / "weights.txt", data_root=root, output=tmp_path / "index", seed=3,
        sequence_length=16, split="80,20,0", valid_samples=24,
        train_samples=described["train_samples"],
    )  # fmt: skip
    again = json.loads((tmp_path / "index/index.json").read_text())
    assert again["digest"] != described["digest"]
    config.write_text(config.read_text().replace(f"{root}/index", f"{tmp_path}/index"))
    assert str(tmp_path / "index") in config.read_text()
    assert train_here(config) == 0
    assert not list(tmp_path.glob("run/training.*"))


@pytest.mark.fault("stop signal")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.grid),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.grid),
    ],
)
def test_a_signal_saves_and_the_run_resumes(
    root: Path,
    single: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    config, add = make_run(root, f"stopped-{number.name}"), Metrics.add

    def add_and_stop(metrics: Metrics, record: Record) -> None:
        add(metrics, record)
        if record["step"] == 4:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a launcher repeats the signal

    before, progress = signal.getsignal(number), config.with_name("progress")
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "add", add_and_stop)
        patch.setenv("JOB_PROGRESS_FILE", str(progress))
        assert train_here(config) == Stopped[number.name]
    assert f"stopped by {number.name}: saved at step 5, run the same" in capsys.readouterr().out
    assert progress.read_text() == "saved at step 5\n"
    assert not config.with_name("train.json").exists()
    assert signal.getsignal(number) == before
    assert train_here(config) == 0
    assert_same_end(config, single)


@pytest.mark.fault("kill in a save")
@pytest.mark.parametrize(
    ("step", "is_stopped"), [(3, True), pytest.param(6, True, marks=pytest.mark.grid), (6, False)]
)
def test_a_kill_between_the_save_and_the_validation_loses_no_validation(
    root: Path, single: Path, monkeypatch: pytest.MonkeyPatch, step: int, is_stopped: bool
) -> None:
    config, add = make_run(root, f"unvalidated-{step}-{is_stopped}"), Metrics.add

    def add_and_stop(metrics: Metrics, record: Record) -> None:
        add(metrics, record)
        if is_stopped and record["step"] == step - 1 and "loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    def validate_or_die(
        instance: trainer.Trainer, validate: Any = trainer.Trainer.validate
    ) -> None:
        if instance.state.step == step:
            raise SystemExit(137)
        validate(instance)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Metrics, "add", add_and_stop)
        patch.setattr(trainer.Trainer, "validate", validate_or_die)
        train_here(config)
    assert (read_run(config).output / "latest").read_text() == f"global_step{step}"
    assert len(losses(config, "validation_loss")) == step // 3
    assert train_here(config) == 0
    assert_same_end(config, single)
    records_before = records(config)
    assert train_here(config) == 0  # nothing is measured twice
    assert records(config) == records_before


@pytest.mark.fault("numbers that are not finite")
def test_divergence_stops_the_run_and_names_the_step(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(root, "diverged", optimizer={"learning_rate": 1e30})
    progress = config.with_name("progress")
    monkeypatch.setenv("JOB_PROGRESS_FILE", str(progress))
    with pytest.raises(UserError, match=r"step [3-6]: (loss|gradient norm): .*global_step2"):
        train_here(config)
    assert (read_run(config).output / "latest").read_text() == "global_step2"
    assert not progress.exists()  # another job would diverge in the same way


def test_missing_initial_weights_are_refused(root: Path, tmp_path: Path) -> None:
    config = make_run(root, "weightless")
    config.write_text(config.read_text().replace(str(root / "start"), str(tmp_path / "none")))
    with pytest.raises(UserError, match="none/global_step0: no such folder"):
        train_here(config)


def test_validation_can_be_turned_off(root: Path) -> None:
    config = make_run(root, "unvalidated", evaluation_steps=0, train_steps=2)
    assert train_here(config) == 0
    assert summary(config)["validation_losses"] == []


@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_without_a_label_there_is_no_loss(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ends of documents have no loss, and there is nothing else."""
    prepare(tmp_path)
    tokens = np.fromfile(tmp_path / "corpus.bin", np.uint16)
    np.full_like(tokens, 7).tofile(tmp_path / "corpus.bin")
    vouch(tmp_path / "corpus", vocab_size=120)
    make_index(
        tmp_path, sequence_length=16, split="80,20,0", seed=3, train_samples=80, valid_samples=16
    )
    config = make_run(tmp_path, "run", backend=backend, train_steps=3, keep_last=2, keep_best=1)
    run = read_run(config)
    settings = run.train.model_copy(update={"eod_mask_loss": True})
    write_run(config, run.model_copy(update={"eod": 7, "train": settings}))
    assert train_here(config) == 0
    printed = capsys.readouterr().out
    assert "step 3/3 | loss none (no token of the batch has a label) |" in printed
    assert "step 3/3 | validation loss none: no token of the split has a label" in printed
    lines = (run.output / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("loss", 0) for line in lines] == [0, None, None, None, 0]
    assert json.loads(lines[-1])["validation_loss"] is None
    assert summary(config)["last_loss"] is None
    state = files.read_sealed_json(run.output / "global_step3/state.json", "")
    assert state["guard"]["losses"] == []  # nothing to compare the next steps with


def test_sgd_trains_without_clipping(root: Path) -> None:
    settings = {"name": "sgd", "learning_rate": 0.5}
    config = make_run(
        root, "sgd", optimizer=settings, gradient_clipping=0.0, schedule={"name": "constant"}
    )
    assert train_here(config) == 0
    assert losses(config, "grad_norm")[0] == pytest.approx(1.0846, rel=1e-3)
    assert losses(config)[-1] < losses(config)[0] - 0.1


@pytest.mark.fault("full disk")
def test_a_full_disk_is_reported_in_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(root, "full", backend="native")

    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    with pytest.raises(UserError, match=r"could not be written \(.*No space left on device.*\)"):
        train_here(config)
    assert not (read_run(config).output / "latest").exists()
    monkeypatch.undo()
    assert train_here(config) == 0
