"""Files at https addresses: one request lists a file, and a download resumes where it was cut."""

import fcntl
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from tokamake.errors import UserError
from tokamake.files import sync
from tokamake.remote.remote_file import FOLDER, RemoteFile, cache_folder, check_online

_ATTEMPTS = 6
"""Attempts in a row that bring no byte."""
_FIRST_WAIT = 1.0
"""Seconds before the second attempt; each further wait is twice as long."""
_TIMEOUT = 60
"""Seconds without a byte after which a connection counts as cut."""
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_BLOCK = 1 << 20


class _CutError(Exception):
    """A connection ended too soon, or a server asks to come again later."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        """Note the reason, and the seconds that the server asks to wait."""
        super().__init__(reason)
        self.wait = wait


def list_file(url: str) -> RemoteFile:
    """Ask for the size and the version of a file.

    Raises:
        UserError: there is no such file, its server does not state its size, or no network.
    """
    check_online(url, "ask for its size")
    headers, size = _with_retries(url, lambda: _facts(url))
    version = _version(headers)
    parts = urlsplit(url)
    folder, _, name = unquote(parts.path).rpartition("/")
    if not name:
        raise UserError(f"{url}: names no file; add its name")
    digest = hashlib.sha256(f"{url} {size} {version}".encode()).hexdigest()[:12]
    # The name comes first, so that files of a folder keep their order.
    path = f"{FOLDER}/https/{parts.netloc}{folder}/{name}/{digest}/{name}"
    return RemoteFile(url, os.path.normpath(path), size, version)


def download(file: RemoteFile) -> Path:
    """Download a file into the cache, or find it there; return its path.

    Raises:
        UserError: it cannot be downloaded, or differs from what was listed.
    """
    path = cache_folder() / "tokamake" / Path(file.path).relative_to(FOLDER)
    if _is_there(path, file):
        return path
    check_online(file.url, "download it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        with suppress(OSError):  # without locks, two jobs may download it twice
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_there(path, file):
            partial = path.with_name(f"{path.name}.incomplete")
            with partial.open("ab") as stream:
                _with_retries(file.url, lambda: _continue(file, stream), stream=stream)
            sync(partial)
            partial.rename(path)
            sync(path.parent)
    return path


def _is_there(path: Path, file: RemoteFile) -> bool:
    # A finished file has its final name, so its size is all that can be wrong.
    return path.is_file() and path.stat().st_size == file.size


def _facts(url: str) -> tuple[Any, int]:
    """Headers and size of a file."""
    for method, more in (("HEAD", {}), ("GET", {"Range": "bytes=0-0"})):
        try:
            with _open(url, method, more) as response:
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
                length = total or response.headers.get("Content-Length", "")
                if length.isdigit():
                    return response.headers, int(length)
        except UserError:
            if method == "GET":
                raise
    raise UserError(f"{url}: the server does not state its size; download it by hand")


def _version(headers: Any) -> str:
    if etag := headers.get("ETag"):
        return f"etag:{etag}"
    return f"modified:{modified}" if (modified := headers.get("Last-Modified")) else ""


def _continue(file: RemoteFile, stream: BinaryIO) -> None:
    """Append the rest of a file to its beginning, in `stream`."""
    start = stream.tell()
    if start >= file.size:
        if start > file.size:
            stream.truncate(0)
            raise _CutError("too many bytes")
        return
    kind, _, version = file.version.partition(":")
    more = {"Range": f"bytes={start}-"} if start else {}
    if start and version and not version.startswith("W/"):  # weak validators are not allowed
        more["If-Range"] = version
    with _open(file.url, "GET", more) as response:
        now = _version(response.headers)
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        length = total or response.headers.get("Content-Length", "")
        if (now and kind and now != file.version) or (
            length.isdigit() and int(length) != file.size
        ):
            raise UserError(
                f"{file.url}: changed since it was planned ({file.size:,} bytes, {file.version}; "
                f"now {length} bytes, {now}); remove its entries from plan.json to take it as it is"
            )
        if start and response.status != 206:  # the server sends the whole file
            stream.truncate(0)
            stream.seek(0)
        try:
            shutil.copyfileobj(response, stream, _BLOCK)
        except (OSError, http.client.HTTPException) as error:
            raise _CutError(f"the connection was cut ({error or type(error).__name__})") from None
        finally:
            stream.flush()
    if (size := stream.tell()) != file.size:
        if size > file.size:
            stream.truncate(0)
        raise _CutError(f"{size:,} of {file.size:,} bytes arrived")


@contextmanager
def _open(url: str, method: str, headers: dict[str, str]) -> Iterator[Any]:
    headers = {"Accept-Encoding": "identity", "User-Agent": "tokamake", **headers}
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _TEMPORARY:
            wait = error.headers.get("Retry-After", "")
            raise _CutError(
                f"the server answers {error.code}", float(wait) if wait.isdigit() else None
            ) from None
        raise UserError(f"{url}: the server answers {error.code} {error.reason}; fix it") from None
    except (OSError, http.client.HTTPException) as error:
        raise _CutError(f"no connection ({getattr(error, 'reason', error)})") from None
    with response:
        yield response


def _with_retries(url: str, attempt: Any, *, stream: BinaryIO | None = None) -> Any:
    """Call `attempt` until it succeeds, or several times in a row bring no byte."""
    failures, wait = 0, _FIRST_WAIT
    while True:
        before = stream.tell() if stream else 0
        try:
            return attempt()
        except _CutError as error:
            if stream and stream.tell() > before:
                failures, wait = 0, _FIRST_WAIT
            failures += 1
            if failures == _ATTEMPTS:
                remedy = "; what has arrived is kept: run again" if stream else ""
                raise UserError(
                    f"{url}: {error}, {_ATTEMPTS} times in a row{remedy or '; check the network'}"
                ) from None
            time.sleep(wait if error.wait is None else error.wait)
            wait *= 2
