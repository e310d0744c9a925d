"""Finetuning equals transformers with torch's SGD, on any ranks, and resumes exactly."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import finetunes, native_weights
from tests.support.finetunes import TASK, prepare, run_here, run_on_rank
from tests.support.programs import torch_python
from tests.support.ranks import spawn
from tokamake.checkpoint.detect import open_any
from tokamake.config.finetune import FinetuneTask
from tokamake.errors import UserError
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.runtime.exit_status import Stopped
from tokamake.train.objectives.classification import objective
from tokamake.train.objectives.classification.rows import read_rows
from tokamake.train.step_result import StepResult
from tokamake.train.trainer import Trainer

SGD = {
    "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    "schedule": {"name": "constant"},
    "gradient_clipping": 0.0,
}


def weights(folder: Path) -> dict[str, Tensor]:
    path = open_any(folder).path
    return native_weights.read(path)[1]


def assert_same(first: Path, second: Path, **tolerances: float) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], **(tolerances or {"atol": 0, "rtol": 0}))


def their_training(run: FinetuneRun, *, epochs: int) -> dict[str, Tensor]:
    """Weights of transformers' model after SGD on the same batches."""
    from tests.support.hf_folder import from_hf, to_hf

    transformers = pytest.importorskip("transformers")
    shape = run.architecture
    config = transformers.MegatronBertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        intermediate_size=shape.intermediate_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=shape.max_position_embeddings,
        layer_norm_eps=shape.layer_norm_epsilon,
        num_labels=shape.setting("num_classes"),
    )
    model = transformers.MegatronBertForSequenceClassification(config)
    model.load_state_dict(to_hf(shape, weights(run.checkpoint)))
    model.eval()
    rows = read_rows(
        run.finetune.train_files,
        FinetuneTask(**TASK),
        tokenizer=run.tokenizer,
        sequence_length=run.train.sequence_length,
    )
    for epoch in range(epochs):
        order = np.random.default_rng((run.seed, epoch)).permutation(len(rows))
        for start in range(0, len(rows), 6):
            chosen = order[start : start + 6]
            batch = rows.micro_batch(chosen, len(chosen), num_labels=len(chosen))
            loss = model(
                input_ids=torch.from_numpy(batch.tokens),
                token_type_ids=torch.from_numpy(batch.types),
                attention_mask=torch.from_numpy(batch.padding_mask).long(),
                labels=torch.from_numpy(batch.labels),
            ).loss
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    return from_hf(shape, dict(model.state_dict()))


def test_an_epoch_equals_transformers_with_sgd(tmp_path: Path) -> None:
    run = prepare(tmp_path, rows=(17, 8), task={"epochs": 1}, **SGD)
    result = run_here(run)
    assert [record["step"] for record in result["epochs"]] == [3]
    ours = weights(tmp_path / "task/finetuned")
    theirs = their_training(run, epochs=1)
    assert ours.keys() == theirs.keys()
    start = weights(run.checkpoint)
    assert not torch.equal(ours["model.task_head.weight"], start["model.task_head.weight"])
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        pytest.param(3, {}, marks=pytest.mark.grid),
        (2, {"tensor_parallel_size": 2}),
        pytest.param(
            2,
            {"tensor_parallel_size": 2, "sequence_parallel": True},
            marks=pytest.mark.grid,
        ),
    ],
)
def test_ranks_train_as_one_process(
    tmp_path: Path, world_size: int, parallel: dict[str, Any]
) -> None:
    settings = {**SGD, "dropout": {"hidden": 0.1, "attention": 0.1}, "zero_stage": 1}
    alone = prepare(tmp_path, "alone", rows=(17, 7), task={"epochs": 1}, **settings)
    together = prepare(
        tmp_path, "together", rows=(17, 7), task={"epochs": 1}, **settings, parallel=parallel
    )
    result = run_here(alone)
    spawn(run_on_rank, world_size, together)
    assert_same(tmp_path / "alone/finetuned", tmp_path / "together/finetuned", atol=2e-6, rtol=1e-5)
    theirs = json.loads((tmp_path / "together/finetune.json").read_text())
    (ours,), (record,) = result["epochs"], theirs["epochs"]
    assert record["scores"] == ours["scores"]
    assert record["train_loss"] == pytest.approx(ours["train_loss"], rel=1e-5)


class Killed(Exception):
    """Stands for the end of a process."""


