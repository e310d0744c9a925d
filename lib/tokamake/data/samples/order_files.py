"""The two files of an order of samples, written piece by piece: memory does not grow with them.

Orders come from `blend`; dataset_index.npy, the number of the file that each sample comes from, and
dataset_sample_index.npy, its number in that file (0, 1, 2, ... as drawn), both as `numpy.save`
writes them, go into the folder of a set for `loader` to open.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import numpy.lib.format
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.samples.blend import Places, aim

_PIECE = 1 << 20
"""Samples that are held in memory."""


class Order(Protocol):
    """Any order that is at hand piece by piece: `ExactBlend`, `CorpusBlend`."""

    def __len__(self) -> int:
        """Samples of it."""

    def block(self, start: int, stop: int) -> Places:
        """Samples `start` to `stop`."""


def write_blend(
    folder: Path, weights: list[float], num_samples: int
) -> tuple[list[int], list[int], int]:
    """Write an order that draws from files by weight, as Megatron's BlendedDataset does.

    Args:
        folder: to write to.
        weights: above 0, at most 32,766 of them; only their proportions count.
        num_samples: samples wanted; the order may have some more.

    Returns:
        Samples that Megatron asks each file for; those that the order takes from it, which with few
        samples may be more; and the samples of the order.
    """
    shares, wanted, samples = aim(weights, num_samples)
    drawn = np.zeros(len(weights), np.int64)

    def counted() -> Iterator[Places]:
        for piece in drawn_pieces(_csrc.Blender(shares), samples):
            drawn[:] += np.bincount(piece[0], minlength=len(drawn))
            yield piece

    _write(folder, counted(), samples, np.dtype(np.int16))
    return wanted, drawn.tolist(), samples


def write_exhaustive(folder: Path, counts: list[int]) -> None:
    """Write an order of all samples of all files, as Megatron's exhaustive blend has them.

    Args:
        folder: to write to.
        counts: samples of each file, above 0; at most 32,767 files.
    """
    blender = _csrc.Blender.exhaustive(np.array(counts, np.int64))
    samples = sum(counts)
    _write(folder, drawn_pieces(blender, samples), samples, np.dtype(np.int16))


def write_order(folder: Path, order: Order) -> None:
    """Write an order; its numbers of datasets have the dtype that its blocks have."""
    samples = len(order)
    pieces = (order.block(start, stop) for start, stop in _bounds(samples))
    _write(folder, pieces, samples, order.block(0, 0)[0].dtype)


def drawn_pieces(blender: _csrc.Blender, samples: int) -> Iterator[Places]:
    """Draw the next samples, up to 2**20 at a time: numbers of datasets, and of samples in them."""
    for start, stop in _bounds(samples):
        yield blender.draw(stop - start)


def _bounds(samples: int) -> Iterator[tuple[int, int]]:
    for start in range(0, samples, _PIECE):
        yield start, min(start + _PIECE, samples)


def _write(
    folder: Path, pieces: Iterable[Places], samples: int, dtype: np.dtype[np.integer]
) -> None:
    with (
        open(folder / "dataset_index.npy", "wb") as datasets,
        open(folder / "dataset_sample_index.npy", "wb") as numbers,
    ):
        _write_header(datasets, dtype, samples)
        _write_header(numbers, np.dtype(np.int64), samples)
        for piece in pieces:
            datasets.write(_bytes(piece[0], dtype))
            numbers.write(_bytes(piece[1], np.dtype(np.int64)))


def _write_header(stream: IO[bytes], dtype: np.dtype[np.integer], size: int) -> None:
    # Not a memory map: what is written through one counts as memory of the process.
    described = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (size,)}
    numpy.lib.format.write_array_header_1_0(stream, described)


def _bytes(array: npt.NDArray[np.integer], dtype: np.dtype[np.integer]) -> memoryview:
    return np.ascontiguousarray(array, dtype.newbyteorder("<")).data
