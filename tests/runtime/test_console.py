"""Progress lines on terminals and in logs."""

import sys
from types import SimpleNamespace

import pytest

from tokamake.runtime import console
from tokamake.runtime.console import progress


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
