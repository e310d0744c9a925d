"""Samples that are drawn from each dataset, and their order on disk."""

from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from tokamake.data.samples.draw import Blend, DrawSettings, Within, draw, draw_all

WEIGHTS, CORPORA = [1.0, 2.0, 5.0], ["a", "a", "b"]
BLENDS = [
    DrawSettings(blend, within, 7)
    for blend in get_args(Blend)
    for within in (get_args(Within) if blend == "corpora" else ("shuffled",))
]


def order(folder: Path) -> list[tuple[int, int]]:
    """Dataset of each sample, and its number in the dataset."""
    names = ("dataset_index.npy", "dataset_sample_index.npy")
    datasets, samples = (np.load(folder / name) for name in names)
    return list(zip(datasets.tolist(), samples.tolist(), strict=True))


@pytest.mark.parametrize("settings", BLENDS, ids=lambda settings: "-".join(settings[:2]))
def test_the_order_has_as_many_samples_of_each_dataset_as_reported(
    tmp_path: Path, settings: DrawSettings
) -> None:
    drawn = draw(tmp_path, WEIGHTS, CORPORA, num_samples=80, settings=settings)
    samples = order(tmp_path)
    counts = [sum(dataset == number for dataset, _ in samples) for number in range(3)]
    assert drawn.drawn == counts
    assert drawn.samples == len(samples) == sum(counts) == 80
    assert all(abs(count - share) <= 1 for count, share in zip(counts, (10, 20, 50), strict=True))
    for dataset, count in enumerate(drawn.requested):
        assert all(sample < count for number, sample in samples if number == dataset)


@pytest.mark.parametrize("settings", BLENDS, ids=lambda settings: "-".join(settings[:2]))
def test_all_samples_of_datasets_are_drawn_once(tmp_path: Path, settings: DrawSettings) -> None:
    counts = [3, 1, 6]
    drawn = draw_all(tmp_path, counts, corpora=CORPORA, settings=settings)
    assert (drawn.requested, drawn.drawn, drawn.samples) == (counts, counts, 10)
    expected = [(dataset, n) for dataset, count in enumerate(counts) for n in range(count)]
    assert sorted(order(tmp_path)) == expected


@pytest.mark.parametrize("settings", BLENDS, ids=lambda settings: "-".join(settings[:2]))
def test_the_same_settings_give_the_same_order(tmp_path: Path, settings: DrawSettings) -> None:
    orders = []
    for name in "ab":
        (tmp_path / name).mkdir()
        draw(tmp_path / name, WEIGHTS, CORPORA, num_samples=50, settings=settings)
        orders.append(order(tmp_path / name))
    assert orders[0] == orders[1]


def test_datasets_of_a_corpus_follow_each_other_if_concatenated(tmp_path: Path) -> None:
    settings = DrawSettings("corpora", "concatenated", 7)
    draw(tmp_path, WEIGHTS, CORPORA, num_samples=80, settings=settings)
    of_corpus = [dataset for dataset, _ in order(tmp_path) if dataset < 2]
    assert of_corpus == [0] * 10 + [1] * 20


def test_the_seed_shuffles_inside_corpora_only(tmp_path: Path) -> None:
    orders = {}
    for seed in (1, 2):
        for within in ("shuffled", "blended"):
            folder = tmp_path / f"{within}-{seed}"
            folder.mkdir()
            settings = DrawSettings("corpora", within, seed)
            draw(folder, WEIGHTS, CORPORA, num_samples=80, settings=settings)
            orders[within, seed] = order(folder)
    assert orders["shuffled", 1] != orders["shuffled", 2]
    assert orders["blended", 1] == orders["blended", 2]
    corpora = [[number < 2 for number, _ in orders["shuffled", seed]] for seed in (1, 2)]
    assert corpora[0] == corpora[1]


def test_exact_blends_are_spread_evenly(tmp_path: Path) -> None:
    settings = DrawSettings("exact", "shuffled", 7)
    drawn = draw(tmp_path, WEIGHTS, CORPORA, num_samples=80, settings=settings)
    assert drawn.drawn == [10, 20, 50]
    places = [place for place, (dataset, _) in enumerate(order(tmp_path)) if dataset == 0]
    assert all(4 <= second - first <= 12 for first, second in pairwise(places))
