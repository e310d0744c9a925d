"""Which documents of a file train, which validate, which are kept for tests.

The rule is Megatron's of today (`megatron.core.datasets`): cumulative shares, every bound rounded.
"""

import functools
import math
import operator

from tokamake.errors import UserError

NAMES = ("train", "valid", "test")


def shares(text: str) -> list[float]:
    """Normalize a split such as "949,50,1" to shares that add up to 1.

    Raises:
        UserError: not three finite numbers, one is negative, or all are zero.
    """
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    # Not sum(): that compensates rounding since Python 3.12, and Megatron's does not.
    whole = functools.reduce(operator.add, parts, 0.0)
    if len(parts) != 3 or not min(parts) >= 0 or not 0 < whole < math.inf:
        raise UserError(
            f'split: {text!r}: give three non-negative numbers, train,valid,test, as in "949,50,1"'
        )
    return [part / whole for part in parts]


def document_ranges(text: str, num_documents: int) -> dict[str, range]:
    """Documents of each split, by name; together all documents, in order, some perhaps none.

    Raises:
        UserError: `text` is not a split.
    """
    ranges, bound, first = {}, 0.0, 0
    for name, share in zip(NAMES, shares(text), strict=True):
        bound += share
        last = round(bound * num_documents)
        ranges[name] = range(first, last)
        first = last
    return ranges
