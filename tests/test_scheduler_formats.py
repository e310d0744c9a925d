"""Lists of hosts and times as batch systems write them."""

import pytest

from tokamake.scheduler_formats import hosts_of, seconds_of


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("single", ["single"]),
        ("ip-10-0-0-1,ip-10-0-0-2", ["ip-10-0-0-1", "ip-10-0-0-2"]),
        ("ip-10-0-0-[9-10],ip-10-0-1-1", ["ip-10-0-0-9", "ip-10-0-0-10", "ip-10-0-1-1"]),
        ("node[03-05,7],other", ["node03", "node04", "node05", "node7", "other"]),
        ("x[1,3]-hsn0", ["x1-hsn0", "x3-hsn0"]),
        ("r[1-2]n[09-10]b0", ["r1n09b0", "r1n10b0", "r2n09b0", "r2n10b0"]),
        ("", []),
    ],
)
def test_node_lists(nodes: str, expected: list[str]) -> None:
    assert hosts_of(nodes) == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("59", 59), ("1:00", 60), ("2:03:04", 7384), ("3-00:00:01", 259_201), ("UNLIMITED", None)],
)
def test_times_are_read_in_every_notation(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds
