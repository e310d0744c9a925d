"""List and download the files behind addresses of all kinds."""

from pathlib import Path
from typing import Any

from tokamake.errors import UserError
from tokamake.files import write_link
from tokamake.remote import https, hub
from tokamake.remote.addresses import RemoteFile, is_remote


def list_files(address: str) -> list[RemoteFile]:
    """List the files that an address names: hf://, or the https address of one file."""
    if not is_remote(address):
        raise UserError(f"{address}: no address; write hf://ORG/NAME or https://HOST/PATH")
    return hub.list_files(address) if address.startswith("hf://") else [https.list_file(address)]


def download(file: RemoteFile, *, link: Path | None = None) -> None:
    """Download a file into the cache if it is missing, and link to it, by default at its path."""
    cached = _source(file).download(file).absolute()
    link = link or Path(file.path)
    if not (link.is_symlink() and link.readlink() == cached):
        write_link(link, cached)


def is_cached(file: RemoteFile) -> bool:
    """Whether a file was downloaded before, here or from another folder."""
    return _source(file).find(file) is not None


def _source(file: RemoteFile) -> Any:
    return hub if file.url.startswith("hf://") else https
