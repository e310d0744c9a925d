"""Cores and memory of the machine that this process may use."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

Item = TypeVar("Item")

_MALLOC_OPTIONS = {
    "trim_threshold": -1,
    "top_pad": -2,
    "mmap_threshold": -3,
    "mmap_max": -4,
    "arena_max": -8,
}
"""Options of `mallopt`: their numbers in glibc's malloc.h."""


def num_threads(num_sharers: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """Threads per rank if `num_sharers` ranks share the cores; None: OMP_NUM_THREADS is set."""
    value = environment.get("OMP_NUM_THREADS")
    # torchrun itself sets OMP_NUM_THREADS=1, so this is not the user's choice.
    if value and not (value == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return None
    return max(1, len(os.sched_getaffinity(0)) // num_sharers)


def file_workers() -> int:
    """Default number of threads that read and write files; more do not make disks faster."""
    return min(4, len(os.sched_getaffinity(0)))


def prefetched(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items; a thread computes the next item in advance."""
    end = object()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, items, end)
        while (item := pending.result()) is not end:
            pending = pool.submit(next, items, end)
            yield cast("Item", item)


def set_malloc_options(**values: int) -> None:
    """Set options of glibc's malloc, by the names in `_MALLOC_OPTIONS`.

    Does nothing with other C libraries, whose options have other numbers.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for name, value in values.items():
            library.mallopt(_MALLOC_OPTIONS[name], value)


def keep_freed_memory() -> None:
    """Let malloc keep freed memory, because the next training step needs it again.

    By default glibc returns large tensors to the kernel, which clears their pages each time they
    are allocated. On a CPU that takes up to a tenth of a training step.
    """
    set_malloc_options(mmap_max=0, trim_threshold=2**31 - 1, top_pad=2**26)
