"""Training losses of corpora equal those of transformers, at each kind of layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.forked import train
from tests.support.proofs import their_model
from tests.support.runs import (
    SETTINGS,
    losses,
    make_index,
    make_run,
    prepare,
    records,
    train_here,
    vouch,
)
from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.samples.document_samples import DocumentSamples

pytestmark = pytest.mark.usefixtures("lone_rank")

CORPORA = ("a", "b", "rare")
SIZE = SETTINGS["global_batch_size"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of three corpora; b has tokens that a has not, the last one is hardly drawn."""
    root = prepare(tmp_path_factory.mktemp("corpora"))
    generator = np.random.default_rng(7)
    for name in ("b", "rare"):
        lengths = generator.integers(5, 40, 100)
        with DatasetWriter(root / f"{name}.bin", root / f"{name}.idx", dtype=np.uint16) as writer:
            tokens = generator.integers(60, 120, lengths.sum())
            writer.add(tokens.astype(np.int64), lengths.astype(np.int32))
        vouch(root / name, vocab_size=120)
    (root / "weights.txt").write_text("0.6 corpus a\n0.38 b b\n0.02 rare rare\n")
    samples = {"train_samples": 80, "valid_samples": 16}
    make_index(root, sequence_length=16, split="80,20,0", seed=3, **samples)
    return root


def samples_of(root: Path, step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Corpus and (S + 1,) tokens of each sample of a step, from 1."""
    samples = DocumentSamples(root / "index", split="train", data_root=root)
    for number in range((step - 1) * SIZE, step * SIZE):
        yield samples.corpus_of(number), torch.from_numpy(samples[number])


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, float]:
    """Loss of each corpus in the first step, by transformers."""
    model = their_model(root / "start")
    of_corpora: dict[str, list[float]] = {}
    for corpus, row in samples_of(root, 1):
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, row[1:])
        of_corpora.setdefault(corpus, []).append(loss.item())
    assert {*of_corpora} >= {"a", "b"}
    return {corpus: float(np.mean(values)) for corpus, values in of_corpora.items()}


def losses_of(record: dict[str, Any]) -> dict[str, float]:
    """Losses of corpora in a record."""
    return {name[5:]: value for name, value in record.items() if name.startswith("loss/")}


def first(config: Path) -> dict[str, float]:
    """Losses of corpora in the first step."""
    return losses_of(next(record for record in records(config) if record["step"] == 1))


@pytest.fixture(scope="module")
def logged(root: Path) -> Path:
    """A finished run with losses of corpora at each step; do not write here."""
    config = make_run(root, "logged", log_corpus_losses=True)
    assert train_here(config) == 0
    return config


def test_losses_of_corpora_equal_those_of_transformers(
    root: Path, logged: Path, expected: dict[str, float]
) -> None:
    plain, config = make_run(root, "plain"), logged
    assert train_here(plain) == 0
    assert first(config) == pytest.approx(expected, rel=1e-5)
    assert losses(config) == losses(plain)
    assert not any(losses_of(record) for record in records(plain))
    absent = 0
    for record in records(config):
        if "loss" in record:
            counts = dict.fromkeys(CORPORA, 0)
            for corpus, _ in samples_of(root, record["step"]):
                counts[corpus] += 1
            of_corpora = losses_of(record)
            assert {*of_corpora} == {corpus for corpus in CORPORA if counts[corpus]}
            absent += len(CORPORA) - len(of_corpora)
            mean = sum(counts[corpus] * value for corpus, value in of_corpora.items()) / SIZE
            assert mean == pytest.approx(record["loss"], rel=1e-5)
    assert absent


def test_a_record_has_the_mean_over_its_interval(root: Path, logged: Path) -> None:
    third = make_run(root, "third", log_corpus_losses=True, log_interval=3)
    assert train_here(third) == 0
    sums, counts = dict.fromkeys(CORPORA, 0.0), dict.fromkeys(CORPORA, 0)
    for record in records(logged):
        if record["step"] in (2, 3) and "loss" in record:
            for corpus, _ in samples_of(root, record["step"]):
                sums[corpus] += record[f"loss/{corpus}"]
                counts[corpus] += 1
    means = {corpus: sums[corpus] / counts[corpus] for corpus in CORPORA if counts[corpus]}
    (record,) = (each for each in records(third) if each["step"] == 3 and "loss" in each)
    assert losses_of(record) == pytest.approx(means, rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"zero_stage": 2, "micro_batch_size": 1}, marks=pytest.mark.grid),
        {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
        {"parallel": {"pipeline_parallel_size": 2}, "micro_batch_size": 1},
        {"backend": "deepspeed", "zero_stage": 1},
        pytest.param({"backend": "deepspeed", "zero_stage": 3}, marks=pytest.mark.grid),
        pytest.param({"parallel": {"context_parallel_size": 2}}, marks=pytest.mark.grid),
        pytest.param({"precision": "fp16"}, marks=pytest.mark.grid),
        pytest.param({"optimizer": {"name": "sophia_g"}}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_ranks_add_up_the_losses_of_corpora(
    root: Path, tmp_path: Path, expected: dict[str, float], settings: dict[str, Any]
) -> None:
    config = make_run(root, tmp_path.name, log_corpus_losses=True, train_steps=2, **settings)
    train(config, ranks=2)
    rel = 1e-2 if "precision" in settings else 1e-5
    assert first(config) == pytest.approx(expected, rel=rel)
