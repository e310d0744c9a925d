"""Readers of raw files, one file per format; each yields the texts of a file in order.

The format is told from a file's first bytes. A reader module has `accepts(head, path)` and
`read(path, text_key, byte_range)`.
"""

from collections.abc import Iterator
from pathlib import Path

from tokamake import plugins
from tokamake.errors import UserError

ByteRange = tuple[int, int | None]
"""First byte and one past the last of a plain file; None reads to its end."""


def read(path: Path, text_key: str, byte_range: ByteRange | None = None) -> Iterator[str]:
    """Yield the text of each document of a raw file.

    Args:
        path: a file of any known format, compressed or not.
        text_key: key or column that holds the text.
        byte_range: part of a plain jsonl file: the lines whose first byte lies in it.

    Raises:
        UserError: the file is missing, of no known format, or holds a bad document.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(16)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); fix the list of files"
        ) from None
    for name in plugins.names("data/readers"):
        reader = plugins.load("data/readers", name)
        if reader.accepts(head, path):
            yield from reader.read(path, text_key, byte_range)
            return
    known = ", ".join(plugins.names("data/readers"))
    raise UserError(f"{path}: of no known format ({known}); convert it to jsonl")
