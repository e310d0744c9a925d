"""Draw the samples of a split: how many come from each dataset, and in which order.

The order is written in blocks, so that memory does not grow with it: dataset_index.npy has the
number of the dataset of each sample, dataset_sample_index.npy the number of the sample in that
dataset (0, 1, 2, ... in drawing order). Both equal files of `numpy.save`. `loader` maps them.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np
import numpy.lib.format
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.samples.blend import CorpusBlend, ExactBlend, OrderBlock, apportion, plan_blend
from tokamake.data.samples.index_options import IndexSettings

Value = TypeVar("Value", int, float)

_BLOCK_SAMPLES = 1 << 20


class DrawnSamples(NamedTuple):
    """Samples of each dataset of a split."""

    requested: list[int]
    """Samples that its index must hold."""
    drawn: list[int]


def draw(
    folder: Path,
    weights: Sequence[float],
    corpora: Sequence[str],
    *,
    num_samples: int,
    settings: IndexSettings,
) -> DrawnSamples:
    """Write an order of at least `num_samples` samples: dataset_index and dataset_sample_index.

    Only ratios of `weights` count. For `corpora`, datasets of a corpus must be neighbors.
    """
    if settings.blend == "weighted":
        return write_blend(folder, list(weights), num_samples=num_samples)
    if settings.blend == "exact":
        counts = apportion(list(weights), num_samples)
    else:
        groups = _by_corpus(weights, corpora)
        totals = apportion([sum(group) for group in groups], num_samples)
        nested = [apportion(*each) for each in zip(groups, totals, strict=True)]
        counts = [count for group in nested for count in group]
    return draw_all(folder, counts, corpora=corpora, settings=settings)


def draw_all(
    folder: Path, counts: list[int], *, corpora: Sequence[str], settings: IndexSettings
) -> DrawnSamples:
    """Write an order of all samples of some datasets."""
    if settings.blend == "weighted":
        write_exhaustive(folder, counts)
    elif settings.blend == "exact":
        write_order(folder, ExactBlend(counts))
    else:
        nested = _by_corpus(counts, corpora)
        order = CorpusBlend(nested, within=settings.within_corpus, seed=settings.seed)
        write_order(folder, order)
    return DrawnSamples(counts, counts)


def _by_corpus(values: Sequence[Value], corpora: Sequence[str]) -> list[list[Value]]:
    groups: dict[str, list[Value]] = {}
    for value, corpus in zip(values, corpora, strict=True):
        groups.setdefault(corpus, []).append(value)
    return list(groups.values())


def write_blend(folder: Path, weights: list[float], *, num_samples: int) -> DrawnSamples:
    """Write an order of `num_samples` samples or a few more, as Megatron's BlendedDataset does.

    Datasets are drawn by weight. A small order may draw more samples than Megatron requests.
    """
    shares, requested, samples = plan_blend(weights, num_samples)
    drawn = np.zeros(len(weights), np.int64)

    def count_drawn() -> Iterator[OrderBlock]:
        for datasets, numbers in drawn_blocks(_csrc.Blender(shares), samples):
            drawn[:] += np.bincount(datasets, minlength=len(drawn))
            yield datasets, numbers

    _write(folder, count_drawn(), samples=samples, dtype=np.dtype(np.int16))
    return DrawnSamples(requested, drawn.tolist())


def write_exhaustive(folder: Path, counts: list[int]) -> None:
    """Write an order of all samples of up to 32,767 datasets: Megatron's exhaustive blend."""
    blender = _csrc.Blender.exhaustive(np.array(counts, np.int64))
    samples = sum(counts)
    _write(folder, drawn_blocks(blender, samples), samples=samples, dtype=np.dtype(np.int16))


def write_order(folder: Path, order: ExactBlend | CorpusBlend) -> None:
    """Write an order; dataset numbers keep the dtype of its blocks."""
    samples = len(order)
    blocks = (order.block(start, stop) for start, stop in _bounds(samples))
    _write(folder, blocks, samples=samples, dtype=order.block(0, 0)[0].dtype)


def drawn_blocks(blender: _csrc.Blender, samples: int) -> Iterator[OrderBlock]:
    for start, stop in _bounds(samples):
        yield blender.draw(stop - start)


def _bounds(samples: int) -> Iterator[tuple[int, int]]:
    for start in range(0, samples, _BLOCK_SAMPLES):
        yield start, min(start + _BLOCK_SAMPLES, samples)


def _write(
    folder: Path, blocks: Iterable[OrderBlock], *, samples: int, dtype: np.dtype[np.integer]
) -> None:
    with (
        open(folder / "dataset_index.npy", "wb") as dataset_stream,
        open(folder / "dataset_sample_index.npy", "wb") as number_stream,
    ):
        _write_header(dataset_stream, dtype, size=samples)
        _write_header(number_stream, np.dtype(np.int64), size=samples)
        for datasets, numbers in blocks:
            dataset_stream.write(_bytes(datasets, dtype))
            number_stream.write(_bytes(numbers, np.dtype(np.int64)))


def _write_header(stream: IO[bytes], dtype: np.dtype[np.integer], *, size: int) -> None:
    # No np.lib.format.open_memmap: dirty pages of a mapping count as memory of the process.
    header = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (size,)}
    numpy.lib.format.write_array_header_1_0(stream, header)


def _bytes(array: npt.NDArray[np.integer], dtype: np.dtype[np.integer]) -> memoryview:
    return np.ascontiguousarray(array, dtype.newbyteorder("<")).data
