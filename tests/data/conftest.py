"""Datasets without fsync."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: no power cut is awaited."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
