"""Fixtures of the tests of the tracker and its parts."""

import os
import random

import pytest

from tests.support.pbs_simulated import SimulatedServer


@pytest.fixture
def server() -> SimulatedServer:
    return SimulatedServer(random.Random(1))


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: no machine crashes in these tests, and 10,000 calls take minutes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
