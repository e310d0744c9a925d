"""The only place that touches private names of torchao. Checked with torchao 0.18.

tests/optim/test_torchao_internals.py has a test for each function, so that a version of torchao
that changes one of its names fails there. torchao itself is not imported here.
"""

from typing import Any

import torch


def new_buffer(optimizer: Any, parameter: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the empty buffer in which an optimizer with 8-bit states keeps a moment."""
    buffer: torch.Tensor = optimizer._new_buffer(parameter, signed=signed)
    return buffer
