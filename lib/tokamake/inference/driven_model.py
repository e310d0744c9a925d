"""A model on all ranks that the first rank drives; the other ranks replay its calls.

Generation and servers choose the next pass by the tokens before it, so only one rank decides. It
sends each call to the other ranks in one message of integers (two, if it is long). During other
work, such as reading the data of a task, its thread tells the other ranks to keep waiting: without
a message, they would end with a timeout.
Shape suffixes: B rows of a pass, L tokens of a row, N predicted tokens, V vocabulary.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.inference.model import InferenceModel

_WAIT_SECONDS = 60.0
"""Time between messages that tell the other ranks to keep waiting."""
_MESSAGE = 64
"""Integers of a message; the rest of a longer one follows in another."""


class ModelCall(IntEnum):
    """Numbers of calls in messages."""

    END = 0
    NEW_CACHE = 1
    EXTEND = 2
    MOVE = 3
    CLEAR = 4
    REORDER = 5
    SCORE = 6
    WAIT = 7


class Scores(NamedTuple):
    """Scores of tokens, given the tokens before them."""

    log_probabilities: Tensor
    """(N,) fp32 on the CPU."""
    are_greedy: Tensor
    """(N,) bool on the CPU: whether each token is the most likely one."""


class DrivenModel:
    """The model as the first rank sees it."""

    def __init__(self, model: InferenceModel, world_size: int) -> None:
        self._model, self.world_size = model, world_size
        self.architecture, self.device = model.architecture, model.device
        self._cache = model.new_cache(1, 1)
        self._lock = threading.Lock()

    @contextmanager
    def driven(self) -> Iterator[bool]:
        """Context in which the first rank, which gets True, calls the methods below.

        The other ranks follow until its end, and get False.
        """
        if not self._model.is_first:
            self._follow()
            yield False
            return
        if self.world_size == 1:
            yield True
            return
        is_over = threading.Event()
        thread = threading.Thread(target=self._keep_waiting, args=(is_over,), daemon=True)
        thread.start()
        try:
            yield True
        finally:
            is_over.set()
            thread.join()
            self._send(ModelCall.END)

    def _keep_waiting(self, is_over: threading.Event) -> None:
        """Tell the other ranks to keep waiting, between calls, until an event."""
        while not is_over.wait(_WAIT_SECONDS):
            with suppress(RuntimeError):  # if a rank has failed, the next call says so
                self._call(ModelCall.WAIT)

    def _call(self, call: ModelCall, *numbers: int) -> Any:
        """Do a call on all ranks, while no other one runs."""
        with self._lock:
            self._send(call, *numbers)
            return self._do(call, numbers)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._model.num_bytes

    # ---- Calls of the first rank ----

    def new_cache(self, num_rows: int, capacity: int) -> None:
        """Replace the cache by an empty one; see `KeyValueCache` for the arguments."""
        self._call(ModelCall.NEW_CACHE, num_rows, capacity)

    def extend(
        self,
        rows: Sequence[Sequence[int]],
        *,
        first: int = 0,
        predicting: Sequence[range] | None = None,
    ) -> Tensor:
        """Extend consecutive rows of the cache; return logits (N, V) in fp32 on the device.

        `predicting`: tokens of each row whose successors are predicted; None: the last ones.
        """
        if predicting is None:
            predicting = [range(len(row) - 1, len(row)) for row in rows]
        logits: Tensor = self._call(ModelCall.EXTEND, first, *_packed(rows, predicting))
        return logits

    def move(self, source: int, target: int) -> None:
        self._call(ModelCall.MOVE, source, target)

    def clear(self, row: int) -> None:
        self._call(ModelCall.CLEAR, row)

    def reorder(self, sources: Sequence[int]) -> None:
        """Let row i of the cache continue the sequence of row `sources[i]`."""
        self._call(ModelCall.REORDER, *sources)

    def score(self, rows: Sequence[Sequence[int]], predicting: Sequence[range]) -> Scores:
        """Score the successors of tokens of sequences; data-parallel ranks share the sequences."""
        scores: Scores = self._call(ModelCall.SCORE, *_packed(rows, predicting))
        return scores

    # ---- All ranks ----

    def _send(self, *numbers: int) -> None:
        if self.world_size == 1:
            return
        message = torch.zeros(_MESSAGE, dtype=torch.int64)
        message[0] = len(numbers)
        head = torch.tensor(numbers[: _MESSAGE - 1], dtype=torch.int64)
        message[1 : 1 + len(head)] = head
        dist.broadcast(message.to(self.device), src=0)
        if rest := numbers[_MESSAGE - 1 :]:
            dist.broadcast(torch.tensor(rest, dtype=torch.int64, device=self.device), src=0)

    def _received(self) -> list[int]:
        message = torch.zeros(_MESSAGE, dtype=torch.int64, device=self.device)
        dist.broadcast(message, src=0)
        length, *numbers = message.tolist()
        if (missing := length - len(numbers)) > 0:
            rest = torch.zeros(missing, dtype=torch.int64, device=self.device)
            dist.broadcast(rest, src=0)
            return [*numbers, *rest.tolist()]
        return numbers[:length]

    def _follow(self) -> None:
        """Replay the first rank's calls, until its context ends."""
        while True:
            call, *numbers = self._received()
            if call == ModelCall.END:
                return
            self._do(call, numbers)

    def _do(self, call: int, numbers: Sequence[int]) -> Any:
        match call:
            case ModelCall.NEW_CACHE:
                self._cache = self._model.new_cache(*numbers)
            case ModelCall.EXTEND:
                rows, predicting = _unpacked(numbers[1:])
                return self._extend(numbers[0], rows, predicting=predicting)
            case ModelCall.MOVE:
                self._cache.move(*numbers)
            case ModelCall.CLEAR:
                self._cache.clear(*numbers)
            case ModelCall.REORDER:
                self._cache.reorder(numbers)
            case ModelCall.SCORE:
                return self._score(*_unpacked(numbers))
        return None

    @property
    def _has_work(self) -> bool:
        """Whether this rank computes passes that are not shared by data-parallel ranks."""
        return self._model.mesh.data.rank == 0 or self._model.is_sharded

    def _extend(
        self, first: int, rows: Sequence[Sequence[int]], *, predicting: Sequence[range]
    ) -> Tensor | None:
        if not self._has_work:
            return None
        tokens = _padded(rows, self.device)
        counts = [len(row) for row in rows]
        self._cache.begin(
            counts, tokens.shape[1], first=first, device=self.device, predicting=predicting
        )
        logits = self._model.predict(tokens, self._cache)
        shape = sum(map(len, predicting)), self.architecture.vocab_size or 0
        return self._model.at_first(logits, shape)

    def _score(self, rows: Sequence[Sequence[int]], predicting: Sequence[range]) -> Scores | None:
        axis = self._model.mesh.data
        # All ranks get as many rows, because FSDP gathers weights together; the last ones repeat.
        share = -(-len(rows) // axis.size)
        numbers = [min(axis.rank * share + place, len(rows) - 1) for place in range(share)]
        own, places = [rows[n] for n in numbers], [predicting[n] for n in numbers]
        total = sum(map(len, places))
        tokens = _padded([row[:-1] for row in own], self.device)
        cache = self._model.new_cache(share, tokens.shape[1], is_kept=False)
        counts = [len(row) - 1 for row in own]
        cache.begin(counts, tokens.shape[1], device=self.device, predicting=places)
        logits = self._model.predict(tokens, cache)
        values = None
        if logits is not None:
            pairs = zip(own, places, strict=True)
            targets = [row[place + 1] for row, kept in pairs for place in kept]
            values = _values(logits, torch.tensor(targets, device=self.device))
        values = self._model.at_first(values, (total, 2))
        return self._gathered(values, numbers, sizes=[len(kept) for kept in predicting])

    def _gathered(
        self, values: Tensor | None, numbers: Sequence[int], *, sizes: Sequence[int]
    ) -> Scores | None:
        """Join the scores of data-parallel ranks, without scores of repeated rows."""
        axis = self._model.mesh.data
        if values is not None and axis.size > 1:
            share, longest = len(numbers), max(sizes)
            padded = values.new_zeros(share, longest, 2)
            own = [sizes[number] for number in numbers]
            for row, part in enumerate(values.split(own)):
                padded[row, : len(part)] = part
            parts = [torch.empty_like(padded) for _ in range(axis.size)]
            dist.all_gather(parts, padded, group=axis.group)
            joined = torch.cat(parts)
            values = torch.cat([joined[row, :size] for row, size in enumerate(sizes)])
        if values is None or not self._model.is_first:
            return None
        values = values.cpu()
        return Scores(values[:, 0], values[:, 1] > 0)


def _values(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """(N, 2): log-probability of each target, and 1 if it is the most likely token, else 0."""
    log_probabilities = logits_NV.log_softmax(-1)
    chosen = log_probabilities.gather(-1, targets_N[:, None])[:, 0]
    return torch.stack((chosen, (log_probabilities.argmax(-1) == targets_N).float()), 1)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(B, L) tokens; shorter rows end with token 0."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


def _packed(rows: Sequence[Sequence[int]], ranges: Sequence[range]) -> list[int]:
    """Rows and a range of each as integers."""
    sizes = [n for row, kept in zip(rows, ranges, strict=True)
             for n in (len(row), kept.start, kept.stop)]  # fmt: skip
    return [len(rows), *sizes, *(token for row in rows for token in row)]


def _unpacked(numbers: Sequence[int]) -> tuple[list[list[int]], list[range]]:
    count = numbers[0]
    sizes = [numbers[1 + 3 * row : 4 + 3 * row] for row in range(count)]
    rows, begin = [], 1 + 3 * count
    for length, _, _ in sizes:
        rows.append([*numbers[begin : begin + length]])
        begin += length
    return rows, [range(start, stop) for _, start, stop in sizes]
