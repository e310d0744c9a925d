"""Samples that are drawn from each dataset, and their order, compared with megatron-core's."""

import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import (
    _get_size_per_split_per_dataset,
)
from megatron.core.datasets.utils import normalize

from tokamake import _csrc
from tokamake.data.samples import draw as draw_module
from tokamake.data.samples.blend import CorpusBlend, ExactBlend
from tokamake.data.samples.draw import (
    draw,
    draw_all,
    write_blend,
    write_exhaustive,
    write_order,
)
from tokamake.data.samples.index_options import Blend, IndexSettings, Within

NAMES = ("dataset_index.npy", "dataset_sample_index.npy")
WEIGHTS, CORPORA = [1.0, 2.0, 5.0], ["a", "a", "b"]


def settings_of(blend: Blend, within: Within, seed: int) -> IndexSettings:
    options: dict[str, Any] = {"separate_last_epoch": None, "drop_last_partial_sequence": True}
    return IndexSettings(8, seed, blend=blend, within_corpus=within, **options)


BLENDS = [
    settings_of(blend, within, 7)
    for blend in get_args(Blend)
    for within in (get_args(Within) if blend == "corpora" else ("shuffled",))
]


def order(folder: Path) -> list[tuple[int, int]]:
    """Dataset of each sample, and its number in the dataset."""
    datasets, samples = (np.load(folder / name) for name in NAMES)
    return list(zip(datasets.tolist(), samples.tolist(), strict=True))


@pytest.mark.parametrize("settings", BLENDS, ids=lambda settings: "-".join(settings[2:4]))
def test_the_order_has_as_many_samples_of_each_dataset_as_reported(
    tmp_path: Path, settings: IndexSettings
) -> None:
    drawn = draw(tmp_path, WEIGHTS, CORPORA, num_samples=80, settings=settings)
    samples = order(tmp_path)
    counts = [sum(dataset == number for dataset, _ in samples) for number in range(3)]
    assert drawn.drawn == counts
    assert len(samples) == sum(counts) == 80
    assert all(abs(count - share) <= 1 for count, share in zip(counts, (10, 20, 50), strict=True))
    for dataset, count in enumerate(drawn.requested):
        assert all(sample < count for number, sample in samples if number == dataset)


@pytest.mark.parametrize("settings", BLENDS, ids=lambda settings: "-".join(settings[2:4]))
def test_all_samples_of_datasets_are_drawn_once(tmp_path: Path, settings: IndexSettings) -> None:
    counts = [3, 1, 6]
    drawn = draw_all(tmp_path, counts, corpora=CORPORA, settings=settings)
    assert drawn == (counts, counts)
    expected = [(dataset, n) for dataset, count in enumerate(counts) for n in range(count)]
    assert sorted(order(tmp_path)) == expected


@pytest.mark.parametrize("settings", BLENDS, ids=lambda settings: "-".join(settings[2:4]))
def test_the_same_settings_give_the_same_order(tmp_path: Path, settings: IndexSettings) -> None:
    orders = []
    for name in "ab":
        (tmp_path / name).mkdir()
        draw(tmp_path / name, WEIGHTS, CORPORA, num_samples=50, settings=settings)
        orders.append(order(tmp_path / name))
    assert orders[0] == orders[1]


def test_datasets_of_a_corpus_follow_each_other_if_concatenated(tmp_path: Path) -> None:
    settings = settings_of("corpora", "concatenated", 7)
    draw(tmp_path, WEIGHTS, CORPORA, num_samples=80, settings=settings)
    of_corpus = [dataset for dataset, _ in order(tmp_path) if dataset < 2]
    assert of_corpus == [0] * 10 + [1] * 20


def test_the_seed_shuffles_inside_corpora_only(tmp_path: Path) -> None:
    orders = {}
    for seed in (1, 2):
        for within in ("shuffled", "blended"):
            folder = tmp_path / f"{within}-{seed}"
            folder.mkdir()
            settings = settings_of("corpora", within, seed)
            draw(folder, WEIGHTS, CORPORA, num_samples=80, settings=settings)
            orders[within, seed] = order(folder)
    assert orders["shuffled", 1] != orders["shuffled", 2]
    assert orders["blended", 1] == orders["blended", 2]
    corpora = [[number < 2 for number, _ in orders["shuffled", seed]] for seed in (1, 2)]
    assert corpora[0] == corpora[1]


