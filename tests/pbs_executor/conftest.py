"""Fixtures of the tests of the tracker and its parts."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pbs_servers import Pbs, stand_in
from tests.support.pbs_simulated import SimulatedServer


@pytest.fixture
def server() -> SimulatedServer:
    return SimulatedServer(random.Random(1))


@pytest.fixture
def pbs(tmp_path: Path) -> Iterator[Pbs]:
    """Stand-in for a PBS server, which runs jobs."""
    server = stand_in(tmp_path / "server")
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: no machine crashes in these tests, and 10,000 calls take minutes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
