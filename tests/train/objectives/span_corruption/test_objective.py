"""Training on span corruption: at each layout it equals transformers' Blenderbot and torch."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import objective_training
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
from tests.support.runs import write_start
from tests.support.t5s import (
    hf_reference,
    hf_t5,
    named_parameters,
    reference,
    span_samples,
    t5,
    their_logits,
    their_loss,
)
from tokamake.config.resolved_run import Run, sample_lengths
from tokamake.errors import UserError
from tokamake.optim.sophia_g import label_draws
from tokamake.parallel.axis import Axis
from tokamake.parallel.mesh import Mesh
from tokamake.preflight.model import check_layout, check_sequence_length
from tokamake.train.memory import estimate
from tokamake.train.metrics import model_flops_per_token
from tokamake.train.numerics import with_precision
from tokamake.train.objectives._base import objective_class
from tokamake.train.objectives.span_corruption.rows import SpanRows, span_rows
from tokamake.train.objectives.span_corruption.samples import span_record

CPU = torch.device("cpu")
SIZES = {"vocab_size": 121, "max_position_embeddings": 32, "num_hidden_layers": 2}
ARCHITECTURE = t5(**SIZES)
ARCHITECTURES = {"t5": ARCHITECTURE, "hf_t5": hf_t5(**SIZES)}
LENGTH, DECODER_LENGTH = 16, 11
FULL, SELECTIVE = ({"recompute_granularity": each} for each in ("full", "selective"))
PACKED = {"pack_samples": True, "micro_batch_size": 8}
LAYOUTS: Proved = {
    1: [
        ("t5", {}),
        ("t5", {"log_corpus_losses": True}),
        ("t5", {"log_layer_norms": True}),
        ("t5", PACKED),
    ],
    2: [
        ("t5", parallel(tp=2, sp=True) | FULL | {"micro_batch_size": 4}),
        ("t5", PACKED | {"zero_stage": 3, "micro_batch_size": 4}),
        ("hf_t5", PACKED | parallel(tp=2, sp=True)),
        ("hf_t5", {"zero_stage": 3} | SELECTIVE),
    ],
}
"""By number of ranks: family and settings. Random compositions compare all layouts with one."""


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
    root = tmp_path_factory.mktemp("spans")
    plain = template(root)
    masking = {"masking": {"decoder_sequence_length": DECODER_LENGTH}}
    settings = {"objective": "span_corruption", **masking, **OPTIMIZER}
    runs = {}
    for family, architecture in ARCHITECTURES.items():
        weights = {n: t.detach() for n, t in named_parameters(oracle(family)).items()}
        write_start(root / family, architecture, from_hf(architecture, weights))
        start = {"architecture": architecture, "checkpoint": root / family / "global_step0"}
        runs[family] = laid_out(plain.model_copy(update=start), settings)
    return runs


@pytest.fixture
def run(runs: dict[str, Run]) -> Run:
    return runs["t5"]


def train(layouts: list[Run]) -> list[Results]:
    """Train each run on this rank."""
    return objective_training.train(layouts, samples_of)


@cache
def plain_training(family: str = "t5") -> Results:
    """Train transformers' model with torch's AdamW in one process."""
    model = oracle(family)
    result = objective_training.plain_training(
        model,
        samples_of,
        their_loss,
        decays=lambda p: p.dim() > 1 and len(p) > 1,  # the bias of its logits has a row
    )
    result["metrics"] = {"token_accuracy": accuracy(model, samples_of(NUM_STEPS))}
    stored = {name: p.detach() for name, p in named_parameters(model).items()}
    return result | {"weights": from_hf(ARCHITECTURES[family], stored)}


@torch.no_grad()
def accuracy(model: Any, samples: SpanRows) -> float:
    """Share of the decoder's tokens that transformers' model predicts."""
    labels = torch.from_numpy(samples.labels)
    right = their_logits(model, samples).argmax(-1) == labels
    return right[labels >= 0].double().mean().item()


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), LAYOUTS.items())
def test_each_layout_trains_as_transformers_and_torch(
    world_size: int, layouts: list[tuple[str, Changes]], runs: dict[str, Run]
) -> None:
    of_ranks = spawn(train, world_size, [laid_out(runs[name], each) for name, each in layouts])
    for (family, layout), *results in zip(layouts, *of_ranks, strict=True):
        expected = plain_training(family)
        assert_trained((*results,), expected, layout)
        if layout.get("log_layer_norms"):
            for result in results:
                squares = [sum(norm**2 for norm in norms) for norms in result["layer_norms"]]
                total = [norm**2 for norm in expected["grad_norm"]]
                assert squares == pytest.approx(total, rel=1e-4)
                assert all(len(norms) == 5 and min(norms) > 0 for norms in result["layer_norms"])


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
    ]
    results = spawn(train, 2, [laid_out(dropping, each) for each in layouts])
    assert_as_if_alone(results, expected[0])


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
    objective = objective_class(run.train.objective)(run)
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
    batch = objective_class(by_row.train.objective)(by_row, mesh).to_batch(samples)
    assert batch.labels.shape == batch.further_inputs["decoder_tokens"].shape == (SIZE, 12)
    assert (batch.labels[:, 11] == -100).all()
    alone = objective_class(run.train.objective)(run, mesh).to_batch(samples)
    labels = batch.labels.flatten()[alone.further_inputs["label_places"]]
    assert torch.equal(labels, alone.labels)


def of_split(number: int) -> Records:
    """Samples of a split: the decoder repeats its token."""
    batches = [samples_of(step) for step in range(number // SIZE)]
    for samples in batches:
        is_token = samples.labels >= 0
        samples.labels[is_token] = samples.decoder_tokens[is_token]
    return Records([records_of(samples) for samples in batches])


@pytest.mark.grid
@pytest.mark.usefixtures("lone_rank")
def test_the_trainer_takes_records_and_continues_from_its_checkpoints(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {"whole": [(None, {})], "parts": [(3, {}), (None, {})]}
    whole, parts = trained_by_jobs(run, tmp_path, monkeypatch, of_split=of_split, jobs=jobs)
    assert_same_curves(parts, whole, "loss", "validation_loss")


def test_decoders_count_in_estimates(run: Run) -> None:
    assert sample_lengths(run) == [LENGTH, DECODER_LENGTH]
    longer = laid_out(run, {"masking": {"decoder_sequence_length": 30}})
    assert model_flops_per_token(longer) > 1.5 * model_flops_per_token(run)
    estimates = [estimate(with_precision(each, CPU), 1, "cpu") for each in (run, longer)]
    assert estimates[1].activations > 1.5 * estimates[0].activations
    assert estimates[1].weights == estimates[0].weights


def test_decoders_longer_than_the_positions_are_refused(run: Run) -> None:
    longest, longer = (
        laid_out(run, {"masking": {"decoder_sequence_length": length}}) for length in (32, 33)
    )
    check_sequence_length(longest.train, ARCHITECTURE)
    with pytest.raises(UserError, match=r"decoder_sequence_length: 33: more than the 32 max"):
        check_sequence_length(longer.train, ARCHITECTURE)


def test_layouts_that_divide_a_stack_or_a_sequence_are_refused(run: Run) -> None:
    for sizes, name in (({"pp": 2}, "pipeline"), ({"cp": 2}, "context")):
        with pytest.raises(UserError, match=rf"{name}_parallel_size: 2: .*t5.*; set 1"):
            check_layout(laid_out(run, parallel(**sizes)).train, run.architecture)
