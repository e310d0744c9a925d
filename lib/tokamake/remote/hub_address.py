"""Addresses of the Hugging Face Hub: hf://datasets/ORG/NAME@REVISION/PATH, hf://ORG/NAME."""

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from tokamake.errors import UserError
from tokamake.remote.remote_file import FOLDER

COMMIT_DIGITS = 12
"""Digits of a commit in the names of folders."""
FORM = (
    "write hf://datasets/ORG/NAME@REVISION/PATH or hf://datasets/ORG/NAME?config=NAME&split=NAME, "
    "or hf://ORG/NAME for a model"
)
"""Remedy for an address of another form."""


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
        """Path of what `tokamake fetch` has fetched for the address."""
        name = self.revision[:COMMIT_DIGITS] if self.is_commit else quote(self.revision, safe="")
        return Path(self.folder, name, self.path)

    @property
    def text(self) -> str:
        return self.at(quote(self.revision, safe=""), self.path).rstrip("/")

    def at(self, commit: str, path: str) -> str:
        """Address of a file at a commit."""
        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"hf://{prefix}{self.repository}@{commit}/{quote(path, safe='/ ')}"


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
