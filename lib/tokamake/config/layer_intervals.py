"""Layers at equal distances that differ from the rest: each `interval`-th one, none if it is 0."""

from collections.abc import Sequence


def is_nth(layer: int, interval: int) -> bool:
    """Whether a layer, from 0 on, is one of each `interval` layers, the last of them."""
    return interval > 0 and (layer + 1) % interval == 0


def interval_of(differs: Sequence[bool], usual: int = 0) -> int | None:
    """Interval of a list with an entry for each layer; None: distances are not equal.

    Args:
        usual: the result, if it fits.
    """
    for interval in (usual, 0, *range(1, len(differs) + 1)):
        if [is_nth(layer, interval) for layer in range(len(differs))] == [*map(bool, differs)]:
            return interval
    return None
