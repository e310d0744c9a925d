"""Large grids: `make test` runs cases that cover all values, `make test-all` runs all cases."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
Features = Callable[[Any], Iterable[Hashable]]
Proved = dict[int, list[tuple[str, dict[str, Any]]]]


def cover(
    cases: Iterable[Case], features: Features, *, cost: Callable[[Case], float] = lambda _: 1.0
) -> list[Case]:
    """Return cases that have each feature at least once, in their order; few, not the fewest.

    With costs, they are cheap rather than few.
    """
    all_features = [(case, set(features(case))) for case in cases]
    chosen, missing = list[Case](), set[Hashable]().union(*(own for _, own in all_features))
    while missing:
        best, found = max(all_features, key=lambda each: len(missing & each[1]) / cost(each[0]))
        chosen.append(best)
        missing -= found
    return [case for case, _ in all_features if case in chosen]


def params(cases: Iterable[Case], kept: Iterable[Case]) -> list[Any]:
    """Return cases for `parametrize`; those that are not kept have the marker `grid`."""
    kept = list(kept)
    return [case if case in kept else pytest.param(case, marks=pytest.mark.grid) for case in cases]


def field_values(case: Any) -> set[Hashable]:
    """Return fields of a dataclass with their values."""
    return {(field.name, getattr(case, field.name)) for field in fields(case)}


def layout_values(layout: tuple[int, str, dict[str, Any]]) -> set[Hashable]:
    """Return number of ranks, initial checkpoint and settings of a layout."""
    world_size, start, changes = layout
    settings = {**changes, **changes.get("parallel", {})}
    settings.pop("parallel", None)
    return {("ranks", world_size), ("start", start), *((k, str(v)) for k, v in settings.items())}


def split_layouts(proved: Proved, *, most_ranks: int | None = None) -> list[Any]:
    """Return number of ranks and layouts, for `parametrize`: those that cover, then the rest.

    Those on more than `most_ranks` have the marker `grid`.
    """
    flat = [(size, start, changes) for size in proved for start, changes in proved[size]]
    kept = cover(flat, layout_values)
    rest = [layout for layout in flat if layout not in kept]
    return [
        pytest.param(
            size,
            [(start, changes) for number, start, changes in layouts if number == size],
            id=f"{size}-{name}",
            marks=pytest.mark.grid if most_ranks and size > most_ranks else marks,
        )
        for layouts, name, marks in (
            (kept, "each kind", ()),
            (rest, "all others", pytest.mark.grid),
        )
        for size in proved
        if any(number == size for number, _, _ in layouts)
    ]
