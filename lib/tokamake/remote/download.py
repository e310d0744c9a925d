"""List and download the files behind addresses of all kinds."""

from pathlib import Path

from tokamake.files import sync
from tokamake.remote import https, hub
from tokamake.remote.remote_file import RemoteFile


def list_files(address: str) -> list[RemoteFile]:
    """List the files that an address names.

    Args:
        address: hf:// with a file, folder or pattern, or the https address of one file.

    Raises:
        UserError: there is no such file, or no network.
    """
    return hub.list_files(address) if address.startswith("hf://") else [https.list_file(address)]


def download(file: RemoteFile) -> None:
    """Download a file into the cache, unless it is there, and link to it.

    Raises:
        UserError: it cannot be downloaded, or differs from what was listed.
    """
    cached = (hub if file.url.startswith("hf://") else https).download(file)
    link = Path(file.path)
    if link.is_symlink() and link.resolve() == cached.resolve():
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(cached.absolute())
    temporary.rename(link)
    sync(link.parent)
