"""Training on question files equals transformers' towers and torch, on any ranks, and resumes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support import native_weights
from tests.support.biencoders import Oracle
from tests.support.finetunes import run_here, run_on_rank
from tests.support.hf_folder import from_hf, to_hf
from tests.support.question_files import SGD, prepare_questions, small_biencoder
from tests.support.ranks import spawn
from tokamake.checkpoint.detect import open_any
from tokamake.errors import UserError
from tokamake.finetune.evaluate_finetuned import evaluate_finetuned
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.train.objectives.retrieval.rows import QuestionBatch, read_rows
from tokamake.train.step_result import StepResult
from tokamake.train.trainer import Trainer

TASK = {"hard_negatives": 2, "positive": "drawn", "score_scaling": True}


def weights(folder: Path) -> dict[str, Tensor]:
    return native_weights.read(open_any(folder).path)[1]


def assert_same(first: Path, second: Path, **tolerances: float) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], **(tolerances or {"atol": 0, "rtol": 0}))


def their_loss(oracle: Oracle, batch: QuestionBatch) -> Tensor:
    """Mean cross entropy; other positives of a question are no negatives."""
    arrays = [batch.tokens, batch.is_padding, batch.passages, batch.is_passage_padding]
    tokens, padding, passages, passage_padding = map(torch.from_numpy, arrays)
    queries, found = (
        oracle(tokens, padding, number=0),
        oracle(passages, passage_padding, number=1),
    )
    number = batch.labels.shape[0]
    each = len(passages) // number
    columns = batch.labels[:, :each].flatten()
    scores = queries @ found.T / math.sqrt(32)
    losses = []
    for row in range(number):
        positives = {*batch.labels[row, each:].tolist()} - {0}
        kept = [
            column
            for column, passage in enumerate(columns.tolist())
            if column == row * each or (passage and passage not in positives)
        ]
        losses.append(F.cross_entropy(scores[row, kept], torch.tensor(kept.index(row * each))))
    return torch.stack(losses).mean()


def their_training(run: FinetuneRun) -> dict[str, Tensor]:
    """Weights of transformers' towers after an epoch of SGD on whole global batches."""
    oracle = Oracle(run.architecture)
    oracle.load_state_dict(to_hf(run.architecture, weights(run.checkpoint)))
    rows = read_rows(
        run.finetune.train_files, run.finetune.task, tokenizer=run.tokenizer, sequence_length=16
    )
    order = np.random.default_rng((run.seed, 0)).permutation(len(rows))
    for start in range(0, len(rows), 8):
        chosen = order[start : start + 8]
        batch = rows.micro_batch(chosen, len(chosen), num_labels=len(chosen), epoch=(run.seed, 0))
        loss = their_loss(oracle, batch)
        oracle.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in oracle.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
    return from_hf(run.architecture, dict(oracle.state_dict()))


def test_an_epoch_equals_transformers_with_sgd(tmp_path: Path) -> None:
    run = prepare_questions(tmp_path, task=TASK, **SGD)
    result = run_here(run)
    assert [record["step"] for record in result["epochs"]] == [3]  # the last of 3 rows
    theirs = their_training(run)
    for name, tensor in weights(tmp_path / "run/finetuned").items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {"zero_stage": 2}),
        pytest.param(4, {"zero_stage": 3}, marks=pytest.mark.grid),
        pytest.param(4, {"parallel": {"tensor_parallel_size": 2}}, marks=pytest.mark.grid),
    ],
)
def test_ranks_train_as_one_process(
    tmp_path: Path, world_size: int, changes: dict[str, Any]
) -> None:
    settings = {**SGD, "dropout": {"hidden": 0.1, "attention": 0.1}}
    alone = prepare_questions(tmp_path, "alone", task=TASK, **{**settings, "micro_batch_size": 8})
    together = prepare_questions(tmp_path, "together", task=TASK, **settings, **changes)
    (ours,) = run_here(alone)["epochs"]
    spawn(run_on_rank, world_size, together)
    assert_same(tmp_path / "alone/finetuned", tmp_path / "together/finetuned", atol=1e-5, rtol=1e-5)
    (theirs,) = json.loads((tmp_path / "together/finetune.json").read_text())["epochs"]
    assert theirs["scores"] == pytest.approx(ours["scores"], rel=1e-5)
    assert theirs["train_loss"] == pytest.approx(ours["train_loss"], rel=1e-5)


class Killed(Exception):
    """Stands for the end of a process."""


@pytest.mark.grid
def test_an_interrupted_run_ends_as_one_without_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SGD, "micro_batch_size": 8, "dropout": {"hidden": 0.1}, "save_interval": 1}
    whole = prepare_questions(tmp_path, "whole", task=TASK, epochs=2, **settings)
    halted = prepare_questions(tmp_path, "halted", task=TASK, epochs=2, **settings)
    expected, step, done = run_here(whole), Trainer.step, list[int]()

    def counted(trainer: Trainer) -> StepResult | None:
        done.append(0)
        if len(done) > 4:
            trainer.saver.finish()
            raise Killed
        return step(trainer)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Trainer, "step", counted)
        run_here(halted)
    assert run_here(halted)["epochs"] == expected["epochs"]
    assert_same(tmp_path / "whole/training", tmp_path / "halted/training")


def test_models_without_towers_are_refused(tmp_path: Path) -> None:
    from tests.support.finetunes import small_bert
    from tests.support.random_tensors import random_tensors
    from tests.support.runs import write_start

    write_start(tmp_path / "pretrained", small_bert(), random_tensors(small_bert(), 5))
    with pytest.raises(
        UserError, match=r"retrieval: needs a biencoder, and the model is of .*bert"
    ):
        prepare_questions(tmp_path)


@pytest.mark.grid
def test_a_shared_tower_learns_too(tmp_path: Path) -> None:
    shape = small_biencoder(shared_towers=True, projection_dim=0)
    result = run_here(
        prepare_questions(tmp_path, shape=shape, epochs=8, micro_batch_size=2, global_batch_size=6)
    )
    first, last = result["epochs"][0], result["epochs"][-1]
    assert last["train_loss"] < first["train_loss"]
    assert {*last["scores"]} == {*result["metrics"]}


def test_a_finetuned_model_is_scored_and_its_towers_embed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**SGD, "micro_batch_size": 8}
    result = run_here(prepare_questions(tmp_path, **settings))
    evaluate_finetuned(
        "retrieval",
        checkpoint=tmp_path / "run/finetuned",
        data=[f"dev={tmp_path / 'validation.json'}"],
        tokenizer=tmp_path / "vocab.txt",
        sequence_length=16,
        batch_size=3,
        output=tmp_path / "scores.json",
        predictions=tmp_path / "predictions",
    )
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]["dev"]
    assert scores == pytest.approx({"rows": 7, **result["best"]["scores"]}, rel=1e-6)
    lines = (tmp_path / "predictions/dev.jsonl").read_text().splitlines()
    places = [json.loads(line)["place"] for line in lines]
    assert sum(places) / 7 == pytest.approx(scores["average_rank"])
    assert "validation: 7 rows of retrieval" in capfd.readouterr().out
