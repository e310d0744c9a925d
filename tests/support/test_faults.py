"""Counting of injected faults, and the page that says what becomes of each kind."""

import pytest

from tests.support.faults import KINDS, PROPERTY, table
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/explanation/reliability.md").read_text()


def report(outcome: str, *kinds: str) -> pytest.TestReport:
    """Report of a test that injected faults of these kinds."""
    return pytest.TestReport(
        nodeid="test",
        location=("test.py", 1, "test"),
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=None,
        when="call",
        user_properties=[(PROPERTY, kind) for kind in kinds],
    )


def test_a_failed_test_lost_its_last_fault() -> None:
    kill, disk = "kill in a save", "full disk"
    reports = [report("passed", disk), report("failed", *[kill] * 3), report("passed")]
    assert table(reports)[2:] == [
        f"| {kill} | 3 | 2 | 1 |",
        f"| {disk} | 1 | 1 | 0 |",
        "| all | 4 | 3 | 1 |",
    ]


def test_without_faults_there_is_no_table() -> None:
    assert table([report("passed")]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_a_row_for_each_kind(kind: str) -> None:
    assert f"| {kind} |" in PAGE
