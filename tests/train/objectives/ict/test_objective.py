"""Training of a biencoder: at each layout it equals transformers' towers and torch."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.support import objective_training
from tests.support.biencoders import Oracle, Pairs, biencoder, pairs, their_vectors
from tests.support.hf_folder import from_hf
from tests.support.layouts import laid_out, parallel
from tests.support.objective_training import (
    NUM_STEPS,
    OPTIMIZER,
    SIZE,
    Records,
    Results,
    Rows,
    assert_as_if_alone,
    assert_same_curves,
    assert_trained,
    template,
    trained_by_jobs,
)
from tests.support.proofs import Changes, Proved
from tests.support.ranks import spawn
from tests.support.runs import losses, write_start
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.preflight.model import check_objective
from tokamake.train.metrics import Validation, validation_text
from tokamake.train.objectives.ict.objective import Objective
from tokamake.train.objectives.ict.samples import ict_record
from tokamake.train.objectives.ict.settings import Section

LENGTH = 16
SECTION = Section(titles="", score_scaling=True, topk=(1, 3))
SHAPES = {
    "separate": biencoder(vocab_size=121, max_position_embeddings=32, projection_dim=12),
    "shared": biencoder(vocab_size=121, max_position_embeddings=32, shared_towers=True),
}
FULL = {"recompute_granularity": "full"}
LAYOUTS: Proved = {
    1: [
        ("separate", {}),  # 4 micro batches of 2
        ("separate", {"micro_batch_size": 1} | FULL),
        ("shared", {"micro_batch_size": 8}),
    ],
    2: [
        ("separate", {"zero_stage": 3}),
        ("shared", {"zero_stage": 1, "micro_batch_size": 4}),
        ("shared", parallel(tp=2, sp=True) | FULL),
    ],
}
"""By number of ranks: towers and settings. Random compositions compare all layouts with one."""


def texts_of(step: int) -> Pairs:
    """Queries and blocks of a global batch."""
    return pairs(SHAPES["separate"], number=SIZE, length=LENGTH, seed=step)


def samples_of(step: int) -> Rows:
    """The same as the loader has them."""
    texts = texts_of(step)
    records = np.zeros(SIZE, ict_record(LENGTH))
    records["query"], records["block"] = texts.queries, texts.blocks
    records["num_query"] = (~texts.query_padding).sum(1)
    records["num_block"] = (~texts.block_padding).sum(1)
    records["document"] = np.arange(SIZE)
    return Rows(records)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("ict")
    run = template(root)
    return {name: run_of(run, root / name, shape) for name, shape in SHAPES.items()}


def run_of(run: Run, folder: Path, shape: Architecture) -> Run:
    write_start(folder, shape, from_hf(shape, dict(Oracle(shape).named_parameters())))
    changed = {"architecture": shape, "checkpoint": folder / "global_step0"}
    settings = {"objective": "ict", "ict": SECTION, **OPTIMIZER}
    return laid_out(run.model_copy(update=changed), settings)


def train(layouts: list[Run]) -> list[Results]:
    """Train each run on this rank."""
    return objective_training.train(layouts, samples_of)


def scores_of(oracle: Oracle, texts: Pairs) -> torch.Tensor:
    queries, blocks = their_vectors(oracle, texts)
    return queries @ blocks.T / math.sqrt(64)


def their_loss(oracle: Oracle, texts: Pairs) -> torch.Tensor:
    return F.cross_entropy(scores_of(oracle, texts), torch.arange(SIZE))


@cache
def plain_training(name: str) -> Results:
    """Train transformers' models with torch's AdamW in one process."""
    shape = SHAPES[name]
    oracle = Oracle(shape)
    result = objective_training.plain_training(oracle, texts_of, their_loss)
    with torch.no_grad():
        scores = scores_of(oracle, texts_of(NUM_STEPS))
    found = [scores.topk(k).indices == torch.arange(SIZE)[:, None] for k in SECTION.topk]
    result["metrics"] = {
        f"accuracy_at_{k}": each.any(1).double().mean().item()
        for k, each in zip(SECTION.topk, found, strict=True)
    }
    stored = {name: parameter.detach() for name, parameter in oracle.named_parameters()}
    return result | {"weights": from_hf(shape, stored)}


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), LAYOUTS.items())
def test_each_layout_trains_as_transformers_and_torch(
    world_size: int, layouts: list[tuple[str, Changes]], runs: dict[str, Run]
) -> None:
    of_ranks = spawn(train, world_size, [laid_out(runs[name], layout) for name, layout in layouts])
    for (name, layout), *results in zip(layouts, *of_ranks, strict=True):
        assert_trained((*results,), plain_training(name), layout)


@pytest.mark.grid
@pytest.mark.ranks
def test_dropout_has_the_same_masks_in_both_passes_and_at_each_layout(runs: dict[str, Run]) -> None:
    rates = {"dropout": {"hidden": 0.1, "attention": 0.1, "embedding": 0.1}}
    layouts = [{}, {"micro_batch_size": 4}, parallel(tp=2, sp=True)]
    for name, run in runs.items():
        dropping = laid_out(run, rates)
        (alone,) = spawn(train, 1, [laid_out(dropping, {"micro_batch_size": 8})])[0]
        assert alone["loss"][0] != pytest.approx(plain_training(name)["loss"][0], rel=1e-3)
        of_ranks = spawn(train, 2, [laid_out(dropping, layout) for layout in layouts])
        assert_as_if_alone([*of_ranks], alone)


@pytest.mark.ranks
def test_norms_of_layers_are_of_both_towers(runs: dict[str, Run]) -> None:
    layouts = [laid_out(runs[name], {"log_layer_norms": True}) for name in ("separate", "shared")]
    for result, num_layers in zip(spawn(train, 1, layouts)[0], (6, 3), strict=True):
        norms = result["layer_norms"][0]
        assert len(norms) == num_layers + 1
        assert math.hypot(*norms) == pytest.approx(result["grad_norm"][0], rel=1e-5)
        assert min(norms) > 0


def of_split(number: int) -> Records:
    """Samples of a split: a few global batches again and again."""
    return Records([samples_of(step % 2).records for step in range(number // SIZE)])


@pytest.mark.grid
@pytest.mark.usefixtures("lone_rank")
def test_a_run_continues_from_its_checkpoints_also_with_other_micro_batches(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_step = {"micro_batch_size": 8}
    jobs = {
        "whole": [(None, {})],
        "parts": [(3, {}), (None, {})],
        "changed": [(3, whole_step), (None, {})],
    }
    whole, parts, changed = trained_by_jobs(
        runs["separate"], tmp_path, monkeypatch, of_split=of_split, jobs=jobs
    )
    for key in ("loss", "validation_loss", "validation_accuracy_at_3"):
        assert losses(changed, key) == pytest.approx(losses(whole, key), rel=1e-4)
    assert_same_curves(parts, whole, "loss", "validation_loss", "validation_accuracy_at_1")


def test_padding_is_cut_and_hidden(runs: dict[str, Run]) -> None:
    rows = samples_of(0).records[1:4].copy()
    rows["query"][:, 5:], rows["num_query"] = 0, [5, 3, 4]
    batch = Objective(runs["separate"]).collate(rows)
    assert batch.inputs.shape == (3, 8)
    assert batch.further_inputs["document_ids"].sum(1).tolist() == [3, 5, 4]
    assert batch.further_inputs["block_tokens"].shape[1] % 8 == 0
    assert batch.sample_labels is not None
    assert batch.sample_labels.tolist() == [1, 2, 3]
    compiled = laid_out(runs["separate"], {"compile": True})
    assert Objective(compiled).collate(rows).inputs.shape == (3, LENGTH)


def test_random_texts_are_full(runs: dict[str, Run]) -> None:
    objective = Objective(runs["separate"])
    batch = objective.collate(objective.random_rows(np.random.default_rng(0)))
    assert batch.inputs.shape == (2, LENGTH)
    assert batch.inputs.max() < 121
    assert not batch.further_inputs["block_document_ids"].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_corpus_losses": True}, "train.log_corpus_losses: true: objective ict has no losses"),
        ({"optimizer": {"name": "sophia_g"}}, "optimizer.name: sophia_g: draws labels of tokens"),
    ],
)
def test_settings_about_tokens_are_refused(
    settings: dict[str, Any], message: str, runs: dict[str, Run]
) -> None:
    run = laid_out(runs["separate"], settings)
    with pytest.raises(UserError, match=message):
        check_objective(run.train, run.architecture)


def test_accuracies_are_shares_of_the_queries() -> None:
    split = Validation(3.25, {"accuracy_at_1": 0.125, "accuracy_at_20": 0.5})
    text = validation_text("valid", split)
    assert text == "validation loss 3.2500 (12.5% in the top 1, 50.0% in the top 20)"
