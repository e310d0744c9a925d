"""Bytes that ranks put on the wire, counted at torch's collectives.

A collective of n ranks sends as a ring does: an all-reduce of b bytes sends 2 (n - 1) / n b from
each rank; an all-gather or a reduce-scatter of b bytes in all, (n - 1) / n b. An all-to-all sends
all that is for other ranks.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

_RING = {
    "allreduce_": (2, 0),
    "allreduce_coalesced_": (2, 0),
    "_allgather_base_": (1, 0),
    "allgather_into_tensor_coalesced_": (1, 0),
    "allgather_": (1, 0),
    "_reduce_scatter_base_": (1, 1),
    "reduce_scatter_tensor_coalesced_": (1, 1),
    "reduce_scatter_": (1, 1),
    "broadcast_": (1, 0),
    "reduce_": (1, 0),
}
"""By name of the operation: times that each byte is sent, and the argument that holds them all."""
_UNCOUNTED = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_"}


class WireBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends, by operation, while it is active.

    Attributes:
        sent: bytes by name of the operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _UNCOUNTED:
            return
        if name == "send":
            self.sent[name] += _size(args[0])
            return
        if name == "alltoall_base_":
            self.sent[name] += _to_others(*args[1:5])
            return
        times, argument = _RING[name]  # a KeyError is an operation that is not counted yet
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        n = ProcessGroup.unbox(group).size()
        self.sent[name] += round(times * (n - 1) / n * _size(args[argument]))


def _to_others(sent: Tensor, group: Any, _: list[int], splits: list[int]) -> int:
    """Bytes of an all-to-all that are not for this rank itself; no splits are equal ones."""
    group = ProcessGroup.unbox(group)
    own = splits[group.rank()] * sent[:1].nbytes if splits else sent.nbytes // group.size()
    return sent.nbytes - own


def _size(value: Any) -> int:
    """Bytes of a tensor, or of nested lists of them."""
    return value.nbytes if isinstance(value, Tensor) else sum(map(_size, value))
