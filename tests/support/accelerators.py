"""The accelerator of this host, for tests of the marker `gpu`: CUDA or XPU."""

from typing import Any, TypeVar

import pytest
import torch

from tokamake.runtime.device import accelerators
from tokamake.runtime.device_types import device_type

KINDS = [kind for kind, _ in accelerators()]
DEVICE = torch.device(KINDS[0] if KINDS else "cpu", 0)
"""The first accelerator; a CPU if there is none: then tests skip."""
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not KINDS, reason="needs an accelerator: pytest -m gpu"),
]
"""Marks of a test that runs on any accelerator."""
_Test = TypeVar("_Test")


def on_accelerator(test: _Test) -> _Test:
    """Mark a test that runs on any accelerator."""
    for mark in MARKS:
        test = mark(test)
    return test


def with_varlen(test: Any) -> Any:
    """Mark a test of flash attention of documents: torch has it for CUDA alone."""
    lacks = bool(KINDS) and not device_type(DEVICE).has_varlen(DEVICE)
    reason = f"torch has no flash attention of documents on {DEVICE.type}"
    return on_accelerator(pytest.mark.skipif(lacks, reason=reason)(test))
