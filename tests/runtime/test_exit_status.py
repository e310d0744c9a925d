"""Exit statuses of a training: each has one meaning."""

from tests.support.paths import ROOT
from tokamake.errors import EXIT_USER_ERROR
from tokamake.runtime.exit_status import HUNG, Stopped


def test_statuses_differ_from_those_of_signals_and_mistakes() -> None:
    statuses = [EXIT_USER_ERROR, HUNG, *Stopped]
    assert len({*statuses}) == len(statuses)
    assert all(0 < status < 128 for status in statuses)


def test_the_reference_has_all() -> None:
    text = (ROOT / "docs/reference/exit-status.md").read_text()
    assert all(f"\n| {status:d} |" in text for status in (0, EXIT_USER_ERROR, HUNG, *Stopped))
