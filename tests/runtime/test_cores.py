"""Threads of a rank."""

import os

import pytest

from tokamake.runtime.cores import num_threads


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert num_threads(4, {}) == 3
    assert num_threads(4, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) == 3
    assert num_threads(4, {"OMP_NUM_THREADS": "1"}) is None
    assert num_threads(4, {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}) is None
    assert num_threads(64, {}) == 1
