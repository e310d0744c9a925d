"""Names of files that a server lists: strangers choose them, and they become paths here."""

import re
from collections.abc import Sequence

from tokamake.errors import UserError

_PART = re.compile(r"[A-Za-z0-9 ._=+@,:~#%()\x80-\U0010ffff-]+")
"""Characters of a name; those beyond ASCII must also be printable. Braces are wildcards to
Snakemake, and the other characters have a meaning in a shell or a pattern."""
_MAX_PART_BYTES, _MAX_BYTES = 140, 1000
"""Longest name of a file or folder, which leaves room for temporary names; longest path."""


def check_names(names: Sequence[str], address: str) -> None:
    """Refuse paths that leave their folder, have odd characters, are too long or also folders."""
    remedy = "rename it there, or download it by hand"
    if strange := next((name for name in names if not _is_plain(name)), None):
        raise UserError(
            f"{address}: file name {strange[:_MAX_BYTES]!a}: a name has letters, digits, "
            f"spaces and ._=+@,:~#%()- only, is not . or .., and has at most {_MAX_PART_BYTES} "
            f"bytes; {remedy}"
        )
    folders = {name[:place] for name in names for place, c in enumerate(name) if c == "/"}
    if both := next((name for name in names if name in folders), None):
        raise UserError(f"{address}: lists {both} as a file and as a folder; {remedy}")


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    return (
        path.isprintable()
        and len(path.encode()) <= _MAX_BYTES
        and all(map(_PART.fullmatch, parts))
        and not {".", ".."} & {*parts}
        and max(len(part.encode()) for part in parts) <= _MAX_PART_BYTES
    )


def shown(names: Sequence[str]) -> str:
    """The first names of a listing, for a message."""
    first = [name if _is_plain(name) else ascii(name) for name in names[:5]]
    return ", ".join(first) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