def test_exact_blends_are_spread_evenly(tmp_path: Path) -> None:
    settings = settings_of("exact", "shuffled", 7)
    drawn = draw(tmp_path, WEIGHTS, CORPORA, num_samples=80, settings=settings)
    assert drawn.drawn == [10, 20, 50]
    places = [place for place, (dataset, _) in enumerate(order(tmp_path)) if dataset == 0]
    assert all(4 <= second - first <= 12 for first, second in pairwise(places))


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_module, "_BLOCK_SAMPLES", 64)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("order")


def assert_written(folder: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    for name, array in zip(NAMES, arrays, strict=True):
        np.save(folder / f"whole-{name}", array)
        assert (folder / name).read_bytes() == (folder / f"whole-{name}").read_bytes()


# Normalizing these shares twice changes their last bits, and with them the order.
@example([13.0, 10.0, 6.0, 6.0, 1.0, 2.0, 1.0, 4.0, 16.0, 13.0], 200)
@example([1.0, 3.0], 0)
@example([1.0, 1.0], 128)  # blocks end where the order ends
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(0, 3000))
def test_blend_equals_megatron(folder: Path, weights: list[float], num_samples: int) -> None:
    shares = normalize(weights)
    targets = [count for (count,) in _get_size_per_split_per_dataset(shares, [num_samples])]
    expected = _get_size_per_split_per_dataset(shares, [num_samples], surplus=0.005)
    size = sum(targets)
    datasets, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    twice = normalize(shares)
    helpers.build_blending_indices(datasets, numbers, twice, len(twice), size, False)
    requested, drawn = write_blend(folder, weights, num_samples=num_samples)
    assert requested == [count for (count,) in expected]
    assert drawn == [int((datasets == n).sum()) for n in range(len(weights))]
    assert sum(drawn) == size
    assert_written(folder, (datasets, numbers))


def test_drawn_samples_have_the_shares_of_the_weights(folder: Path) -> None:
    _, drawn = write_blend(folder, [6, 3, 1], num_samples=10_000)
    assert sum(drawn) == len(np.load(folder / NAMES[0])) == 10_000
    assert drawn == pytest.approx([6000, 3000, 1000], abs=1)


def test_drawn_samples_are_counted_across_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_module, "_BLOCK_SAMPLES", 1 << 20)
    _, drawn = write_blend(folder, [1, 3], num_samples=3_000_000)
    assert drawn == [750_000, 2_250_000]
    assert np.bincount(np.load(folder / NAMES[0])).tolist() == drawn


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_exhaustive_blend_equals_megatron(folder: Path, counts: list[int]) -> None:
    write_exhaustive(folder, counts)
    assert_written(folder, _csrc.Blender.exhaustive(np.array(counts, np.int64)).draw(sum(counts)))


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=4))
def test_blocks_equal_the_whole_order(folder: Path, corpora: list[list[int]]) -> None:
    for order in (ExactBlend(corpora[0]), CorpusBlend(corpora, within="shuffled", seed=3)):
        write_order(folder, order)
        assert_written(folder, order.block(0, len(order)))


def test_more_datasets_than_int16_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_module, "_BLOCK_SAMPLES", 20_000)
    order = ExactBlend([1] * 32_768)
    write_order(folder, order)
    assert np.load(folder / NAMES[0]).dtype == np.int32
    assert_written(folder, order.block(0, len(order)))


def test_memory_does_not_grow_with_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_module, "_BLOCK_SAMPLES", 10_000)
    peaks = []
    for num_samples in (50_000, 500_000):
        for write in (
            lambda n=num_samples: write_blend(folder, [1.0, 2.0, 3.0], num_samples=n),
            lambda n=num_samples: write_exhaustive(folder, [n // 4, n // 2]),
            lambda n=num_samples: write_order(folder, ExactBlend([n // 4, n // 2])),
        ):
            tracemalloc.start()
            write()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert all(few > 100_000 for few in peaks)  # tracemalloc sees the blocks
    for few, many in zip(peaks[:3], peaks[3:], strict=True):
        assert many < 1.2 * few
