"""Training of a retro: it equals torch at each layout, and continues from checkpoints."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import objective_training
from tests.support.families import named_tensors
from tests.support.layouts import laid_out, parallel
from tests.support.model_loss import mean_loss
from tests.support.objective_training import (
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
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.retros import CHUNK_LENGTH, NUM_NEIGHBORS, neighbors_of, retro
from tests.support.runs import train_here, write_start
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.preflight.model import check_objective
from tokamake.train.memory import estimate
from tokamake.train.metrics import model_flops_per_token
from tokamake.train.objectives.retro import samples
from tokamake.train.objectives.retro.objective import Objective
from tokamake.train.objectives.retro.samples import retro_record
from tokamake.train.objectives.retro.settings import Section

LENGTH = 16
SECTION = Section(
    chunk_length=CHUNK_LENGTH, neighbors=NUM_NEIGHBORS, retrieved_chunks=2, num_kept=5, num_found=9
)
_NO_DROPOUT = {"encoder_hidden_dropout": 0.0, "encoder_attention_dropout": 0.0}
SHAPES = {
    "gpt": retro(decoder="gpt", **_NO_DROPOUT),
    "llama": retro(decoder="llama", **_NO_DROPOUT),
    "dropping": retro(decoder="gpt", encoder_hidden_dropout=0.2, encoder_attention_dropout=0.2),
}
FULL, SELECTIVE = ({"recompute_granularity": name} for name in ("full", "selective"))
LAYOUTS: Proved = {
    1: [
        ("gpt", {"micro_batch_size": 8} | FULL | {"recompute_num_layers": 2}),
        ("llama", {"micro_batch_size": 4} | SELECTIVE),
        ("gpt", FULL | {"recompute_method": "block", "recompute_num_layers": 2}),
    ],
    2: [
        ("gpt", {"zero_stage": 3}),
        ("llama", parallel(tp=2, sp=True) | {"micro_batch_size": 8}),
    ],
}
"""By number of ranks: decoder and settings. Random compositions compare all layouts with one."""


def samples_of(step: int) -> Rows:
    """A global batch as the loader has it."""
    generator = np.random.default_rng(step)
    records = np.zeros(
        SIZE, retro_record(LENGTH, chunk_length=4, neighbors=NUM_NEIGHBORS, retrieved_chunks=2)
    )
    records["tokens"] = generator.integers(132, size=records["tokens"].shape)
    tokens = torch.from_numpy(records["tokens"][:, :-1])
    for name, tensor in neighbors_of(SHAPES["gpt"], tokens, seed=step).items():
        records[name] = tensor.numpy()
    return Rows(records)


def their_loss(model: Any, rows: Rows) -> Tensor:
    neighbors = {
        name: torch.from_numpy(rows[name]) for name in ("neighbor_tokens", "num_neighbor_tokens")
    }
    return mean_loss(model, torch.from_numpy(rows["tokens"]), **neighbors)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("retro")
    run, made = template(root), {}
    for name, shape in SHAPES.items():
        write_start(root / name, shape, random_tensors(shape, 1))
        changed = {"architecture": shape, "checkpoint": root / name / "global_step0"}
        settings = {"objective": "retro", "retro": SECTION, **OPTIMIZER}
        made[name] = laid_out(run.model_copy(update=changed), settings)
    return made


def train(layouts: list[Run]) -> list[Results]:
    """Train each run on this rank."""
    return objective_training.train(layouts, samples_of)


@cache
def plain_training(name: str) -> Results:
    """Train the model with torch's AdamW in one process."""
    shape = SHAPES[name]
    model = to_model(shape, random_tensors(shape, 1)).requires_grad_()
    result = objective_training.plain_training(model, samples_of, their_loss)
    return result | {"metrics": {}, "weights": named_tensors(model)}


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), LAYOUTS.items())
def test_each_layout_trains_as_torch(
    world_size: int, layouts: list[tuple[str, Changes]], runs: dict[str, Run]
) -> None:
    of_ranks = spawn(train, world_size, [laid_out(runs[name], layout) for name, layout in layouts])
    for (name, layout), *results in zip(layouts, *of_ranks, strict=True):
        assert_trained((*results,), plain_training(name), layout)


