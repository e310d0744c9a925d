"""Training on span corruption: at each layout it equals transformers' Blenderbot and torch."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
from tests.support.t5s import (
    hf_reference,
    hf_t5,
    named_parameters,
    reference,
    rows_of,
    span_samples,
    t5,
    their_logits,
    their_loss,
)
from tokamake import files
from tokamake.config.objective import sample_settings
from tokamake.config.resolved_run import Run, read_run, sample_lengths, write_run
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.span_corruption import span_record
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis
from tokamake.parallel.mesh import Mesh
from tokamake.preflight.layout import check_layout
from tokamake.preflight.model import check_sequence_length
from tokamake.train import trainer, validation
from tokamake.train.batch import SampleIds
from tokamake.train.memory import estimate
from tokamake.train.metrics import model_flops_per_token
from tokamake.train.numerics import with_precision
from tokamake.train.objectives._base import make_objective
from tokamake.train.objectives.span_corruption.rows import SpanRows, span_rows
from tokamake.train.sampled_labels import label_draws

CPU = torch.device("cpu")
SIZES = {"vocab_size": 121, "max_position_embeddings": 32, "num_hidden_layers": 2}
ARCHITECTURE = t5(**SIZES)
ARCHITECTURES = {"t5": ARCHITECTURE, "hf_t5": hf_t5(**SIZES)}
SIZE, LENGTH, DECODER_LENGTH, NUM_STEPS = 8, 16, 11, 3
FULL, SELECTIVE = ({"recompute_granularity": each} for each in ("full", "selective"))
DEEPSPEED = {"backend": "deepspeed"}
PACKED = {"pack_samples": True, "micro_batch_size": 8}
LAYOUTS: Proved = {
    1: [
        ("t5", {}),
        ("t5", {"micro_batch_size": 8}),
        ("t5", FULL),
        ("t5", {"log_corpus_losses": True}),
        ("t5", {"log_layer_norms": True}),
        ("t5", PACKED),
    ],
    2: [
        *[("t5", {"zero_stage": stage}) for stage in range(4)],
        ("t5", {"zero_stage": 3, "micro_batch_size": 1}),
        ("t5", parallel(tp=2)),
        ("t5", parallel(tp=2, sp=True)),
        ("t5", parallel(tp=2, sp=True) | FULL | {"micro_batch_size": 4}),
        *[("t5", DEEPSPEED | {"zero_stage": stage}) for stage in (1, 2, 3)],
        ("t5", DEEPSPEED | {"zero_stage": 2} | parallel(tp=2, sp=True)),
        ("t5", PACKED | {"zero_stage": 3, "micro_batch_size": 4}),
        ("t5", PACKED | parallel(tp=2, sp=True) | FULL),
        ("hf_t5", PACKED | parallel(tp=2, sp=True)),
        ("hf_t5", {"zero_stage": 3} | FULL),
        ("hf_t5", parallel(tp=2, sp=True) | SELECTIVE),
        ("hf_t5", DEEPSPEED | {"zero_stage": 3}),
    ],
}
"""By number of ranks: family and settings."""


def samples_of(step: int) -> SpanRows:
    """Samples of a global batch."""
    return span_samples(
        ARCHITECTURE, number=SIZE, length=LENGTH, decoder_length=DECODER_LENGTH, seed=step
    )


def oracle(family: str) -> Any:
    """transformers' model."""
    return reference(ARCHITECTURE) if family == "t5" else hf_reference(ARCHITECTURES[family])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of each family."""
    root = prepare(tmp_path_factory.mktemp("spans"))
    config = read_run(make_run(root, "run"))
    # Biases of keys do not change a softmax: a small eps would amplify their rounding errors.
    optimizer = {"optimizer": {"learning_rate": 0.01, "epsilon": 1e-3}}
    masking = {"masking": {"decoder_sequence_length": DECODER_LENGTH}}
    settings = {"objective": "span_corruption", **masking, **optimizer}
    runs = {}
    for family, architecture in ARCHITECTURES.items():
        weights = {n: t.detach() for n, t in named_parameters(oracle(family)).items()}
        write_start(root / family, architecture, from_hf(architecture, weights))
        start = {"architecture": architecture, "checkpoint": root / family / "global_step0"}
        runs[family] = laid_out(config.model_copy(update=start), settings)
    return runs


@pytest.fixture
def run(runs: dict[str, Run]) -> Run:
    return runs["t5"]


def train(layouts: list[Run]) -> list[dict[str, Any]]:
    """Train each run on this rank."""
    results = []
    for run in layouts:
        engine = build(run)
        size, data = engine._run.train.micro_batch_size, engine.mesh.data
        result: dict[str, Any] = {"losses": [], "norms": [], "layers": [], "rows": []}
        firsts = range(data.rank * size, SIZE, size * data.size)

        def rows(step: int, size: int = size, firsts: range = firsts) -> list[SpanRows]:
            return [rows_of(samples_of(step), slice(first, first + size)) for first in firsts]

        result["validation"] = engine.validate(iter(rows(NUM_STEPS))).loss
        for step in range(NUM_STEPS):
            numbers = step * SIZE + np.array([[*range(at, at + size)] for at in firsts])
            samples = SampleIds(numbers)  # for dropout
            rates = {"learning_rate": 0.01, "weight_decay": 0.1}
            done = engine.train_step(rows(step), **rates, samples=samples)
            result["losses"].append(done.loss)
            result["norms"].append(done.grad_norm)
            result["layers"].append(done.layer_norms)
            result["rows"].append(done.num_rows)
        measured = engine.validate(iter(rows(NUM_STEPS)))
        result["validation after"], result["accuracy"] = (
            measured.loss,
            measured.metrics["token_accuracy"],
        )
        assert measured.metrics.keys() == {"token_accuracy"}
        if engine._run.train.backend == "native":
            result["weights"] = [part for c in engine._chunks for part in parts(c, c.local)]
        results.append(result)
    return results


@cache
def plain_training(family: str = "t5") -> dict[str, Any]:
    """Train transformers' model with torch's AdamW in one process."""
    model = oracle(family)
    named = dict(model.named_parameters())
    # The bias of the logits is a matrix of one row there.
    is_matrix = {name: p.dim() > 1 and len(p) > 1 for name, p in named.items()}
    groups = [
        {"params": [named[n] for n in named if is_matrix[n] == decays], "weight_decay": decay}
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
    result["accuracy"] = accuracy(model, samples_of(NUM_STEPS))
    stored = {name: p.detach() for name, p in named_parameters(model).items()}
    result["weights"] = from_hf(ARCHITECTURES[family], stored)
    return result


@torch.no_grad()
def accuracy(model: Any, samples: SpanRows) -> float:
    """Share of the decoder's tokens that transformers' model predicts."""
    labels = torch.from_numpy(samples.labels)
    right = their_logits(model, samples).argmax(-1) == labels
    return right[labels >= 0].double().mean().item()


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), split_layouts(LAYOUTS))
def test_each_layout_trains_as_transformers_and_torch(
    world_size: int, layouts: list[tuple[str, Changes]], runs: dict[str, Run]
) -> None:
    of_ranks = spawn(train, world_size, [laid_out(runs[name], each) for name, each in layouts])
    for (family, layout), *results in zip(layouts, *of_ranks, strict=True):
        expected = plain_training(family)
        for result in results:
            for name in ("losses", "norms", "validation", "validation after", "accuracy"):
                assert result[name] == pytest.approx(expected[name], rel=1e-5), (name, layout)
            assert (min(result["rows"]) < SIZE) == ("pack_samples" in layout), layout
            if layout.get("log_layer_norms"):
                squares = [sum(norm**2 for norm in norms) for norms in result["layers"]]
                assert squares == pytest.approx([norm**2 for norm in expected["norms"]], rel=1e-4)
                assert all(len(norms) == 5 and min(norms) > 0 for norms in result["layers"])
        if "weights" not in results[0]:
            continue
        weights = whole(result["weights"] for result in results)
        assert weights.keys() == expected["weights"].keys()
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


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
    ]
    for of_rank in spawn(train, 2, [laid_out(dropping, each) for each in layouts]):
        for result in of_rank:
            for name in ("losses", "norms", "validation after"):
                assert result[name] == pytest.approx(expected[0][name], rel=1e-5)


def records_of(samples: SpanRows) -> Any:
    """The samples as `data.samples` makes them."""
    records = np.zeros(len(samples.tokens), span_record(LENGTH, DECODER_LENGTH))
    for name in ("tokens", "decoder_tokens", "labels"):
        records[name] = getattr(samples, name)
    records["num_tokens"] = samples.padding_mask.sum(1)
    return records


def test_records_of_the_loader_are_such_samples(run: Run) -> None:
    samples = samples_of(0)
    records = records_of(samples)
    for ours, theirs in zip(span_rows(records), samples, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    objective = make_objective(run)
    for rows in (records, samples):
        batch = objective.to_batch(rows)
        assert objective.label_shape(rows) == (SIZE, DECODER_LENGTH)
        assert torch.equal(batch.inputs, torch.from_numpy(samples.tokens))
        assert torch.equal(batch.labels, torch.from_numpy(samples.labels[samples.labels >= 0]))
        assert batch.further_inputs.keys() == {"decoder_tokens", "document_ids", "label_places"}
        padding = batch.further_inputs["document_ids"]
        assert torch.equal(padding, torch.from_numpy(~samples.padding_mask).long())
        assert batch.sample_labels is None
    assert objective.counts_labels
    (draws,) = label_draws(1, objective.label_shape(records), seed=1, step=1)
    assert draws.shape == (SIZE, DECODER_LENGTH)


def test_sequence_parallelism_pads_the_decoder(run: Run) -> None:
    mesh = Mesh(tensor=Axis(1, 4), sequence_parallel=True)
    samples = samples_of(0)
    by_row = laid_out(run, {"log_corpus_losses": True})
    batch = make_objective(by_row, mesh).to_batch(samples)
    assert batch.labels.shape == batch.further_inputs["decoder_tokens"].shape == (SIZE, 12)
    assert (batch.labels[:, 11] == -100).all()
    alone = make_objective(run, mesh).to_batch(samples)
    labels = batch.labels.flatten()[alone.further_inputs["label_places"]]
    assert torch.equal(labels, alone.labels)


class Records:
    """Samples of a split as the loader has them: the decoder repeats its token."""

    corpora = ("corpus",)

    def __init__(self, number: int) -> None:
        samples = [samples_of(step) for step in range(number // SIZE)]
        for each in samples:
            each.labels[each.labels >= 0] = each.decoder_tokens[each.labels >= 0]
        self._records = np.concatenate([records_of(each) for each in samples])

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
    for name, stops in (("whole", [None]), ("parts", [3, None])):
        changed = {"index": tmp_path / "index", "output": tmp_path / name / "training"}
        write_run(tmp_path / name / "run.yaml", run.model_copy(update=changed))
        for stop in stops:
            assert train_here(tmp_path / name / "run.yaml", until_step=stop) == 0
    whole_run, parts_run = (tmp_path / name / "run.yaml" for name in ("whole", "parts"))
    for key in ("loss", "validation_loss"):
        assert losses(parts_run, key) == losses(whole_run, key)
    trained = [record for record in records(whole_run) if "loss" in record]
    assert len(trained) == 6
    assert trained[-1]["loss"] < trained[0]["loss"]
    continued = weights(parts_run)
    for name, tensor in weights(whole_run).items():
        assert torch.equal(continued[name], tensor)


def test_decoders_count_in_estimates(run: Run) -> None:
    assert sample_lengths(run) == [LENGTH, DECODER_LENGTH]
    longer = laid_out(run, {"masking": {"decoder_sequence_length": 30}})
    assert model_flops_per_token(longer) > 1.5 * model_flops_per_token(run)
    estimates = [estimate(with_precision(each, CPU), 1, CPU) for each in (run, longer)]
    assert estimates[1].activations > 1.5 * estimates[0].activations
    assert estimates[1].weights == estimates[0].weights


def test_decoders_longer_than_the_positions_are_refused(run: Run) -> None:
    for length, settings in ((33, {}), (32, {})):
        longer = laid_out(run, {"masking": {"decoder_sequence_length": length}, **settings})
        if length == 32:
            check_sequence_length(longer.train, ARCHITECTURE)
            continue
        with pytest.raises(UserError, match=r"decoder_sequence_length: 33: more than the 32 max"):
            check_sequence_length(longer.train, ARCHITECTURE)


def test_layouts_that_divide_a_stack_or_a_sequence_are_refused(run: Run) -> None:
    for sizes, name in (({"pp": 2}, "pipeline"), ({"cp": 2}, "context")):
        with pytest.raises(UserError, match=rf"{name}_parallel_size: 2: .*t5.*; set 1"):
            check_layout(laid_out(run, parallel(**sizes)), 2)
