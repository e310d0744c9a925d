"""Progress lines on terminals and in logs."""

import sys
from types import SimpleNamespace

import pytest

from tokamake.runtime import console
from tokamake.runtime.console import folded, progress


def test_a_log_gets_few_progress_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=clock.__next__))
    assert list(progress([5, 6, 7, 8], label="reading", unit="files")) == [5, 6, 7, 8]
    assert capsys.readouterr().err.splitlines() == [
        "reading: 2/4 (50%) files",
        "reading: 4/4 (100%) files",
    ]


def test_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress(iter([1, 2]), label="reading", total=2)) == [1, 2]
    assert "reading" in capsys.readouterr().err


def test_a_folded_line_continues_below_its_last_column() -> None:
    line = "stopped  run mine  stopped at step 58 of 600, saved; the same command continues"
    below = " " * 19
    assert folded(line, 48).splitlines() == [
        "stopped  run mine  stopped at step 58 of 600,",
        f"{below}saved; the same command",
        f"{below}continues",
    ]
