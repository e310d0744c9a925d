"""Addresses of files, hf:// and https://, and the names that files get on this machine.

hf://datasets/ORG/NAME@REVISION/PATH is a dataset of the Hugging Face Hub, hf://ORG/NAME a model.
Strangers choose the names of listed files, and the names become paths here.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from tokamake.errors import UserError

FOLDER = "results/raw"
"""Folder of the links to downloaded files, in the working directory."""
_PART = re.compile(r"[A-Za-z0-9 ._=+@,:~#%()\x80-\U0010ffff-]+")
"""Characters of a name; characters beyond ASCII must also be printable. Braces are wildcards to
Snakemake, and the other characters have a meaning in a shell or a pattern."""
_MAX_PART_BYTES, _MAX_BYTES = 140, 1000
"""Longest name of a file or folder, which leaves room for temporary names; longest path."""
COMMIT_DIGITS = 12
"""Digits of a commit in the names of folders."""
FORM = (
    "write hf://datasets/ORG/NAME@REVISION/PATH or hf://datasets/ORG/NAME?config=NAME&split=NAME, "
    "or hf://ORG/NAME for a model"
)
"""Remedy for an address of another form."""


class RemoteFile(NamedTuple):
    """A file at an address, in its listed version."""

    url: str
    """hf://datasets/ORG/NAME@COMMIT/PATH, or an https address."""
    path: str
    """Path of the link to it, relative to the working directory."""
    size: int
    """Bytes."""
    version: str
    """sha256:HEX or git:HEX (the hash of git's blob) from the Hub, etag:TEXT or modified:TEXT from
    a web server, or empty if that states none."""


class HubAddress(NamedTuple):
    """Parts of an address."""

    kind: str
    """dataset or model."""
    repository: str
    """ORG/NAME."""
    revision: str
    """Branch, tag or commit."""
    path: str
    """File, folder or pattern; empty: the whole repository, or the files that the card names."""
    config: str = ""
    """Configuration of a dataset; empty: its default."""
    split: str = ""
    """Split of a dataset; empty: train."""

    @property
    def folder(self) -> str:
        """Folder of links to the files, without the commit."""
        return f"{FOLDER}/hub/{self.kind}s/{self.repository}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, and no branch or tag."""
        return bool(re.fullmatch("[0-9a-f]{40}", self.revision))

    @property
    def fetched(self) -> Path:
        """Path of the files that `tokamake fetch` has fetched for the address."""
        name = self.revision[:COMMIT_DIGITS] if self.is_commit else quote(self.revision, safe="")
        return Path(self.folder, name, self.path)

    @property
    def text(self) -> str:
        return self.at(quote(self.revision, safe=""), self.path).rstrip("/")

    def at(self, commit: str, path: str) -> str:
        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"hf://{prefix}{self.repository}@{commit}/{quote(path, safe='/ ')}"


def is_remote(text: str) -> bool:
    return text.startswith(("hf://", "https://", "http://"))


def cache_folder() -> Path:
    """Folder of the cache that all workspaces share: HF_HOME, as for all tools of the Hub."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.environ.get("HF_HOME", default)).expanduser()


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_online(address: str, need: str) -> None:
    """Raise an error if HF_HUB_OFFLINE forbids a `need`, such as "list its files"."""
    if is_offline():
        raise UserError(
            f"{address}: HF_HUB_OFFLINE is set, so nothing can {need}; run this once on a node "
            "with a network, without HF_HUB_OFFLINE"
        )


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
    first = [name if _is_plain(name) else ascii(name) for name in names[:5]]
    return ", ".join(first) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def parse_address(address: str) -> HubAddress:
    """Parse an address."""
    text, _, query = address.removeprefix("hf://").partition("?")
    kind = "dataset" if text.startswith("datasets/") else "model"
    match = re.fullmatch(
        r"([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?", text.removeprefix("datasets/")
    )
    options = dict(parse_qsl(query))
    if not match or text.startswith(("spaces/", "models/")) or options.keys() - {"config", "split"}:
        raise UserError(f"{address}: {FORM}")
    repository, revision, path = match.groups(default="")
    parts = unquote(f"{repository}/{revision}/{path}").split("/")
    if not address.isprintable() or "\\" in address or {".", ".."} & {*parts}:
        raise UserError(f"{address!a}: has . or .. for a name, or a character of no name; {FORM}")
    if options and (path or kind == "model"):
        raise UserError(f"{address}: config and split are of a dataset without a path; {FORM}")
    return HubAddress(
        kind, repository, unquote(revision) or "main", unquote(path.strip("/")), **options
    )
