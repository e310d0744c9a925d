"""Training on masked samples: at each layout it equals transformers' MegatronBert and torch."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.berts import (
    bert,
    masked_samples,
    reference,
    rows_of,
    tensors_of,
    their_loss,
    their_output,
)
from tests.support.engines import build, parts, whole
from tests.support.grids import split_layouts
from tests.support.hf_tensors import from_hf
from tests.support.layouts import laid_out, parallel
from tests.support.proofs import Changes, Proved
from tests.support.ranks import spawn
from tests.support.runs import (
    losses,
    make_run,
    prepare,
    records,
    train_here,
    weights,
    write_start,
)
from tokamake import files
from tokamake.config.objective import sample_settings
from tokamake.config.resolved_run import Run, read_run, write_run
from tokamake.data.samples.index_folder import read_index
from tokamake.errors import UserError
from tokamake.preflight.layout import check_layout
from tokamake.train import trainer, validation
from tokamake.train.batch import SampleIds
from tokamake.train.objectives._base import make_objective
from tokamake.train.objectives.masked.rows import MaskedRows, masked_rows
from tokamake.train.sampled_labels import label_draws

CPU = torch.device("cpu")
ARCHITECTURE = bert(vocab_size=121, max_position_embeddings=32, num_hidden_layers=4)
SIZE, LENGTH, NUM_STEPS = 8, 16, 3
FULL = {"recompute_granularity": "full"}
DEEPSPEED = {"backend": "deepspeed"}
PACKED = {"pack_samples": True, "micro_batch_size": 8}
LAYOUTS: Proved = {
    1: [
        ("bert", {}),
        ("bert", {"micro_batch_size": 8}),
        ("bert", {"micro_batch_size": 1}),
        ("bert", FULL),
        ("bert", {"log_corpus_losses": True}),
        ("bert", PACKED),
    ],
    2: [
        *[("bert", {"zero_stage": stage}) for stage in range(4)],
        ("bert", {"zero_stage": 3, "micro_batch_size": 1}),
        ("bert", parallel(tp=2)),
        ("bert", parallel(tp=2, sp=True)),
        ("bert", parallel(tp=2, sp=True) | FULL | {"micro_batch_size": 4}),
        *[("bert", DEEPSPEED | {"zero_stage": stage}) for stage in (1, 2, 3)],
        ("bert", DEEPSPEED | {"zero_stage": 2} | parallel(tp=2, sp=True)),
        ("bert", parallel(pp=2)),
        ("bert", parallel(pp=2) | FULL | {"micro_batch_size": 1}),
        ("bert", parallel(pp=2, schedule="gpipe") | DEEPSPEED | {"zero_stage": 1}),
        ("bert", parallel(pp=2, schedule="interleaved_zero_bubble", vpp=2)),
        ("bert", PACKED | {"zero_stage": 3, "micro_batch_size": 4}),
        ("bert", PACKED | parallel(tp=2, sp=True) | FULL),
        ("bert", PACKED | DEEPSPEED | {"zero_stage": 2, "micro_batch_size": 4}),
    ],
    4: [
        ("bert", parallel(tp=2, pp=2, sp=True)),
        ("bert", parallel(pp=2) | {"zero_stage": 3}),
    ],
}
"""By number of ranks: family and settings."""


def samples_of(step: int) -> MaskedRows:
    """Samples of a global batch; some micro batches have no masked token."""
    samples = masked_samples(ARCHITECTURE, number=SIZE, length=LENGTH, seed=step)
    samples.labels[2:5] = -100
    return samples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = prepare(tmp_path_factory.mktemp("masked"))
    config = make_run(root, "run")
    weights = from_hf(ARCHITECTURE, tensors_of(reference(ARCHITECTURE)))
    write_start(root / "bert", ARCHITECTURE, weights)
    # Biases of keys do not change a softmax: a small eps would amplify their rounding errors.
    optimizer = {"optimizer": {"learning_rate": 0.01, "epsilon": 1e-3}}
    changed = {"architecture": ARCHITECTURE, "checkpoint": root / "bert/global_step0"}
    settings = {"objective": "masked", **optimizer}
    return laid_out(read_run(config).model_copy(update=changed), settings)


def train(layouts: list[Run]) -> list[dict[str, Any]]:
    """Train each run on this rank."""
    results = []
    for run in layouts:
        engine = build(run)
        size, data = engine._run.train.micro_batch_size, engine.mesh.data
        result: dict[str, Any] = {"losses": [], "norms": [], "orders": [], "rows": []}

        firsts = range(data.rank * size, SIZE, size * data.size)

        def rows(step: int, size: int = size, firsts: range = firsts) -> list[MaskedRows]:
            return [rows_of(samples_of(step), slice(first, first + size)) for first in firsts]

        result["validation"] = engine.validate(iter(rows(NUM_STEPS))).loss
        for step in range(NUM_STEPS):
            numbers = step * SIZE + np.array([[*range(at, at + size)] for at in firsts])
            samples = SampleIds(numbers)  # for dropout
            rates = {"learning_rate": 0.01, "weight_decay": 0.1}
            done = engine.train_step(rows(step), **rates, samples=samples)
            result["losses"].append(done.loss)
            result["norms"].append(done.grad_norm)
            result["orders"].append(done.sample_loss)
            result["rows"].append(done.num_rows)
        result["validation after"] = engine.validate(iter(rows(NUM_STEPS))).loss
        result["accuracies"] = (*engine.validate(iter(rows(NUM_STEPS))).metrics.values(),)
        if engine._run.train.backend == "native":
            result["weights"] = [part for c in engine._chunks for part in parts(c, c.local)]
        results.append(result)
    return results


@cache
def plain_training() -> dict[str, Any]:
    """Train transformers' model with torch's AdamW in one process."""
    model = reference(ARCHITECTURE)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if (p.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-3)
    result: dict[str, Any] = {"losses": [], "norms": []}
    result["validation"] = their_loss(model, samples_of(NUM_STEPS)).item()
    for step in range(NUM_STEPS):
        loss = their_loss(model, samples_of(step))
        optimizer.zero_grad()
        loss.backward()
        result["losses"].append(loss.item())
        result["norms"].append(torch.nn.utils.clip_grad_norm_(named.values(), 0.5).item())
        optimizer.step()
    result["validation after"] = their_loss(model, samples_of(NUM_STEPS)).item()
    result["accuracies"] = accuracies(model, samples_of(NUM_STEPS))
    result["weights"] = from_hf(ARCHITECTURE, {n: p.detach() for n, p in named.items()})
    return result


@torch.no_grad()
def accuracies(model: Any, samples: MaskedRows) -> tuple[float, float]:
    """Shares of the masked tokens and of the orders that transformers' model predicts."""
    logits, order = their_output(model, samples)
    labels = torch.from_numpy(samples.labels)
    tokens_right = (logits.argmax(-1) == labels)[labels >= 0]
    orders_right = order.argmax(-1) == torch.from_numpy(samples.is_random)
    return tokens_right.double().mean().item(), orders_right.double().mean().item()


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), split_layouts(LAYOUTS))
def test_each_layout_trains_as_transformers_and_torch(
    world_size: int, layouts: list[tuple[str, Changes]], run: Run
) -> None:
    expected = plain_training()
    of_ranks = spawn(train, world_size, [laid_out(run, layout) for _, layout in layouts])
    for (_, layout), *results in zip(layouts, *of_ranks, strict=True):
        for result in results:
            for name in ("losses", "norms", "validation", "validation after", "accuracies"):
                assert result[name] == pytest.approx(expected[name], rel=1e-5), (name, layout)
            pairs = zip(result["orders"], result["losses"], strict=True)
            assert all(0 < order < loss for order, loss in pairs), layout
            assert (min(result["rows"]) < SIZE) == ("pack_samples" in layout), layout
        if "weights" not in results[0]:
            continue
        weights = whole(result["weights"] for result in results)
        assert weights.keys() == expected["weights"].keys()
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


