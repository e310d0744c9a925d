"""Files at https addresses: one request lists a file, and a download continues where it was cut."""

import hashlib
import http.client
import os
import re
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote, urlsplit

from tokamake.errors import UserError
from tokamake.files import sync
from tokamake.remote.addresses import FOLDER, RemoteFile, cache_folder, check_names, check_online
from tokamake.remote.download_lock import beside, claim, release

Result = TypeVar("Result")
Headers = Mapping[str, str]

_ATTEMPTS = 6
"""Attempts in a row that bring no byte."""
_FIRST_WAIT = 1.0
"""Seconds before the second attempt; each further wait is twice as long."""
_POLL = 1.0
"""Seconds between looks at a download of another job."""
_MAX_WAIT = 300.0
"""Most seconds that a server can make us wait."""
_TIMEOUT = 60
"""Seconds without a byte after which a connection counts as cut."""
_TIME = 946_684_800
"""Modification time of every download: the year 2000."""
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_COMPRESSED = (".gz", ".tgz", ".zst", ".xz", ".bz2", ".br", ".Z")
"""Ends of names of compressed files; some servers state the compression as a coding."""
_BLOCK = 1 << 20
_NONE: Headers = MappingProxyType({})


class _CutError(Exception):
    """A connection ended too soon, or a server asks to come again later."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        """Note the reason, and the seconds that the server asks to wait."""
        super().__init__(reason)
        self.wait = wait


class AbsentError(UserError):
    """A server has no such file, or does not say so but forbids to read it."""


class _RangeError(UserError):
    """A server lacks the requested range."""


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and shows a token to no other server than the first."""

    def redirect_request(self, req: Any, *arguments: Any) -> Any:
        """Return the request of the new address; ValueError: it is not as safe as the first."""
        before, after = _origin(req.full_url), _origin(arguments[-1])
        if after[0] not in ("https", before[0]):
            raise ValueError(f"redirected from {before[0]} to {after[0]}")
        request = super().redirect_request(req, *arguments)
        if request:
            request.method = req.get_method()  # urllib turns HEAD into GET
        if request and after != before:
            request.remove_header("Authorization")
        return request


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def list_file(url: str) -> RemoteFile:
    """Ask for the size and the version of a file."""
    check_online(url, "ask for its size")
    path, name = place(url)
    headers, size = _with_retries(url, lambda: _facts(url))
    version = _version(headers)
    digest = hashlib.sha256(f"{url} {size} {version}".encode()).hexdigest()[:12]
    # The name comes first, so that files of a folder keep their order.
    return RemoteFile(url, f"{FOLDER}/https/{path}/{digest}/{name}", size, version)


def place(url: str) -> tuple[str, str]:
    """Return the host and path of an address as a path of this machine, and the file's name."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"{url}: {str(error).lower()}; fix the address") from None
    if "@" in parts.netloc:
        raise UserError(
            f"{url}: has a user or password, which plans and logs would keep; remove it"
        )
    path = unquote(parts.path)
    if path.endswith("/") or not path or not parts.hostname or not url.isprintable():
        raise UserError(f"{ascii(url)[1:-1]}: names no file; write https://HOST/PATH")
    host = re.sub(r"[\[\]]", "", parts.netloc)  # of an IPv6 address
    local = "/".join([host, *filter(None, path.split("/"))])
    check_names([local], url)
    return local, local.rpartition("/")[2]


def download(file: RemoteFile) -> Path:
    """Download a file into the cache, or find it there; return its path."""
    path = cache_path(file)
    save(file, path, url=file.url)
    return path


def find(file: RemoteFile) -> Path | None:
    path = cache_path(file)
    return path if is_finished(path, file) else None


def cache_path(file: RemoteFile) -> Path:
    return cache_folder() / "tokamake" / Path(file.path).relative_to(FOLDER)


def save(
    file: RemoteFile,
    path: Path,
    *,
    url: str,
    headers: Headers = _NONE,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Download a file to a path, unless it is there; continue another process's download.

    `check` gets the complete file before it gets its name.
    """
    partial = beside(path, "incomplete")
    while not is_finished(path, file):
        check_online(file.url, "download it")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not claim(path, partial):  # another job downloads it
            time.sleep(_POLL)
            continue
        try:
            # Another job may have finished it between the first look and the lock.
            if not is_finished(path, file):
                _finish(file, partial, url=url, headers=headers, check=check)
                partial.rename(path)
                sync(path.parent)
        finally:
            release(path)


