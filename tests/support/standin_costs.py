"""What operators on the stand-in accelerator cost: waits of the host, kernels, copies, memory."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OF_COPIES = {"lift_fresh", "_pin_memory", "_to_copy", "copy_"}
"""Operators that bring an array to the device, or back."""
_NOT_CALLERS = ("/site-packages/", "/standin_")
"""Parts of the paths of files that call an operator for another one."""


@dataclass
class Costs:
    """What operators on the stand-in have cost since `counted` began."""

    waits: list[str] = field(default_factory=list)
    """Synchronizations: operator and line of each wait of the host for the device."""
    launches: Counter[str] = field(default_factory=Counter)
    """Kernels by operator."""
    copies: Counter[str] = field(default_factory=Counter)
    """Copies to the device, `pinned` and `unpinned`, and `back` to the host."""
    allocations: int = 0
    """Tensors of the stand-in that were allocated."""
    asked: set[str] = field(default_factory=set)
    """Entries of the table of device types that tokamake has asked."""
    of_host: list[str] = field(default_factory=list)
    """Operator and line of each computation on tensors of the host, other than scalars."""


class Totals:
    """Counts of this process."""

    live_bytes = 0
    counting: list[Costs] = []  # noqa: RUF012


def live_bytes() -> int:
    """Bytes of all tensors of the stand-in."""
    return Totals.live_bytes


def allocate(num_bytes: int) -> None:
    Totals.live_bytes += num_bytes
    for costs in Totals.counting:
        costs.allocations += 1


def free(num_bytes: int) -> None:
    Totals.live_bytes -= num_bytes


def copy(kind: str) -> None:
    for costs in Totals.counting:
        costs.copies[kind] += 1


def asked(name: str) -> None:
    for costs in Totals.counting:
        costs.asked.add(name)


@contextmanager
def counted() -> Iterator[Costs]:
    """Count what operators cost."""
    costs = Costs()
    Totals.counting.append(costs)
    try:
        with _OnHost(costs):
            yield costs
    finally:
        Totals.counting.remove(costs)


class _OnHost(TorchDispatchMode):
    """Sees the operators that make tensors of the host."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self._costs = costs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [result] if isinstance(result, Tensor) else tree_leaves(result)
        if any(isinstance(each, Tensor) and each.is_cpu and each.dim() for each in made):
            name = func._schema.name.rpartition("::")[2]
            if name not in _OF_COPIES and not func.is_view:
                self._costs.of_host.append(f"{name} at {_place()}")
        return result


def wait(name: str) -> None:
    for costs in Totals.counting:
        costs.waits.append(f"{name} at {_place()}")


def launch(name: str) -> None:
    for costs in Totals.counting:
        costs.launches[name] += 1


def _place() -> str:
    """The line that called an operator: the innermost one that is not a package's."""
    frame = innermost = sys._getframe(2)
    while frame.f_back and any(part in frame.f_code.co_filename for part in _NOT_CALLERS):
        frame = frame.f_back
    if any(part in frame.f_code.co_filename for part in _NOT_CALLERS):
        frame = innermost
    return f"{frame.f_code.co_filename.rpartition('/lib/')[2]}:{frame.f_lineno}"
