"""Training on masked samples: at each layout it equals transformers' MegatronBert and torch."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import objective_training
from tests.support.berts import (
    bert,
    masked_samples,
    reference,
    rows_of,
    tensors_of,
    their_loss,
    their_output,
)
from tests.support.engines import build
from tests.support.hf_folder import from_hf
from tests.support.layouts import laid_out, parallel
from tests.support.objective_training import (
    NUM_STEPS,
    OPTIMIZER,
    SIZE,
    Records,
    Results,
    assert_as_if_alone,
    assert_same_curves,
    assert_trained,
    template,
    trained_by_jobs,
)
from tests.support.proofs import Changes, Proved
from tests.support.ranks import spawn
from tests.support.runs import losses, records, write_start
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.optim.sophia_g import label_draws
from tokamake.preflight.model import check_layout
from tokamake.train.objectives._base import objective_class
from tokamake.train.objectives.masked.rows import MaskedRows, masked_rows

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 121, "max_position_embeddings": 32, "num_hidden_layers": 4}
ARCHITECTURE = bert(**SHAPE)
LENGTH = 16
FULL = {"recompute_granularity": "full"}
PACKED = {"pack_samples": True, "micro_batch_size": 8}
LAYOUTS: Proved = {
    1: [
        ("bert", {}),
        ("bert", {"micro_batch_size": 1}),
        ("bert", {"log_corpus_losses": True}),
        ("bert", PACKED),
    ],
    2: [
        ("bert", parallel(tp=2, sp=True) | FULL | {"micro_batch_size": 4}),
        ("bert", parallel(pp=2) | FULL | {"micro_batch_size": 1}),
        ("bert", PACKED | {"zero_stage": 3, "micro_batch_size": 4}),
        ("bert", PACKED | parallel(tp=2, sp=True)),
    ],
}
"""By number of ranks: family and settings. Random compositions compare all layouts with one."""


def samples_of(step: int) -> MaskedRows:
    """Samples of a global batch; some micro batches have no masked token."""
    samples = masked_samples(ARCHITECTURE, number=SIZE, length=LENGTH, seed=step)
    samples.labels[2:5] = -100
    return samples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("masked")
    run = template(root)
    write_start(root / "bert", ARCHITECTURE, from_hf(ARCHITECTURE, tensors_of(oracle())))
    changed = {"architecture": ARCHITECTURE, "checkpoint": root / "bert/global_step0"}
    return laid_out(run.model_copy(update=changed), {"objective": "masked", **OPTIMIZER})


def oracle() -> Any:
    """transformers' model."""
    return reference(ARCHITECTURE)


def train(layouts: list[Run]) -> list[Results]:
    """Train each run on this rank."""
    return objective_training.train(layouts, samples_of)


@cache
def plain_training() -> Results:
    """Train transformers' model with torch's AdamW in one process."""
    model = oracle()
    result = objective_training.plain_training(model, samples_of, their_loss)
    result["metrics"] = accuracies(model, samples_of(NUM_STEPS))
    stored = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return result | {"weights": from_hf(ARCHITECTURE, stored)}


@torch.no_grad()
def accuracies(model: Any, samples: MaskedRows) -> dict[str, float]:
    """Shares of the masked tokens and of the orders that transformers' model predicts."""
    logits, order = their_output(model, samples)
    labels = torch.from_numpy(samples.labels)
    tokens_right = (logits.argmax(-1) == labels)[labels >= 0]
    orders_right = order.argmax(-1) == torch.from_numpy(samples.is_random)
    return {
        "token_accuracy": tokens_right.double().mean().item(),
        "sample_accuracy": orders_right.double().mean().item(),
    }


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), LAYOUTS.items())
def test_each_layout_trains_as_transformers_and_torch(
    world_size: int, layouts: list[tuple[str, Changes]], run: Run
) -> None:
    expected = plain_training()
    of_ranks = spawn(train, world_size, [laid_out(run, layout) for _, layout in layouts])
    for (_, layout), *results in zip(layouts, *of_ranks, strict=True):
        assert_trained((*results,), expected, layout)
        for result in results:
            pairs = zip(result["sample_loss"], result["loss"], strict=True)
            assert all(0 < order < loss for order, loss in pairs), layout


FURTHER = {"token_types", "document_ids", "label_places"}
DROPPING = {"dropout": {"hidden": 0.2, "attention": 0.1, "embedding": 0.1}}


@pytest.mark.grid
@pytest.mark.ranks
def test_each_layout_drops_the_same_numbers(run: Run) -> None:
    dropping = laid_out(run, DROPPING)
    (expected,) = spawn(train, 1, [dropping])
    assert expected[0]["loss"] != pytest.approx(plain_training()["loss"], rel=1e-3)
    layouts = [
        {"zero_stage": 3},
        parallel(tp=2, sp=True) | FULL,
        PACKED | parallel(tp=2, sp=True),
        parallel(pp=2),
    ]
    results = spawn(train, 2, [laid_out(dropping, each) for each in layouts])
    assert_as_if_alone(results, expected[0])


@pytest.mark.ranks
def test_labels_that_an_optimizer_draws_are_the_same_in_shared_rows(run: Run) -> None:
    sophia = {"name": "sophia_g", "learning_rate": 0.001, "hessian_interval": 1}
    drawing = laid_out(run, {"optimizer": sophia})
    layouts = [{"micro_batch_size": 8}, PACKED, {"micro_batch_size": 2}]
    ((first, *others),) = spawn(train, 1, [laid_out(drawing, each) for each in layouts])
    assert first["loss"] != pytest.approx(plain_training()["loss"], rel=1e-5)
    assert_as_if_alone([others], first)


