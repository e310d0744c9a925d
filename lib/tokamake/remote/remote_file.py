"""A file at an address: its entry in a plan, and the place of its download."""

import os
from pathlib import Path
from typing import NamedTuple

from tokamake.errors import UserError

FOLDER = "results/raw"
"""Folder of the links to downloaded files, in the working directory."""


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


def cache_folder() -> Path:
    """Folder of the cache that all workspaces share: HF_HOME, as for all tools of the Hub."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.environ.get("HF_HOME", default)).expanduser()


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_online(address: str, need: str) -> None:
    """Raise an error if HF_HUB_OFFLINE forbids a `need`, such as "list its files"."""
    if is_offline():
        raise UserError(
            f"{address}: HF_HUB_OFFLINE is set, so nothing can {need}; run this once on a node "
            "with a network, without HF_HUB_OFFLINE"
        )
