"""Random weights of a new model, drawn tile by tile.

A tile depends only on the seed, the name of its tensor and its place in it. So each rank draws the
tiles of its own part, no host ever holds the model, and every layout gets the same numbers.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from tokamake.config.architecture import Architecture

SCHEME = "tiles of 256 x 256"
"""Name of this way to draw weights; a run that drew them in another way is another run."""
_TILE = (256, 256)
"""Rows and columns of a tile: few enough that a rank draws little beyond its part, and enough that
the start of a generator takes no time. A tile lies in one matrix of a stack."""

Slices = tuple[slice, ...]
Array = npt.NDArray[np.float32]


class RandomWeights:
    """Weights of a model before its training: normal with deviation `initializer_range`.

    Projections into the residual stream (ends of names) have a deviation smaller by √(2 × layers),
    as in GPT-2's report. Norms are 1, or 0 if they are centered, and biases and sinks 0.
    """

    def __init__(
        self,
        architecture: Architecture,
        seed: int,
        *,
        into_residual: tuple[str, ...],
        has_centered_norms: bool = False,
    ) -> None:
        self._into_residual, self._norm = into_residual, 0.0 if has_centered_norms else 1.0
        self._deviation = architecture.initializer_range
        self._depth = math.sqrt(2 * architecture.num_hidden_layers)
        self._seed = seed

    def tiles(
        self, name: str, shape: Sequence[int], *, place: Slices
    ) -> Iterator[tuple[Slices, Array]]:
        """Draw a part of a tensor, tile by tile.

        Args:
            shape: shape of the whole tensor; matrices may be stacked along the first dimensions.
            place: the part; slices of it come back with their values in fp32.
        """
        if len(shape) == 1 or name.endswith(".bias"):
            size = [at.stop - at.start for at in place]
            value = 0.0 if name.endswith(("bias", "sinks")) else self._norm
            yield tuple(slice(0, each) for each in size), np.full(size, value, np.float32)
            return
        depth = self._depth if name.endswith(self._into_residual) else 1.0
        deviation = np.float32(self._deviation / depth)
        widths = (*[1] * (len(shape) - len(_TILE)), *_TILE)
        for tile in product(*map(_starts, place, shape, widths)):
            # numpy draws: torch's normal depends on the vector units of the processor.
            digest = hashlib.sha256(self._source(name, *tile).encode()).digest()
            generator = np.random.default_rng(int.from_bytes(digest, "little"))
            drawn = generator.standard_normal([at.stop - at.start for at in tile], dtype=np.float32)
            drawn *= deviation
            common = [*map(_overlap, tile, place)]
            yield _within(common, place), drawn[_within(common, tile)]

    def _source(self, name: str, *tile: slice) -> str:
        """Seed of a tile. The first tile has the numbers of versions without tiles."""
        source, starts = f"{self._seed} {name.removeprefix('model.')}", [at.start for at in tile]
        return " ".join([source, *map(str, starts)]) if any(starts) else source


def _starts(place: slice, size: int, width: int) -> Iterator[slice]:
    """Slices of the tiles of a dimension that overlap a place."""
    for start in range(place.start // width * width, place.stop, width):
        yield slice(start, min(start + width, size))


def _overlap(first: slice, second: slice) -> slice:
    return slice(max(first.start, second.start), min(first.stop, second.stop))


def _within(slices: Iterable[slice], origins: Slices) -> Slices:
    pairs = zip(slices, origins, strict=True)
    return tuple(slice(at.start - origin.start, at.stop - origin.start) for at, origin in pairs)