def without_labels(run: Run) -> tuple[float, float]:
    """Loss and gradient norm of a global batch that masks nothing."""
    engine = build(run)
    rows = samples_of(0)
    rows.labels[:] = -100
    part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    result = engine.train_step([rows_of(rows, part)], learning_rate=0.01, weight_decay=0.1)
    validation = engine.validate(iter([rows_of(rows, part)])).loss
    assert result.loss == pytest.approx(result.sample_loss)
    assert result.updated
    return result.grad_norm, validation


@pytest.mark.ranks
def test_a_batch_without_masked_tokens_has_the_loss_of_the_order_alone(run: Run) -> None:
    for norm, held_out in spawn(without_labels, 2, laid_out(run, {"micro_batch_size": 4})):
        assert 0 < norm < float("inf")
        assert 0 < held_out < float("inf")


@pytest.mark.usefixtures("lone_rank")
def test_a_batch_without_masked_tokens_has_no_loss_without_a_head(run: Run, tmp_path: Path) -> None:
    headless = bert(**(SHAPE | {"sentence_order_head": False}))
    tensors = tensors_of(reference(headless))
    write_start(tmp_path / "bert", headless, from_hf(headless, tensors))
    changed = {"architecture": headless, "checkpoint": tmp_path / "bert/global_step0"}
    settings = {"masking": {"sentence_order": False}, "micro_batch_size": SIZE}
    engine = build(laid_out(run.model_copy(update=changed), settings))
    rows = samples_of(0)
    rows.labels[:] = -100
    result = engine.train_step([rows], learning_rate=0.01, weight_decay=0.1)
    assert (result.loss, result.has_labels) == (0, False)
    assert engine.validate(iter([rows])).loss is None


def records_of(samples: MaskedRows) -> Any:
    """The samples as `data.samples` makes them."""
    fields = [(name, np.int64, (LENGTH,)) for name in ("tokens", "types", "labels")]
    numbers = [(name, np.int64) for name in ("num_tokens", "is_swapped", "is_truncated")]
    records = np.zeros(SIZE, np.dtype([*fields, *numbers]))
    for name in ("tokens", "types", "labels"):
        records[name] = getattr(samples, name)
    records["num_tokens"] = samples.padding_mask.sum(1)
    records["is_swapped"] = samples.is_random
    return records


def test_records_of_the_loader_are_such_samples(run: Run) -> None:
    samples = samples_of(0)
    records = records_of(samples)
    for ours, theirs in zip(masked_rows(records), samples, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    objective = objective_class(run.train.objective)(run)
    batches = [objective.to_batch(rows) for rows in (records, samples)]
    assert batches[0].further_inputs.keys() == FURTHER
    for rows, batch in zip((records, samples), batches, strict=True):
        assert objective.label_shape(rows) == (SIZE, LENGTH)
        assert torch.equal(batch.inputs, torch.from_numpy(samples.tokens))
        assert torch.equal(batch.labels, torch.from_numpy(samples.labels[samples.labels >= 0]))
        assert batch.sample_labels is not None
        assert torch.equal(batch.sample_labels, torch.from_numpy(samples.is_random))
        padding = batch.further_inputs["document_ids"]
        assert torch.equal(padding, torch.from_numpy(~samples.padding_mask).long())
    assert objective.counts_labels
    (draws,) = label_draws(1, objective.label_shape(records), seed=1, step=1)
    assert draws.shape == (SIZE, LENGTH)


def of_split(number: int) -> Records:
    """Samples of a split: every masked token is one more than the next."""
    batches = [samples_of(step) for step in range(number // SIZE)]
    for samples in batches:
        is_masked = samples.labels[:, :-1] >= 0
        samples.labels[:, :-1][is_masked] = samples.tokens[:, 1:][is_masked] % 20
    return Records([records_of(samples) for samples in batches])


@pytest.mark.usefixtures("lone_rank")
def test_the_trainer_takes_records_and_continues_from_its_checkpoints(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run may continue with or without samples that share rows.
    jobs = {
        "whole": [(None, {})],
        "parts": [(3, {}), (None, {})],
        "packed": [(3, PACKED), (None, {})],
    }
    whole, parts, packed = trained_by_jobs(run, tmp_path, monkeypatch, of_split=of_split, jobs=jobs)
    for key in ("loss", "sample_loss", "validation_loss"):
        assert losses(packed, key) == pytest.approx(losses(whole, key), rel=1e-4)
    assert_same_curves(parts, whole, "loss", "token_loss", "sample_loss", "validation_loss")
    for record in records(whole):
        if "loss" in record:
            assert record["token_loss"] + record["sample_loss"] == pytest.approx(record["loss"])


def test_full_samples_need_no_mask(run: Run) -> None:
    first = rows_of(samples_of(0), slice(0, 1))
    batch = objective_class(run.train.objective)(run).to_batch(first)
    assert batch.further_inputs.keys() == FURTHER - {"document_ids"}


def test_context_parallelism_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match=r"context_parallel_size: 2: .*bert.*; set 1"):
        check_layout(laid_out(run, parallel(cp=2)).train, run.architecture)