def kill_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the next training end after a number of steps."""
    step, done = Trainer.step, []

    def counted(trainer: Trainer) -> StepResult | None:
        done.append(0)
        if len(done) > number:
            trainer.saver.finish()
            raise Killed
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", counted)


def test_an_interrupted_run_ends_as_one_without_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dropout": {"hidden": 0.1}, "save_interval": 2}
    whole = prepare(tmp_path, "whole", rows=(17, 8), **settings)
    halted = prepare(tmp_path, "halted", rows=(17, 8), **settings)
    expected = run_here(whole)
    # Within an epoch, after its end, and before a first checkpoint would be there.
    for number in (3, 1, 1):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            kill_after(patched, number)
            run_here(halted)
    result = run_here(halted)
    assert result["epochs"] == expected["epochs"]
    assert_same(tmp_path / "whole/training", tmp_path / "halted/training")


def test_a_finished_run_trains_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(tmp_path, rows=(8, 6))
    first = run_here(run)
    kill_after(monkeypatch, 0)
    for name in ("finetune.json", "environment.json"):
        (tmp_path / "task" / name).unlink()
    assert run_here(run) == first
    assert not (tmp_path / "task/environment.json").exists()


def test_a_job_prints_its_start_and_writes_its_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_here(prepare(tmp_path, rows=(8, 6), task={"epochs": 1}))
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("model     task: bert, ") for line in lines)
    assert any(line.startswith("layout    1 rank on cpu, fp32, native") for line in lines)
    environment = json.loads((tmp_path / "task/environment.json").read_text())
    assert environment["packages"]["torch"]


READS_UNTIL_SIGNAL = """
import os, signal, sys
from pathlib import Path
from tokamake.finetune import finetune, start

def read(*_, **__):
    os.kill(os.getpid(), signal.SIGUSR1)
    return signal.pause()

start.read_data = read
folder = Path(sys.argv[1])
finetune.finetune(config=folder / "run.yaml", output=folder / "a.json", model=folder / "model")
"""


@pytest.mark.fault("stop signal")
def test_a_signal_while_rows_are_read_ends_the_job(tmp_path: Path) -> None:
    prepare(tmp_path, rows=(8, 6))
    command = [torch_python(), "-c", READS_UNTIL_SIGNAL, str(tmp_path / "task")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == Stopped.SIGUSR1, ended.stderr
    assert ended.stdout.endswith("stopped by SIGUSR1; there was nothing to save\n")
    assert "Traceback" not in ended.stderr


def test_a_task_names_its_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(tmp_path, rows=(8, 6))
    assert run.resolved(8).train.objective == "classification"
    monkeypatch.setattr(FinetuneTask, "objective", "causal")
    with pytest.raises(UserError, match="objective: 'causal': no objective of a task; choose"):
        run.resolved(8)


def test_the_best_epoch_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([0.5, 0.9, 0.7, 0.9, 0.6])
    monkeypatch.setattr(objective, "scores", lambda *_, **__: {"accuracy": next(values)})
    run = prepare(tmp_path, rows=(8, 6), task={"epochs": 5})
    result = run_here(run)
    assert (result["best"]["epoch"], result["best"]["step"]) == (2, 4)
    steps = sorted(path.name for path in run.output.glob("global_step*"))
    assert steps == ["global_step10", "global_step4", "global_step8"]
    assert_same(tmp_path / "task/finetuned", run.output / "global_step4")
    assert (tmp_path / "task/finetuned/latest").read_text() == "global_step4"


def test_a_changed_run_is_refused_or_starts_again(tmp_path: Path) -> None:
    run = prepare(tmp_path, rows=(8, 6), task={"epochs": 1})
    run_here(run)
    changed = run.model_copy(update={"seed": 4})
    with pytest.raises(UserError, match=r"checkpoints of another run: seed 3 -> 4. Give the run"):
        run_here(changed)
    train = run.train.model_copy(update={"on_change": "restart"})
    result = run_here(changed.model_copy(update={"train": train}))
    assert result["best"]["epoch"] == 1
    assert [*run.output.parent.glob("training.*")]


def test_other_rows_are_another_run(tmp_path: Path) -> None:
    run = prepare(tmp_path, rows=(8, 6), task={"epochs": 1})
    run_here(run)
    finetunes.write_rows(tmp_path / "train.jsonl", finetunes.planted_rows(8, 9))
    with pytest.raises(UserError, match="another run: train_rows differs"):
        run_here(run)


def test_rows_without_labels_are_refused(tmp_path: Path) -> None:
    run = prepare(tmp_path, rows=(8, 6))
    rows = [{"text": "a", "other": "b"}, *finetunes.planted_rows(4, 1)]
    finetunes.write_rows(tmp_path / "validation.jsonl", rows)
    message = r"validation_files: .*1 of 5 rows have no label, the first is .*:\d+; name files"
    with pytest.raises(UserError, match=message):
        run_here(run)


@pytest.mark.grid
def test_a_planted_task_is_learned_above_any_bag_of_words(tmp_path: Path) -> None:
    """Validation rows have twins with the same words and the other label: bags have 0.5."""
    run = prepare(
        tmp_path,
        rows=(240, 60),
        task={"epochs": 8},
        global_batch_size=16,
        micro_batch_size=8,
        optimizer={"learning_rate": 0.003},
    )
    rows = [
        json.loads(line) for line in Path(run.finetune.validation_files[0]).read_text().splitlines()
    ]
    bags: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        words = tuple(sorted(f"{row['text']} {row['other']}".split()))
        bags.setdefault(words, []).append(row["label"])
    most = sum(max(map(labels.count, {*labels})) for labels in bags.values())
    assert most / len(rows) == 0.5
    result = run_here(run)
    assert result["best"]["scores"]["accuracy"] > 0.9
