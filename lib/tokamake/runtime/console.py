"""Console output: progress, counts with their nouns, short lists."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TypeVar

Item = TypeVar("Item")

_LOG_SECONDS = 30
"""Time between two lines of progress in a log."""


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 file, 2,000 files."""
    return f"{number:,} {noun}{'s'[: number != 1]}"


def shortened(names: Sequence[str]) -> str:
    """Join the first eight names, and count the rest."""
    rest = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + rest


def progress(
    items: Iterable[Item],
    *,
    label: str,
    total: int | None = None,
    unit: str = "items",
    size: Callable[[Item], int] = lambda _: 1,
    num_bytes: Callable[[Item], int] | None = None,
) -> Iterator[Item]:
    """Yield the items and show progress: a bar on a terminal, a line every 30 s in a log.

    Args:
        total: total size of all items; by default their number, if `items` has a length.
        num_bytes: function that returns the bytes of an item; log lines have rates then.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=label, total=total, unit=f" {unit}", leave=False) as bar:
            for item in items:
                yield item
                bar.update(size(item))
        return
    start = last = time.monotonic()
    done = bytes_done = 0
    for item in items:
        yield item
        done += size(item)
        bytes_done += num_bytes(item) if num_bytes else 0
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            share = f"/{total:,} ({done / total:.0%})" if total else ""
            seconds = last - start
            rate = f", {done / seconds:,.0f} {unit}/s, {bytes_done / seconds / 1e6:,.1f} MB/s"
            print(
                f"{label}: {done:,}{share} {unit}{rate if num_bytes else ''}",
                file=sys.stderr,
                flush=True,
            )
