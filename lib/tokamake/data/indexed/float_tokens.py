"""Token files whose tokens are floating-point numbers, as old versions of Megatron could write.

`merge` reads them here as the whole numbers that they must be.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError

_CHUNK = 1 << 20


def highest(binary: Path, dtype: np.dtype) -> int:
    """Highest token of a file, -1 if it is empty.

    Raises:
        UserError: a number is negative, has a fraction, or is above 2^31 - 1.
    """
    found, first = -1, 0
    for tokens in _chunks(binary, dtype):
        wrong = ~((tokens >= 0) & (tokens < 1 << 31) & (tokens == np.floor(tokens)))
        if wrong.any():
            place = int(wrong.argmax())
            raise UserError(
                f"{binary}: number {first + place} is {tokens[place]}, not a token; this is no "
                "file of tokens, leave it out"
            )
        found, first = max(found, int(tokens.max())), first + len(tokens)
    return found


def as_integers(
    binary: Path, dtype: np.dtype, wanted: type[np.integer]
) -> Iterator[npt.NDArray[np.integer]]:
    """Yield the tokens of a file that `highest` has looked through, as integers."""
    for tokens in _chunks(binary, dtype):
        yield tokens.astype(wanted)


def _chunks(binary: Path, dtype: np.dtype) -> Iterator[npt.NDArray[np.floating]]:
    with binary.open("rb") as stream:
        while len(tokens := np.fromfile(stream, dtype, _CHUNK)):
            yield tokens