FURTHER = {"token_types", "document_ids", "label_places"}
DROPPING = {"dropout": {"hidden": 0.2, "attention": 0.1, "embedding": 0.1}}


@pytest.mark.ranks
def test_each_layout_drops_the_same_numbers(run: Run) -> None:
    dropping = laid_out(run, DROPPING)
    (expected,) = spawn(train, 1, [dropping])
    assert expected[0]["losses"] != pytest.approx(plain_training()["losses"], rel=1e-3)
    layouts = [
        {"zero_stage": 3},
        parallel(tp=2, sp=True) | FULL,
        PACKED | parallel(tp=2, sp=True),
        parallel(pp=2),
    ]
    for of_rank in spawn(train, 2, [laid_out(dropping, each) for each in layouts]):
        for result in of_rank:
            for name in ("losses", "norms", "validation after"):
                assert result[name] == pytest.approx(expected[0][name], rel=1e-5)


@pytest.mark.ranks
def test_labels_that_an_optimizer_draws_are_the_same_in_shared_rows(run: Run) -> None:
    sophia = {"name": "sophia_g", "learning_rate": 0.001, "hessian_interval": 1}
    drawing = laid_out(run, {"optimizer": sophia})
    layouts = [{"micro_batch_size": 8}, PACKED, {"micro_batch_size": 2}]
    ((first, *others),) = spawn(train, 1, [laid_out(drawing, each) for each in layouts])
    assert first["losses"] != pytest.approx(plain_training()["losses"], rel=1e-5)
    for other in others:
        for name in ("losses", "norms", "validation after"):
            assert other[name] == pytest.approx(first[name], rel=1e-5)


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
    objective = make_objective(run)
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


