"""Tables of Unicode that the installed package `tokenizers` gives, kept in files of the cache.

To ask the package about 270,000 characters takes up to a third of a tokenizer's start. A table
belongs to one build of the package, and to the code that asks. If its file is damaged or cannot be
written, the package is asked again.
"""

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokamake.files import atomic
from tokamake.remote.addresses import cache_folder

Flags = NDArray[np.bool_]
_CODE = ("_patterns.py", "_normalization.py")
"""Modules that make tables."""


def kept(name: str, make: Callable[[], Flags]) -> Flags:
    """(n,) the table with a name: from its file, or from `make`, which writes the file."""
    if (folder := _folder()) is None:
        return make()
    path = folder / hashlib.sha256(name.encode()).hexdigest()
    with suppress(OSError, ValueError):
        return _table(path.read_bytes(), name)
    table = make()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path, durable=False) as (draft,):
            draft.write_bytes(_content(table, name))
    return table


def _content(table: Flags, name: str) -> bytes:
    """Digest, length and bits of a table."""
    body = len(table).to_bytes(8, "little") + np.packbits(table).tobytes()
    return hashlib.sha256(name.encode() + body).digest() + body


def _table(content: bytes, name: str) -> Flags:
    """Read `_content`; ValueError: it is damaged."""
    digest, body = content[:32], content[32:]
    if hashlib.sha256(name.encode() + body).digest() != digest:
        raise ValueError("damaged")
    length = int.from_bytes(body[:8], "little")
    bits = np.frombuffer(body, np.uint8, offset=8)
    return np.unpackbits(bits, count=length).astype(bool)


@cache
def _folder() -> Path | None:
    """Folder of the tables of this build of the package and of this code; None: there is no place.

    A user in a container may have no home.
    """
    import tokenizers

    try:
        build = Path(sys.modules["tokenizers.tokenizers"].__file__ or "").stat()
        own = [Path(__file__).with_name(name).read_bytes() for name in _CODE]
        cache_of_user = cache_folder()
    except (OSError, RuntimeError):
        return None
    facts = repr((build.st_size, build.st_mtime_ns, own))
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return cache_of_user / f"tokamake/unicode/tokenizers-{tokenizers.__version__}-{fingerprint}"
