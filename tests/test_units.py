"""Times, sizes and counts as text for people."""

import pytest

from tokamake.units import amount, duration, in_bytes


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB")]
)
def test_sizes_have_a_readable_unit(size: int, text: str) -> None:
    assert in_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.96, "10.0 s"), (59.9, "1 min 00 s"), (7260.0, "2 h 01 min"), (180_000, "2 d 2 h")],
)
def test_times_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (4_769_472, "4.77 M"), (1.26e9, "1.26 B"), (2e12, "2 T")]
)
def test_counts_have_three_digits(number: float, text: str) -> None:
    assert amount(number) == text
