"""Pages and outcomes of a WARC file that is being fetched, in the order of their arrival."""

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from tokamake.data.urls.pages import UNAVAILABLE, HttpAnswer, PageError
from tokamake.data.urls.warc_records import response, warcinfo
from tokamake.files import atomic
from tokamake.remote.download_lock import beside

FETCHED = "fetched"
"""Outcome of a URL whose page is in the WARC file; other outcomes are reasons of failures."""
_OF_JOURNAL = ("start", "end", "member_sha256", "unreachable")
"""Fields that only the journal has."""


class Journal:
    """Two files beside the WARC file: pages, and a line for each outcome.

    A new job continues a journal. It repeats failures that may pass: they may be the trouble that
    stopped the former job.
    """

    def __init__(self, path: Path, urls: Sequence[str], *, progress: Path) -> None:
        """Open the journal of a WARC file and its URLs. Each outcome touches `progress`."""
        self._name, self._urls, self._progress = path.name, urls, progress
        self._pages, self._lines = beside(path, "pages"), beside(path, "outcomes")
        self._lock = Lock()
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._restore()
        self._page_stream, self._line_stream = self._pages.open("ab"), self._lines.open("ab")

    def _restore(self) -> None:
        """Take up what a killed job has left; lines and pages that are not whole are dropped."""
        if not (self._lines.exists() and self._pages.exists()):
            self.remove()
            return
        with self._pages.open("rb") as pages:
            for line in self._lines.read_bytes().split(b"\n")[:-1]:
                # A machine that crashes may leave a hole of NUL bytes in a file.
                if (outcome := _whole(line, pages)) is not None:
                    self.outcomes[outcome["url"]] = outcome
        for url in self.failures_that_may_pass():
            del self.outcomes[url]
        with atomic(self._lines) as (temporary,):
            temporary.write_bytes(b"".join(map(_line, self.outcomes.values())))

    def missing(self) -> list[str]:
        """Return the URLs without an outcome."""
        return [url for url in self._urls if url not in self.outcomes]

    def failures_that_may_pass(self) -> list[str]:
        """Return the URLs that have no page now, but may have one another time."""
        outcomes = ((url, self.outcomes.get(url, {})) for url in self._urls)
        return [
            url
            for url, outcome in outcomes
            if outcome.get("transient") or outcome.get("unreachable")
        ]

    def progress(self) -> str:
        """Return a line for the log."""
        with self._lock:
            num_pages = sum(each["outcome"] == FETCHED for each in self.outcomes.values())
            num_failures = len(self.outcomes) - num_pages
        of_all = f"of {len(self._urls):,} URLs"
        return f"{self._name}: {num_pages:,} pages and {num_failures:,} failures {of_all}"

    def keep(self, url: str, page: HttpAnswer) -> None:
        """Append a page."""
        member = gzip.compress(response(page), 6, mtime=0)
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
                    "start": start,
                    "end": start + len(member),
                    "member_sha256": hashlib.sha256(member).hexdigest(),
                }
            )

    def fail(self, url: str, error: PageError) -> None:
        """Record why a URL has no page. The reason of a request stays if there is no second one."""
        if str(error) == UNAVAILABLE and url in self.outcomes:
            return
        with self._lock:
            self._add(
                {
                    "url": url,
                    "outcome": str(error),
                    "transient": error.is_transient,
                    "unreachable": error.is_unreachable,
                }
            )

    def _add(self, outcome: dict[str, Any]) -> None:
        self._line_stream.write(_line(outcome))
        self._line_stream.flush()
        self._progress.touch()
        self.outcomes[outcome["url"]] = outcome

    def close(self) -> None:
        self._page_stream.close()
        self._line_stream.close()

    def write(self, warc: Path, listed: Path, *, user_agent: str) -> None:
        """Write the WARC file, and the outcomes of its URLs, in the order of the list."""
        with warc.open("wb") as output, listed.open("wb") as lines, self._pages.open("rb") as pages:
            output.write(gzip.compress(warcinfo(self._name, user_agent), 6, mtime=0))
            for url in self._urls:
                outcome = dict(self.outcomes[url])
                if "start" in outcome:
                    pages.seek(outcome["start"])
                    output.write(pages.read(outcome["end"] - outcome["start"]))
                for name in _OF_JOURNAL:
                    outcome.pop(name, None)
                lines.write(_line(outcome))

    def remove(self) -> None:
        for path in (self._pages, self._lines):
            path.unlink(missing_ok=True)


def _whole(line: bytes, pages: BinaryIO) -> dict[str, Any] | None:
    """Return the outcome of a line; None: the line, or its page, is damaged."""
    try:
        outcome = json.loads(line)
        is_whole = isinstance(outcome["url"], str) and isinstance(outcome["outcome"], str)
        if outcome["outcome"] == FETCHED:
            pages.seek(outcome["start"])
            member = pages.read(outcome["end"] - outcome["start"])
            is_whole &= hashlib.sha256(member).hexdigest() == outcome["member_sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return outcome if is_whole else None


def _line(outcome: dict[str, Any]) -> bytes:
    return json.dumps(outcome).encode() + b"\n"
