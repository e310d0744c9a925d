"""Fetching of the URLs of a WARC file: resumable, complete or absent, each outcome on record."""

import gzip
import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.urls.hosts import Crawler
from tokamake.data.urls.pages import HttpAnswer, PageError
from tokamake.data.urls.url_list import cached_path, shard_urls
from tokamake.errors import UserError
from tokamake.files import atomic, write_link
from tokamake.remote.addresses import RemoteFile, check_online
from tokamake.remote.download_lock import beside, claim, release

FETCHED = "fetched"
"""Outcome of a URL whose page is in the WARC file; other outcomes are reasons of failures."""
_POLL = 1.0
_DROPPED = ("transfer-encoding", "content-length", "connection", "keep-alive")
"""Headers of the connection: the stored body has no chunks, and its own length."""


def fetch_listed(
    file: RemoteFile, settings: FetchUrlsSettings, *, crawler: Crawler
) -> Counter[str]:
    """Fetch a planned WARC file into the cache, and link to it and to its outcomes."""
    path = cached_path(file)
    urls = shard_urls(file, settings)
    if not path.exists():
        check_online(file.url, "fetch its pages")
    counts = fetch_shard(urls, path, crawler=crawler, settings=settings)
    for target, link in (
        (outcomes_path(path), outcomes_path(Path(file.path))),
        (path, Path(file.path)),
    ):
        if not (link.is_symlink() and link.readlink() == target.absolute()):
            write_link(link, target.absolute())
    return counts


def fetch_shard(
    urls: Sequence[str], path: Path, *, crawler: Crawler, settings: FetchUrlsSettings
) -> Counter[str]:
    """Write the pages of URLs to a WARC file, in their order; return the count of each outcome.

    Beside it, `outcomes_path` has a line for each URL. An existing file stays. A killed job keeps
    the pages that it has fetched.
    """
    outcomes = outcomes_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # All jobs that share the cache take turns, so that the pace of each host holds.
    with _alone(path.parent.parent / "fetching"):
        if not path.exists():
            journal = _Journal(path)
            try:
                _fetch_missing(urls, journal, crawler=crawler, connections=settings.connections)
            finally:
                journal.close()
            _check_network(journal, path)
            with atomic(outcomes, path) as (listed, warc):
                journal.write(urls, warc, listed, user_agent=settings.user_agent)
            journal.remove()
    lines = outcomes.read_text(encoding="utf-8").splitlines()
    return Counter(json.loads(line)["outcome"] for line in lines)


def outcomes_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".warc.gz") + ".outcomes.jsonl")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    progress = beside(path, "progress")
    while not claim(path, progress):
        time.sleep(_POLL)
    try:
        progress.touch()
        yield
    finally:
        release(path)


def _fetch_missing(
    urls: Sequence[str], journal: "_Journal", *, crawler: Crawler, connections: int
) -> None:
    """Fetch URLs without an outcome; the URLs of a host follow each other."""
    hosts: dict[str, list[str]] = {}
    for url in urls:
        if url not in journal.outcomes:
            hosts.setdefault(urlsplit(url).netloc, []).append(url)
    # Several threads may serve a host; the crawler keeps its pace.
    lanes = [
        queue[lane :: crawler.connections_per_host]
        for queue in sorted(hosts.values(), key=len, reverse=True)
        for lane in range(min(len(queue), crawler.connections_per_host))
    ]
    with ThreadPoolExecutor(connections) as pool:
        futures = [pool.submit(_fetch_lane, lane, journal, crawler) for lane in lanes]
        try:
            for future in futures:
                future.result()
        except BaseException:
            journal.is_stopped = True
            pool.shutdown(cancel_futures=True)
            raise


def _fetch_lane(urls: Sequence[str], journal: "_Journal", crawler: Crawler) -> None:
    for url in urls:
        if journal.is_stopped:
            return
        try:
            page = crawler.fetch(url)
        except PageError as error:
            journal.fail(url, error)
        else:
            journal.keep(url, page)


def _check_network(journal: "_Journal", path: Path) -> None:
    """Refuse to record a network that is down as pages that are missing."""
    outcomes = journal.outcomes.values()
    if outcomes and all(outcome["unreachable"] for outcome in outcomes):
        reason = Counter(outcome["outcome"] for outcome in outcomes).most_common(1)[0][0]
        journal.remove()
        raise UserError(
            f"{path.name}: none of {len(outcomes):,} URLs can be reached (most: {reason}); check "
            "the network of this node and run again, or correct the list"
        )


