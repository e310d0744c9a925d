"""Console output: progress, counts with their nouns, short lists."""

import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from shutil import get_terminal_size
from typing import TypeVar

Item = TypeVar("Item")

_GAP = re.compile("  +")
_LOG_SECONDS = 30
"""Time between two lines of progress in a log."""


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 file, 2,000 files."""
    return f"{number:,} {noun}{'s'[: number != 1]}"


def shortened(names: Sequence[str]) -> str:
    """Join the first eight names, and count the rest."""
    rest = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + rest


def folded(text: str, width: int) -> str:
    """Break a line of a terminal at spaces. It continues below its last column."""
    gaps = [gap.end() for gap in _GAP.finditer(text[: width // 2])]
    indent = gaps[-1] if gaps else 4
    return textwrap.fill(
        text,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to standard output; a terminal gets them folded."""
    width = get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines:
        print(folded(line, width) if width and len(line) > width else line)


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
