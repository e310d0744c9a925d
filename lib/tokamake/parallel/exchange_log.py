"""Log of the bits that a rank computes, and of the bits that it receives from other ranks.

An error of one rank reaches the others through collectives. The order of this log shows where it
began: in a second pass, a faulty rank computes other bits although it has received the same ones;
its peers first receive other bits. So each exchange within a pass notes what a rank sends before,
and what it receives after.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

_WORDS = 2**22
"""64-bit words that are hashed at once: the hash needs a few times their memory."""


class BitOrigin(Enum):
    """Whether this rank has computed the bits of an entry, or received them."""

    COMPUTED = "computed"
    RECEIVED = "received"


class ExchangeLog:
    """The log of a rank; it notes something only while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.has_gathers = True
        """Whether weights that ranks gather are noted."""
        self._entries: list[tuple[BitOrigin, Tensor]] = []
        self._hooks: list[Any] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note exchanges; at the end, forget entries that nobody has taken: passes may fail."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            self._remove_hooks()
            self._entries.clear()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def computed(self, *tensors: Tensor) -> None:
        """Note tensors that this rank has computed from what it has received so far."""
        self._note(BitOrigin.COMPUTED, tensors)

    def received(self, *tensors: Tensor) -> None:
        """Note tensors that other ranks have sent, or computed together with this one."""
        self._note(BitOrigin.RECEIVED, tensors)

    def gradient_computed(self, tensor: Tensor) -> None:
        """Note the gradient of a tensor, which this rank will compute, until the next `take`."""
        # A pipeline receives into the same tensors again, so hooks must not stay.
        self._hooks.append(tensor.register_hook(self.computed))

    def gradient_received(self, tensor: Tensor) -> None:
        """Note the gradient of a tensor, which another rank will send, until the next `take`."""
        self._hooks.append(tensor.register_hook(self.received))

    def _note(self, kind: BitOrigin, tensors: tuple[Tensor, ...]) -> None:
        if self.is_on:
            self._entries += [(kind, hash_of_bits(each)) for each in tensors]

    def take(self) -> list[tuple[BitOrigin, int]]:
        """Kind and hash of each entry since the last call, in the order of time."""
        self._remove_hooks()
        entries, self._entries = self._entries, []
        hashes = torch.stack([each for _, each in entries]).tolist() if entries else []
        return [(kind, value) for (kind, _), value in zip(entries, hashes, strict=True)]


def first_difference(
    first: list[tuple[BitOrigin, int]], second: list[tuple[BitOrigin, int]]
) -> BitOrigin | None:
    """Kind of the first entry that differs between two logs; None: they are equal."""
    for entry, other in zip_longest(first, second):
        if entry != other:
            kind: BitOrigin = (other or entry)[0]
            return kind
    return None


@torch.no_grad()
def hash_of_bits(tensor: Tensor) -> Tensor:
    """Hash of the bytes of a tensor and their order, an int64 scalar on its device."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = torch.cat((flat, flat.new_zeros(-flat.numel() % 8)))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, words in enumerate(flat.view(torch.int64).split(_WORDS)):
        start = number * _WORDS
        places = torch.arange(start, start + len(words), device=tensor.device)
        # Each word is mixed with its place, as by SplitMix64. So changes of several words do not
        # cancel each other out in the sum, and a change of one word always changes it.
        mixed = words + places * -0x61C8864680B583EB
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            mixed ^= (mixed >> shift) & (2 ** (64 - shift) - 1)
            mixed *= factor
        total += mixed.sum()
    return total
