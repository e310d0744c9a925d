"""Ranks that are slower than other ranks, by host.

Ranks wait for each other in each step, so that all of them take the time of the slowest. Two
times of a rank alone tell which one is slow: the wait for its samples in a step, and the time of
its device for a small matrix product, right after a step and without communication.

`tokamake status` imports this module, so functions import torch.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake import files
from tokamake.errors import UserError
from tokamake.runtime.device import synchronize
from tokamake.train.hooks import FinishedStep, Hook, Training

if TYPE_CHECKING:
    import torch

FILE = "ranks.json"
"""File in the output folder of a run: times of all ranks, and which are slow."""
_LOOK_SECONDS = 30.0
"""Time between two matrix products, and between two writes of the file."""
_PRODUCTS = 3
"""The fastest one counts."""
_SIZE = 2048
"""Rows of the matrices of a product on an accelerator."""
_SLOW_PRODUCT = 1.5
"""A device is slow if it takes this many times the median."""
_SLOW_READING = 0.1
"""Reading is slow if a rank waits this share of a step longer than the median."""


class RankTimes(NamedTuple):
    """Times of a rank that do not depend on other ranks, in seconds."""

    reading: float
    """Waiting for samples, mean of the last steps."""
    product: float
    """The fastest of some matrix products."""


class Stragglers(Hook):
    """Times of all ranks; all ranks call its methods together."""

    def __init__(
        self, output: Path, hosts: Sequence[str], *, rank: int, device: "torch.device"
    ) -> None:
        self._path, self._hosts, self._rank, self._device = output / FILE, hosts, rank, device
        self._product, self._measured_at, self._written_at = 0.0, -_LOOK_SECONDS, -_LOOK_SECONDS
        self._steps, self._reading, self._seconds = 0, 0.0, 0.0
        self._times: torch.Tensor | None = None
        self._suspects: set[int] = set()
        self._named: set[int] = set()

    def end_step(self, finished: FinishedStep) -> None:
        """Compare the ranks, and name the slow ones, where a record has a finite loss."""
        if finished.seconds:
            self._steps += 1
            self._reading += finished.reading
            self._seconds += finished.seconds
        if not finished.is_logged or not math.isfinite(finished.result.loss):
            return
        reading, seconds = self._reading / self._steps, self._seconds / self._steps
        for line in self.look(finished.state.step, reading=reading, step_seconds=seconds):
            print(line, flush=True)
        self._steps, self._reading, self._seconds = 0, 0.0, 0.0

    def look(self, step: int, *, reading: float, step_seconds: float) -> list[str]:
        """Compare the ranks by their times at the last look.

        A rank is named once it was slow two times in a row, and again once it was fast between.

        Args:
            reading: mean time of a step in which this rank waited for samples.

        Returns:
            A line for each rank that has become slow; only rank 0 has lines.
        """
        now = time.monotonic()
        if now - self._measured_at >= _LOOK_SECONDS:
            self._product, self._measured_at = product_seconds(self._device), now
        times = self._exchange(RankTimes(reading, self._product))
        if self._rank or not times:
            return []
        reasons = slow_ranks(times, step_seconds)
        slow = self._suspects & reasons.keys()
        new = sorted(slow - self._named)
        self._suspects, self._named = {*reasons}, slow
        if new or now - self._written_at >= _LOOK_SECONDS:
            self._write(step, times, slow={rank: reasons[rank] for rank in sorted(slow)})
            self._written_at = now
        return [f"rank {rank} on {self._hosts[rank]} is slow: {reasons[rank]}" for rank in new]

    def _exchange(self, own: RankTimes) -> list[RankTimes]:
        """Gather the times of all ranks; return those of the call before. The first returns none.

        To read the times of this call, the host would have to wait for the device. The copy of the
        last ones has ended: each step waits for its loss.
        """
        import numpy as np
        import torch
        import torch.distributed as dist

        from tokamake.train.batch import to_device

        last = [] if self._times is None else [RankTimes(*row) for row in self._times.tolist()]
        of_ranks = torch.zeros((len(self._hosts), 2), device=self._device)
        dist.all_gather([*of_ranks], to_device(np.array(own, np.float32), self._device))
        if self._times is None:
            times = torch.zeros(of_ranks.shape)
            self._times = times if self._device.type == "cpu" else times.pin_memory()
        self._times.copy_(of_ranks, non_blocking=True)
        return last

    def _write(self, step: int, times: list[RankTimes], *, slow: dict[int, str]) -> None:
        rows: list[dict[str, Any]] = [
            {"rank": rank, "host": host, **own._asdict()}
            for rank, (host, own) in enumerate(zip(self._hosts, times, strict=True))
        ]
        named = [
            {"rank": rank, "host": self._hosts[rank], "reason": text} for rank, text in slow.items()
        ]
        try:
            files.write_json(self._path, {"step": step, "slow": named, "ranks": rows})
        except OSError as error:  # training is worth more than the file
            print(f"{self._path}: not written: {error.strerror}", flush=True)


def open_hook(training: Training) -> Stragglers:
    output, rank = training.run.output, training.ranks.rank
    return Stragglers(output, training.hosts, rank=rank, device=training.device)


def read_slow(output: Path) -> list[str]:
    """Ranks that were slow when rank 0 last looked, with host and reason."""
    try:
        named = files.read_json(output / FILE, "")["slow"]
        return [f"rank {row['rank']} on {row['host']}: {row['reason']}" for row in named]
    except (OSError, UserError, KeyError, TypeError):  # none yet, or damaged
        return []


def slow_ranks(times: Sequence[RankTimes], step_seconds: float) -> dict[int, str]:
    """Ranks that are slower than the median, with the reason."""
    reading, product = (median_low(values) for values in zip(*times, strict=True))
    reasons = {}
    for rank, own in enumerate(times):
        if own.reading > reading + _SLOW_READING * step_seconds:
            reasons[rank] = (
                f"waits {own.reading:.3f} s a step for samples, other ranks {reading:.3f} s "
                f"of {step_seconds:.3f} s"
            )
        elif own.product > _SLOW_PRODUCT * product:
            factor = own.product / product
            reasons[rank] = f"its device takes {factor:.1f} times as long as other ranks"
    return reasons


def product_seconds(device: "torch.device") -> float:
    """Seconds of a small matrix product on a device."""
    import torch

    size, dtype = (256, torch.float32) if device.type == "cpu" else (_SIZE, torch.bfloat16)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(_PRODUCTS):
        synchronize(device)
        begin = time.perf_counter()
        torch.mm(matrix, matrix)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