def is_finished(path: Path, file: RemoteFile) -> bool:
    """Whether a file is complete: it has its final name, so its size is all that can be wrong."""
    return path.is_file() and path.stat().st_size == file.size


def _finish(
    file: RemoteFile,
    partial: Path,
    *,
    url: str,
    headers: Headers,
    check: Callable[[Path], None] | None,
) -> None:
    with partial.open("ab") as stream:
        missing, free = file.size - stream.tell(), shutil.disk_usage(partial.parent).free
        if missing > free:
            raise UserError(
                f"{file.url}: {missing:,} bytes to download, {free:,} are free in "
                f"{partial.parent}; make room, or set HF_HOME"
            )
        _with_retries(
            file.url, lambda: _continue(file, stream, url=url, headers=headers), stream=stream
        )
    if check:
        check(partial)
    # The path states the content. With the time of a download, the same file would be newer
    # than files made from it.
    os.utime(partial, (_TIME, _TIME))
    sync(partial)


def _facts(url: str) -> tuple[Any, int]:
    for method, more in (("HEAD", {}), ("GET", {"Range": "bytes=0-0"})):
        try:
            with _open(url, method, more, address=url) as response:
                size = _size(response.headers)
                if size is not None:
                    return response.headers, size
        except UserError:
            if method == "GET":
                raise
    raise UserError(f"{url}: the server does not state its size; download it by hand")


def _size(headers: Any) -> int | None:
    """Size of the whole file, also where an answer has a range of it."""
    total = headers.get("Content-Range", "").rpartition("/")[2]
    text = total or headers.get("Content-Length", "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _version(headers: Any) -> str:
    if etag := headers.get("ETag"):
        return f"etag:{etag}"
    return f"modified:{modified}" if (modified := headers.get("Last-Modified")) else ""


def _continue(file: RemoteFile, stream: BinaryIO, *, url: str, headers: Headers) -> None:
    kind, _, version = file.version.partition(":")
    # Without a version, or with one of files that only mean the same, two files could be mixed.
    if not kind or version.startswith("W/") or stream.tell() > file.size:
        _empty(stream)
    start = stream.tell()
    if start == file.size:
        return
    more = {"Range": f"bytes={start}-"} if start else {}
    if start and kind in ("etag", "modified"):
        more["If-Range"] = version
    try:
        with _open(url, "GET", {**headers, **more}, address=file.url) as response:
            if response.status == 206:
                _check_range(file, response.headers, start=start)
            else:
                _check_version(file, response.headers)
                _empty(stream)  # the server sends the whole file
            while block := _read(response):
                if stream.tell() + len(block) > file.size:
                    _empty(stream)
                    raise _changed(file, "now more bytes")
                stream.write(block)
    except _RangeError as error:
        _empty(stream)
        raise _CutError(str(error)) from None
    if stream.tell() != file.size:
        raise _CutError(f"{stream.tell():,} of {file.size:,} bytes arrived")


def _empty(stream: BinaryIO) -> None:
    stream.truncate(0)
    stream.seek(0)


def _check_version(file: RemoteFile, headers: Any) -> None:
    """Check that a server still has the file that was listed."""
    now, size = _version(headers), _size(headers)
    is_comparable = now.partition(":")[0] == file.version.partition(":")[0]
    if (is_comparable and now != file.version) or size not in (None, file.size):
        raise _changed(file, f"now {size} bytes, {now or 'no version'}")


def _check_range(file: RemoteFile, headers: Any, *, start: int) -> None:
    """Check that a range continues the listed version of a file; the Hub's has a hash to check."""
    stated = headers.get("Content-Range", "")
    is_same = file.version.startswith(("sha256:", "git:")) or _version(headers) == file.version
    if not re.fullmatch(rf"bytes {start}-[0-9]+/{file.size}", stated) or not is_same:
        raise _RangeError(f"the server answers with another range ({stated or 'none'})")


def _changed(file: RemoteFile, now: str) -> UserError:
    if file.url.startswith("hf://"):  # at a commit, which does not change
        return UserError(f"{file.url}: differs from its listing ({now}); check HF_ENDPOINT")
    return UserError(
        f"{file.url}: changed since it was planned ({file.size:,} bytes, {file.version}; {now}); "
        "the plan keeps the earlier version; give the file another address, such as "
        "...?version=2, to plan it again"
    )


def _read(response: Any) -> bytes:
    try:
        block: bytes = response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, http.client.IncompleteRead) and error.partial:
            return error.partial
        raise _CutError(f"the connection was cut ({error or type(error).__name__})") from None
    return block


