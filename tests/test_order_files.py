"""Orders written piece by piece against numpy's files of the whole arrays."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokamake import _csrc
from tokamake.data.samples import order_files
from tokamake.data.samples.blend import CorpusBlend, ExactBlend, blend
from tokamake.data.samples.order_files import write_blend, write_exhaustive, write_order

NAMES = ("dataset_index.npy", "dataset_sample_index.npy")


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_files, "_PIECE", 64)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("order")


def assert_written(folder: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    for name, array in zip(NAMES, arrays, strict=True):
        np.save(folder / f"whole-{name}", array)
        assert (folder / name).read_bytes() == (folder / f"whole-{name}").read_bytes()


@example(weights=[1.0, 3.0], num_samples=0)
@example(weights=[1.0, 1.0], num_samples=128)  # pieces end where the order does
@given(
    weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40),
    num_samples=st.integers(0, 1000),
)
def test_blend(folder: Path, weights: list[float], num_samples: int) -> None:
    whole = blend(weights, num_samples)
    wanted, drawn, samples = write_blend(folder, weights, num_samples)
    assert (wanted, drawn, samples) == (whole.wanted, whole.drawn, len(whole.dataset_index))
    assert_written(folder, (whole.dataset_index, whole.dataset_sample_index))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_exhaustive(folder: Path, counts: list[int]) -> None:
    write_exhaustive(folder, counts)
    assert_written(folder, _csrc.build_exhaustive_blend_index(np.array(counts, np.int64)))


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=4))
def test_orders(folder: Path, corpora: list[list[int]]) -> None:
    for order in (ExactBlend(corpora[0]), CorpusBlend(corpora, within="shuffled", seed=3)):
        write_order(folder, order)
        assert_written(folder, order.block(0, len(order)))


def test_order_of_more_sets_than_int16_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_files, "_PIECE", 20_000)
    order = ExactBlend([1] * 32_768)
    write_order(folder, order)
    assert np.load(folder / NAMES[0]).dtype == np.int32
    assert_written(folder, order.block(0, len(order)))


def test_memory_does_not_grow_with_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_files, "_PIECE", 10_000)
    peaks = []
    for num_samples in (50_000, 500_000):
        for write in (
            lambda n=num_samples: write_blend(folder, [1.0, 2.0, 3.0], n),
            lambda n=num_samples: write_exhaustive(folder, [n // 4, n // 2]),
            lambda n=num_samples: write_order(folder, ExactBlend([n // 4, n // 2])),
        ):
            tracemalloc.start()
            write()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert all(few > 100_000 for few in peaks)  # the pieces are seen at all
    for few, many in zip(peaks[:3], peaks[3:], strict=True):
        assert many < 1.2 * few