@pytest.mark.grid
@pytest.mark.ranks
def test_dropout_of_the_encoder_has_the_same_masks_at_each_layout(runs: dict[str, Run]) -> None:
    run = runs["dropping"]
    (alone,) = spawn(train, 1, [laid_out(run, {"micro_batch_size": 8})])[0]
    assert alone["loss"][0] != pytest.approx(plain_training("gpt")["loss"][0], rel=1e-5)
    assert alone["validation"] == pytest.approx(plain_training("gpt")["validation"], rel=1e-5)
    layouts = [{}, {"zero_stage": 3} | FULL, parallel(tp=2, sp=True)]
    of_ranks = spawn(train, 2, [laid_out(run, layout) for layout in layouts])
    assert_as_if_alone([*of_ranks], alone)


def of_split(number: int) -> Records:
    """Samples of a split: a few global batches again and again."""
    return Records([samples_of(step % 2).records for step in range(number // SIZE)])


@pytest.mark.grid
@pytest.mark.usefixtures("lone_rank")
def test_a_run_continues_from_its_checkpoints(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These samples have no files of neighbors.
    monkeypatch.setattr(samples, "neighbor_hashes", lambda *_: {"train/docs.json": "1"})
    jobs: Any = {"whole": [(None, {})], "parts": [(3, {}), (None, {})]}
    whole, parts = trained_by_jobs(
        runs["llama"], tmp_path, monkeypatch, of_split=of_split, jobs=jobs
    )
    assert_same_curves(parts, whole, "loss", "validation_loss")
    monkeypatch.setattr(samples, "neighbor_hashes", lambda *_: {"train/docs.json": "2"})
    with pytest.raises(UserError, match=r"^neighbors of the samples; 6 steps are trained in"):
        train_here(parts)


def test_rows_of_the_loader_become_a_micro_batch(runs: dict[str, Run]) -> None:
    rows = samples_of(0).records[:3]
    batch = Objective(runs["gpt"]).collate(rows)
    assert np.array_equal(batch.inputs, rows["tokens"][:, :-1])
    assert np.array_equal(batch.labels, rows["tokens"][:, 1:])
    assert batch.further_inputs["neighbor_tokens"].shape == (3, 4, 2, 8)
    assert batch.further_inputs["num_neighbor_tokens"].shape == (3, 4, 2)
    assert Objective(runs["gpt"]).label_shape(rows) == (3, LENGTH)


def test_random_samples_have_full_neighbors(runs: dict[str, Run]) -> None:
    rows = Objective(runs["gpt"]).random_rows(np.random.default_rng(0))
    assert rows["tokens"].shape == (2, LENGTH + 1)
    assert rows["tokens"].max() < 132
    assert (rows["num_neighbor_tokens"] == 8).all()


def test_neighbors_count_in_estimates(runs: dict[str, Run]) -> None:
    more = SECTION.model_copy(update={"neighbors": 4})
    few, many = (
        laid_out(runs["gpt"], {"retro": section, "precision": "fp32"})
        for section in (SECTION, more)
    )
    assert model_flops_per_token(many) > model_flops_per_token(few)
    assert estimate(many, 1, "cpu").activations > estimate(few, 1, "cpu").activations


def test_models_with_other_chunks_or_without_them_are_refused(runs: dict[str, Run]) -> None:
    train_settings = runs["gpt"].train
    with pytest.raises(UserError, match=r"retro.chunk_length: 4: the model has chunks of 8 tokens"):
        check_objective(train_settings, retro(decoder="gpt", chunk_length=8))
    with pytest.raises(UserError, match="objective: causal: family retro learns retro; set it to"):
        causal = {"objective": "causal", "retro": None}
        check_objective(laid_out(runs["gpt"], causal).train, SHAPES["gpt"])