@contextmanager
def _open(url: str, method: str, headers: Headers, *, address: str) -> Iterator[Any]:
    """Send a request; `address`: the user's name for `url`."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "tokamake", **headers}
    quoted = quote(url, safe=":/?#[]@!$&'()*+,;=%~")  # letters beyond ASCII
    try:
        request = urllib.request.Request(quoted, method=method, headers=dict(headers))
        response = urllib.request.build_opener(_Redirect).open(request, timeout=_TIMEOUT)
        coding = response.headers.get("Content-Encoding", "identity").lower()
        if coding != "identity" and not urlsplit(url).path.endswith(_COMPRESSED):
            response.close()
            coded = f"the server compresses it ({coding}), although asked not to"
            raise UserError(f"{address}: {coded}; download it by hand")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _TEMPORARY:
            wait = error.headers.get("Retry-After", "")
            raise _CutError(
                f"the server answers {error.code}", float(wait) if wait.isdecimal() else None
            ) from None
        if error.code == 416:
            raise _RangeError(f"{address}: the server answers 416; download it by hand") from None
        if error.code in (301, 302, 303, 307, 308):
            raise UserError(
                f"{address}: is redirected without end or target; fix the address"
            ) from None
        remedy = "set HF_TOKEN, if it is the Hub" if error.code in (401, 403) else "fix the address"
        kind = AbsentError if error.code in (403, 404, 410) else UserError
        raise kind(f"{address}: the server answers {error.code} {error.reason}; {remedy}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
            raise UserError(
                f"{address}: no host has the name {urlsplit(url).hostname}; fix the address, or "
                "check the network"
            ) from None
        raise _CutError(f"no connection ({reason})") from None
    except ValueError as error:
        raise UserError(f"{address}: {error}; fix the address") from None
    with response:
        yield response


def _with_retries(
    url: str, attempt: Callable[[], Result], *, stream: BinaryIO | None = None
) -> Result:
    """Call `attempt` until it succeeds, or several times in a row bring no byte."""
    failures, wait = 0, _FIRST_WAIT
    most = stream.tell() if stream else 0  # a file that begins again and again brings no byte
    while True:
        try:
            return attempt()
        except _CutError as error:
            if stream and stream.tell() > most:
                failures, wait, most = 0, _FIRST_WAIT, stream.tell()
            failures += 1
            if failures == _ATTEMPTS:
                remedy = "the received part is kept: run again" if stream else "check the network"
                raise UserError(f"{url}: {error}, {_ATTEMPTS} times in a row; {remedy}") from None
            seconds = min(_MAX_WAIT, wait if error.wait is None else error.wait)
            print(f"{url}: {error}; trying again in {seconds:g} s", file=sys.stderr, flush=True)
            time.sleep(seconds)
            wait *= 2
