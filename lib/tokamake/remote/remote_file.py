"""A file at an address: what a plan keeps of it, and where its download goes."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from tokamake.errors import UserError

FOLDER = "results/raw"
"""Folder of the links to downloaded files, in the working directory."""
_PART = re.compile(r"[A-Za-z0-9 ._=+@,:~#%()\x80-\U0010ffff-]+")
"""Characters of a listed file or folder; those beyond ASCII must also be printable. Braces are
wildcards to Snakemake, and the others have a meaning in a shell or a pattern."""
_MAX_PART_BYTES, _MAX_BYTES = 140, 1000
"""Longest name of a file or folder, which leaves room for temporary names; longest path."""


class RemoteFile(NamedTuple):
    """A file at an address, as it was when it was listed."""

    url: str
    """hf://datasets/ORG/NAME@COMMIT/PATH, or an https address."""
    path: str
    """Path of the link to it, relative to the working directory."""
    size: int
    """Bytes."""
    version: str
    """sha256:HEX or git:HEX (the hash of git's blob) from the Hub, etag:TEXT or modified:TEXT from
    a web server, or empty if that states none."""


def is_remote(text: str) -> bool:
    """Whether a text is an address and no path."""
    return text.startswith(("hf://", "https://", "http://"))


def is_plain(path: str) -> bool:
    """Whether a listed path has only known characters, stays in its folder, and is not too long."""
    return (
        path.isprintable()
        and len(path.encode()) <= _MAX_BYTES
        and all(
            _PART.fullmatch(part)
            and part not in (".", "..")
            and len(part.encode()) <= _MAX_PART_BYTES
            for part in path.split("/")
        )
    )


def check_names(names: Sequence[str], address: str) -> None:
    """Check the paths that a server lists, before they become paths of this machine.

    Raises:
        UserError: a path is not plain, is the folder of another one, or looks like another one.
    """
    remedy = "rename it there, or download it by hand"
    if strange := next((name for name in names if not is_plain(name)), None):
        raise UserError(
            f"{address}: file name {strange[:_MAX_BYTES]!a}: a name has letters, digits, spaces "
            f"and ._=+@,:~#%()- only, is not . or .., and has at most {_MAX_PART_BYTES} bytes; "
            f"{remedy}"
        )
    folders = {name[:place] for name in names for place, c in enumerate(name) if c == "/"}
    if both := next((name for name in names if name in folders), None):
        raise UserError(f"{address}: lists {both} as a file and as a folder; {remedy}")
    if len({normalize("NFC", name) for name in names}) < len(names):
        raise UserError(f"{address}: lists two names that differ in Unicode form only; {remedy}")


def shown(names: Sequence[str]) -> str:
    """The first names of a listing, for a message."""
    first = [name if is_plain(name) else ascii(name) for name in names[:5]]
    return ", ".join(first) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def cache_folder() -> Path:
    """Folder of the cache that all workspaces share: HF_HOME, as for all tools of the Hub."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.environ.get("HF_HOME", default)).expanduser()


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_online(address: str, need: str) -> None:
    """Check that the network may be used.

    Args:
        address: what is needed from it.
        need: what happens to it, such as "list its files".

    Raises:
        UserError: HF_HUB_OFFLINE is set.
    """
    if is_offline():
        raise UserError(
            f"{address}: HF_HUB_OFFLINE is set, so nothing can {need}; run this once on a node "
            "with a network, without HF_HUB_OFFLINE"
        )