class _Journal:
    """Pages and outcomes of a WARC file that is being fetched, in the order of their arrival."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._pages, self._lines = beside(path, "pages"), beside(path, "outcomes")
        self._progress = beside(path.parent.parent / "fetching", "progress")
        self._lock = Lock()
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.is_stopped = False
        self._restore()
        self._page_stream, self._line_stream = self._pages.open("ab"), self._lines.open("ab")

    def _restore(self) -> None:
        """Take up what a killed job has left; a page that is not whole is fetched again."""
        if not (self._lines.exists() and self._pages.exists()):
            self.remove()
            return
        with self._pages.open("rb") as pages:
            for line in self._lines.read_bytes().split(b"\n")[:-1]:
                outcome = json.loads(line)
                if "start" in outcome:
                    pages.seek(outcome["start"])
                    member = pages.read(outcome["end"] - outcome["start"])
                    if hashlib.sha256(member).hexdigest() != outcome["member_sha256"]:
                        continue
                self.outcomes[outcome["url"]] = outcome
        lines = [_line(outcome) for outcome in self.outcomes.values()]
        self._lines.write_bytes(b"".join(lines))

    def keep(self, url: str, page: HttpAnswer) -> None:
        """Append a page."""
        member = gzip.compress(_response(page), 6, mtime=0)
        with self._lock:
            start = self._page_stream.tell()
            self._page_stream.write(member)
            self._page_stream.flush()
            self._add(
                {
                    "url": url,
                    "outcome": FETCHED,
                    **({"redirected_to": page.url} if page.url != url else {}),
                    "bytes": len(page.body),
                    "sha256": hashlib.sha256(page.body).hexdigest(),
                    "unreachable": False,
                    "start": start,
                    "end": start + len(member),
                    "member_sha256": hashlib.sha256(member).hexdigest(),
                }
            )

    def fail(self, url: str, error: PageError) -> None:
        """Record why a URL has no page."""
        with self._lock:
            self._add({"url": url, "outcome": str(error), "unreachable": error.is_unreachable})

    def _add(self, outcome: dict[str, Any]) -> None:
        self._line_stream.write(_line(outcome))
        self._line_stream.flush()
        self._progress.touch()
        self.outcomes[outcome["url"]] = outcome

    def close(self) -> None:
        self._page_stream.close()
        self._line_stream.close()

    def write(self, urls: Sequence[str], warc: Path, listed: Path, *, user_agent: str) -> None:
        """Write the WARC file, and the outcomes of its URLs, in the order of the list."""
        with warc.open("wb") as output, listed.open("wb") as lines, self._pages.open("rb") as pages:
            output.write(gzip.compress(_warcinfo(self._name, user_agent), 6, mtime=0))
            for url in urls:
                outcome = dict(self.outcomes[url])
                if "start" in outcome:
                    pages.seek(outcome["start"])
                    output.write(pages.read(outcome["end"] - outcome["start"]))
                for name in ("start", "end", "member_sha256", "unreachable"):
                    outcome.pop(name, None)
                lines.write(_line(outcome))

    def remove(self) -> None:
        for path in (self._pages, self._lines):
            path.unlink(missing_ok=True)


def _line(outcome: dict[str, Any]) -> bytes:
    return json.dumps(outcome).encode() + b"\n"


def _response(page: HttpAnswer) -> bytes:
    """Return the record of a page."""
    head = [f"HTTP/1.1 {page.status} {page.reason}"]
    head += [f"{name}: {value}" for name, value in page.headers if name.lower() not in _DROPPED]
    head += [f"Content-Length: {len(page.body)}", "", ""]
    content = "\r\n".join(head).encode("latin-1", "replace") + page.body
    return _record(
        "response",
        content,
        {"WARC-Target-URI": page.url, "Content-Type": "application/http; msgtype=response"},
        payload=page.body,
    )


def _warcinfo(name: str, user_agent: str) -> bytes:
    fields = {
        "software": "tokamake",
        "http-header-user-agent": user_agent,
        "format": "WARC File Format 1.1",
        "robots": "obey",
    }
    content = "".join(f"{key}: {value}\r\n" for key, value in fields.items()).encode()
    return _record(
        "warcinfo", content, {"WARC-Filename": name, "Content-Type": "application/warc-fields"}
    )


def _record(
    kind: str, content: bytes, fields: dict[str, str], *, payload: bytes | None = None
) -> bytes:
    from fastwarc.warc import WarcRecord, WarcRecordType

    record = WarcRecord()
    record.init_headers(
        record_type=getattr(WarcRecordType, kind), record_urn=f"uuid:{uuid.uuid4()}".encode()
    )
    record.headers["WARC-Date"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for key, value in fields.items():
        record.headers[key] = value
    record.set_bytes_content(content)
    # SHA-1 is what readers of WARC files check; `_Journal` notes SHA-256.
    digest = None if payload is None else hashlib.sha1(payload, usedforsecurity=False).digest()
    stream = BytesIO()
    record.write(stream, checksum_data=True, payload_digest=digest)
    return stream.getvalue()
