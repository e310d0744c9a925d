"""Token files with floating-point tokens, which old versions of Megatron could write."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError

_CHUNK = 1 << 20


def highest_token(binary: Path, dtype: np.dtype) -> int:
    """Return the highest token, -1 if there is none; refuse numbers that are no int32 above -1."""
    highest, first = -1, 0
    for tokens in _chunks(binary, dtype):
        # NaN and infinity fail these comparisons too.
        invalid = ~((tokens >= 0) & (tokens < 1 << 31) & (tokens == np.floor(tokens)))
        if invalid.any():
            position = int(invalid.argmax())
            raise UserError(
                f"{binary}: number {first + position} is {tokens[position]}, not a token; the "
                "file holds no tokens, leave it out"
            )
        highest, first = max(highest, int(tokens.max())), first + len(tokens)
    return highest


def as_integers(
    binary: Path, dtype: np.dtype, *, target_dtype: type[np.integer]
) -> Iterator[npt.NDArray[np.integer]]:
    """Yield the tokens of a file as integers; call `highest_token` first to check them."""
    for tokens in _chunks(binary, dtype):
        yield tokens.astype(target_dtype)


def _chunks(binary: Path, dtype: np.dtype) -> Iterator[npt.NDArray[np.floating]]:
    with binary.open("rb") as stream:
        while len(tokens := np.fromfile(stream, dtype, _CHUNK)):
            yield tokens
