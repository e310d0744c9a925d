"""Samples of BERT: equal to megatron-core's field by field, and masked as often as they should."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.sentence_data import (
    SEED,
    SentenceData,
    build_index,
    megatron_datasets,
    without_loss,
)
from tokamake.data.samples.sentence_masking import SentenceMasking
from tokamake.train.objectives.masked.samples import MaskedSamples, make_sampler, masked_record

PAD, MASK = 0, 4


def assert_equal(ours: Any, theirs: dict[str, Any]) -> None:
    """Compare all fields of a sample, except the padding mask where [PAD] was drawn."""
    length = len(theirs["text"])
    is_real = np.arange(length) < ours["num_tokens"]
    np.testing.assert_array_equal(ours["tokens"], theirs["text"])
    np.testing.assert_array_equal(ours["types"], theirs["types"])
    np.testing.assert_array_equal(ours["labels"], without_loss(theirs["labels"]))
    np.testing.assert_array_equal(ours["labels"] != -100, theirs["loss_mask"])
    np.testing.assert_array_equal(is_real & (ours["tokens"] != PAD), theirs["padding_mask"])
    assert ours["is_swapped"] == theirs["is_random"]
    assert ours["is_truncated"] == theirs["truncated"]


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize(("head", "length", "short"), [(True, 64, 0.1), (False, 40, 0.5)])
def test_samples_equal_megatrons(
    sentences: SentenceData, tmp_path: Path, head: bool, length: int, short: float
) -> None:
    masking = {"sentence_order": head, "short_sequence_probability": short}
    folder = build_index(sentences, tmp_path / "index", sequence_length=length, masking=masking)
    settings = {"sequence_length": length, "head": head, "short": short}
    references = megatron_datasets(sentences, tmp_path / "cache", **settings)
    for split, reference in zip(("train", "valid"), references, strict=False):
        ours = MaskedSamples(folder, split=split, data_root=sentences.root)
        assert len(ours) == len(reference)
        seen = set()
        for sample in range(len(ours)):
            assert_equal(ours[sample], reference[sample])
            seen.add((int(ours[sample]["is_swapped"]), int(ours[sample]["is_truncated"])))
        assert split == "valid" or {1, 0} == {truncated for _, truncated in seen}
        assert {swapped for swapped, _ in seen} == ({0, 1} if head else {0})


@pytest.mark.usefixtures("lone_rank")
def test_a_random_pad_is_attended_to_unlike_in_megatron(
    sentences: SentenceData, tmp_path: Path
) -> None:
    settings = {"sequence_length": 40, "train_samples": 4000, "valid_samples": 0}
    folder = build_index(sentences, tmp_path / "index", split="90,10,0", **settings)
    ours = MaskedSamples(folder, split="train", data_root=sentences.root)
    sizes = (4000, 0, 0)
    reference = megatron_datasets(
        sentences, tmp_path / "cache", sequence_length=40, num_samples=sizes
    )[0]
    with_pad = [
        sample
        for sample in range(len(ours))
        if (ours[sample]["tokens"][: ours[sample]["num_tokens"]] == PAD).any()
    ]
    assert with_pad
    for sample in with_pad:
        assert_equal(ours[sample], reference[sample])
        assert reference[sample]["padding_mask"].sum() < ours[sample]["num_tokens"]


OBJECTIVE = SentenceMasking(
    name="masked",
    target_tokens=125,
    min_sentences=1,
    probability=0.15,
    max_ngram=3,
    short_sequence_probability=0.0,
    tokenizer="",
    tokens={"pad": 0, "cls": 2, "sep": 3, "mask": MASK},
    sentinels=[],
)


def draw(objective: SentenceMasking, num_samples: int, *, length: int = 125) -> np.ndarray:
    """Samples of the tokens from 10 on, each a word."""
    sampler = make_sampler(objective, np.zeros(1000, np.uint8))
    rows = np.empty((num_samples, masked_record(128).itemsize // 8), np.int64)
    tokens = np.random.default_rng(0).integers(10, 1000, (num_samples, length)).astype(np.int32)
    lengths = np.array([length], np.int32)
    for number, row in enumerate(rows):
        sampler.write(tokens[number], lengths, target=length, seed=SEED + number, row=row)
    return rows.view(masked_record(128))[:, 0]


def chi_square(counts: Any, shares: Any) -> float:
    expected = np.asarray(shares) * np.sum(counts)
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


def test_masked_tokens_have_their_shares() -> None:
    """80 % masked, 10 % random, 10 % kept; chi-square with 2 degrees at a level of 0.1 %."""
    samples = draw(OBJECTIVE, 2000)
    at = samples["labels"] != -100
    tokens, labels = samples["tokens"][at], samples["labels"][at]
    masked, kept = int((tokens == MASK).sum()), int((tokens == labels).sum())
    counts = [masked, kept, len(labels) - masked - kept]
    # A random token can be [MASK], or the token itself.
    random = 0.1 * 999 / 1000
    shares = np.array([0.8 + 0.1 / 1000, 0.1 + 0.1 / 1000, random - 0.1 / 1000])
    assert chi_square(counts, shares / shares.sum()) < 13.8
    # The budget: 15 % of 127 tokens are 19, of a target of 125 tokens 18.75.
    assert (at.sum(axis=1) <= 18).all()
    assert at.sum(axis=1).mean() > 17.9


def test_random_tokens_and_positions_are_uniform() -> None:
    samples = draw(OBJECTIVE, 4000)
    at = samples["labels"] != -100
    tokens, labels = samples["tokens"][at], samples["labels"][at]
    random = tokens[(tokens != MASK) & (tokens != labels)]
    tenths = np.bincount(random // 100, minlength=10)
    assert chi_square(tenths, np.full(10, 0.1)) < 27.9  # 9 degrees, 0.1 %
    # Word by word: neighbors in a run of words are masked together, which the test does not expect.
    single = draw(OBJECTIVE._replace(max_ngram=1), 4000)["labels"] != -100
    places = single[:, 1:126].sum(axis=0).reshape(25, 5).sum(axis=0)
    tenths_of_text = single[:, 1:121].sum(axis=0).reshape(10, 12).sum(axis=1)
    assert chi_square(places, np.full(5, 0.2)) < 18.5  # 4 degrees
    assert chi_square(tenths_of_text, np.full(10, 0.1)) < 27.9


def test_short_targets_mask_nothing() -> None:
    for length in (2, 6):
        samples = draw(OBJECTIVE, 50, length=length)
        assert (samples["labels"] == -100).all()
    assert (draw(OBJECTIVE, 50, length=7)["labels"] != -100).any(axis=1).all()


def test_whole_words_are_masked() -> None:
    pieces = np.zeros(1000, np.uint8)
    pieces[500:] = 1  # continuations
    sampler = make_sampler(OBJECTIVE, pieces)
    row = np.empty(masked_record(128).itemsize // 8, np.int64)
    random = np.random.default_rng(1)
    for seed in range(200):
        tokens = random.integers(10, 1000, 125).astype(np.int32)
        sampler.write(tokens, np.array([125], np.int32), target=125, seed=seed, row=row)
        at = row[256:384][1:126] != -100
        word = np.cumsum(np.append(True, pieces[tokens[1:]] == 0))
        assert {*word[at]}.isdisjoint(word[~at])
