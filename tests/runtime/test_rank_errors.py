"""Errors across ranks: raised on all, reported once."""

import errno
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tokamake.errors import TemporaryError, UserError
from tokamake.runtime import rank_errors
from tokamake.runtime.process_group import process_group
from tokamake.runtime.rank_errors import (
    raise_on_all_ranks,
    report_from_any_rank,
    report_from_rank_0,
)
from tokamake.runtime.ranks import Ranks


def test_only_rank_0_reports_a_common_error(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(rank_errors, "time", SimpleNamespace(sleep=waited.append))
    with pytest.raises(UserError, match=r"^broken$"), report_from_rank_0(Ranks(0, 2, 0, 2)):
        raise UserError("broken")
    assert not waited
    with pytest.raises(SystemExit) as caught, report_from_rank_0(Ranks(1, 2, 1, 2)):
        raise UserError("broken")
    assert caught.value.code == 2
    assert waited


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    ranks = Ranks(0, 1, 0, 1)
    with process_group(ranks):
        with pytest.raises(UserError, match=r"^broken$") as caught, raise_on_all_ranks():
            raise UserError("broken")
        assert type(caught.value) is UserError
        message = "^file: No space left on device; fix it and rerun$"
        with pytest.raises(TemporaryError, match=message), raise_on_all_ranks():
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        with pytest.raises(UserError, match=r"^TimeoutError; fix it"), raise_on_all_ranks():
            raise TimeoutError
        with raise_on_all_ranks():
            pass


def damaged() -> Iterator[int]:
    yield 1
    raise UserError("a.bin: damaged")


def test_an_error_on_one_rank_only_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        items = report_from_any_rank(damaged(), Ranks(rank, 2, rank, 2))
        assert next(items) == 1
        with pytest.raises(UserError):
            next(items)
    assert capsys.readouterr().err == "tokamake: rank 1: a.bin: damaged\n"