class Records:
    """Samples of a split as the loader has them: every masked token is one more than the next."""

    corpora = ("corpus",)

    def __init__(self, number: int) -> None:
        parts = [samples_of(step) for step in range(number // SIZE)]
        arrays = (np.concatenate(each) for each in zip(*parts, strict=True))
        samples = MaskedRows(*arrays)
        samples.labels[:, :-1] = np.where(
            samples.labels[:, :-1] >= 0, samples.tokens[:, 1:] % 20, samples.labels[:, :-1]
        )
        self._records = np.concatenate(
            [
                records_of(rows_of(samples, slice(first, first + SIZE)))
                for first in range(0, number, SIZE)
            ]
        )

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, sample: int) -> Any:
        return self._records[sample : sample + 1].reshape(())


@pytest.mark.usefixtures("lone_rank")
def test_the_trainer_takes_records_and_continues_from_its_checkpoints(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run.index, tmp_path / "index")
    content = {**read_index(run.index), "objective": sample_settings(run.train)}
    del content["digest"]
    described = {**content, "digest": files.digest(content)}
    files.write_json(tmp_path / "index/index.json", described)
    monkeypatch.setattr(trainer, "training_samples", lambda *_, **__: Records(80))
    monkeypatch.setattr(validation, "open_samples", lambda *_, **__: Records(16))
    for name, stops in (("whole", [None]), ("parts", [3, None]), ("packed", [3, None])):
        for stop in stops:
            # A run may continue with or without samples that share rows.
            changes = PACKED if name == "packed" and stop else {}
            changed = {"index": tmp_path / "index", "output": tmp_path / name / "training"}
            laid = laid_out(run.model_copy(update=changed), changes)
            write_run(tmp_path / name / "run.yaml", laid)
            assert train_here(tmp_path / name / "run.yaml", until_step=stop) == 0
    whole_run, parts_run, packed_run = (
        tmp_path / name / "run.yaml" for name in ("whole", "parts", "packed")
    )
    for key in ("loss", "sample_loss", "validation_loss"):
        assert losses(packed_run, key) == pytest.approx(losses(whole_run, key), rel=1e-4)
    for key in ("loss", "token_loss", "sample_loss", "validation_loss"):
        assert losses(parts_run, key) == losses(whole_run, key)
    trained = [record for record in records(whole_run) if "loss" in record]
    assert len(trained) == 6
    for record in trained:
        assert record["token_loss"] + record["sample_loss"] == pytest.approx(record["loss"])
    assert trained[-1]["loss"] < trained[0]["loss"]
    continued = weights(parts_run)
    for name, tensor in weights(whole_run).items():
        assert torch.equal(continued[name], tensor)


def test_full_samples_need_no_mask(run: Run) -> None:
    first = rows_of(samples_of(0), slice(0, 1))
    assert make_objective(run).to_batch(first).further_inputs.keys() == FURTHER - {"document_ids"}


def test_context_parallelism_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match=r"context_parallel_size: 2: .*bert.*; set 1"):
        check_layout(laid_out(run, parallel(cp=2)), 2)
