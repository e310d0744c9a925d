"""What this process takes of its machine: threads and memory."""

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

Item = TypeVar("Item")


def num_threads(sharers: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """Threads for each of the ranks that share the same cores; None: the user has chosen.

    torchrun itself sets OMP_NUM_THREADS=1, so that value is no choice under torchrun.
    """
    chosen = environment.get("OMP_NUM_THREADS")
    if chosen and not (chosen == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return None
    return max(1, len(os.sched_getaffinity(0)) // sharers)


def file_workers() -> int:
    """Threads that read and write files at once where nobody says how many: disks have enough."""
    return min(4, len(os.sched_getaffinity(0)))


def ahead(items: Iterator[Item], *, depth: int = 1) -> Iterator[Item]:
    """The same items, made in a thread, at most `depth` of them before the caller asks for them."""
    done = object()
    with ThreadPoolExecutor(1) as pool:
        coming = deque(pool.submit(next, items, done) for _ in range(depth))
        while (item := coming.popleft().result()) is not done:
            coming.append(pool.submit(next, items, done))
            yield cast("Item", item)


def keep_memory() -> None:
    """Let glibc keep memory that is freed, for the next step needs it again.

    It would else give large tensors back to the kernel, which has to clear their pages each time:
    on a CPU that takes up to a tenth of a training step. Other C libraries are left as they are.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD of malloc.h.
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):
            library.mallopt(option, value)
