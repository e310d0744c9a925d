"""Folders that the workers of pytest-xdist share: the first one that asks makes them."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of this run of pytest; the first caller makes it, and the others wait."""
    temporary = factory.getbasetemp()
    folder = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.with_suffix(".done")
        # Not renamed when it is done: some of the files name the folder.
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
