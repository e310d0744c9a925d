"""What people read while work goes on: numbers with their nouns, progress."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

Item = TypeVar("Item")


def counted(number: int, noun: str) -> str:
    """A number with what it counts, for people: 1 file, 2,000 files."""
    return f"{number:,} {noun}{'s'[: number != 1]}"


def progress(
    items: Iterable[Item],
    *,
    label: str,
    total: int | None = None,
    unit: str = "items",
    size: Callable[[Item], int] = lambda _: 1,
) -> Iterator[Item]:
    """Pass items through and show how far they are: a bar on a terminal, in a log a line each 30 s.

    Args:
        items: what to go through.
        label: what is being done.
        total: number of items; taken from `items` where it knows.
        unit: what is counted.
        size: how many of it an item is.
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
    last, number = time.monotonic(), 0
    for item in items:
        yield item
        number += size(item)
        if time.monotonic() - last >= 30:
            last = time.monotonic()
            share = f"/{total:,} ({number / total:.0%})" if total else ""
            print(f"{label}: {number:,}{share} {unit}", file=sys.stderr, flush=True)
