"""Fetching of the URLs of a WARC file: resumable, complete or absent, each outcome on record."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.urls.hosts import Crawler
from tokamake.data.urls.journal import FETCHED, Journal
from tokamake.data.urls.pages import PageError
from tokamake.data.urls.url_list import cached_path, shard_urls
from tokamake.errors import TemporaryError
from tokamake.files import atomic, write_link
from tokamake.remote.addresses import RemoteFile, check_online
from tokamake.remote.download_lock import beside, claim, release
from tokamake.runtime.console import counted

_POLL = 1.0
_PROGRESS_SECONDS = 60.0
"""Time between lines of the log."""
_MAX_REASONS = 8
"""Reasons of failures that a line of the log lists; the outcomes have them all."""
_NUM_ASKED = 4
"""URLs of a kind whose hosts may be asked whether the network is up."""


class NoPageError(TemporaryError):
    """No URL of a corpus has a page, and failures may pass."""


class Outcomes(NamedTuple):
    """Outcomes of the URLs of a WARC file."""

    counts: Counter[str]
    num_transient: int
    """URLs without a page that may have one another time."""

    @property
    def summary(self) -> str:
        """Counts and the most frequent reasons, for the log."""
        failures = Counter({name: n for name, n in self.counts.items() if name != FETCHED})
        total = self.counts.total()
        return (
            f"{self.counts[FETCHED]:,} of {total:,} URLs fetched; failures: "
            f"{_most_frequent(failures) or 'none'}; {self.num_transient:,} of them are transient"
        )


def _most_frequent(reasons: Counter[str]) -> str:
    """Counts of the most frequent reasons, as text."""
    listed = reasons.most_common()
    parts = [f"{n:,} {reason}" for reason, n in listed[:_MAX_REASONS]]
    if rest := sum(n for _, n in listed[_MAX_REASONS:]):
        parts.append(f"{rest:,} for other reasons")
    return ", ".join(parts)


def fetch_listed(
    file: RemoteFile,
    settings: FetchUrlsSettings,
    *,
    crawler: Crawler,
    of_corpus: Sequence[Path] = (),
) -> Outcomes:
    """Fetch a planned WARC file into the cache, and link to it and to its outcomes.

    `of_corpus` has the planned WARC files of its corpus, for `fetch_shard`.
    """
    path = cached_path(file)
    urls = shard_urls(file, settings)
    if not path.exists():
        check_online(file.url, "fetch its pages")
    outcomes = fetch_shard(urls, path, crawler=crawler, settings=settings, of_corpus=of_corpus)
    for target, link in (
        (outcomes_path(path), outcomes_path(Path(file.path))),
        (path, Path(file.path)),
    ):
        if not (link.is_symlink() and link.readlink() == target.absolute()):
            write_link(link, target.absolute())
    return outcomes


def fetch_shard(
    urls: Sequence[str],
    path: Path,
    *,
    crawler: Crawler,
    settings: FetchUrlsSettings,
    of_corpus: Sequence[Path] = (),
) -> Outcomes:
    """Write the pages of URLs to a WARC file, in their order.

    Beside it, `outcomes_path` has a line for each URL. An existing file stays. A killed job keeps
    the pages that it has fetched.

    Raises:
        NoPageError: there is no page, neither here nor in the WARC files `of_corpus`, and failures
            may pass. No file is written; the next job tries again.
    """
    outcomes = outcomes_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # All jobs that share the cache take turns, so that the pace of each host holds.
    with _alone(path.parent.parent / "fetching"):
        if not path.exists():
            progress = beside(path.parent.parent / "fetching", "progress")
            journal = Journal(path, urls, progress=progress)
            try:
                _fetch_missing(
                    urls, path, journal=journal, crawler=crawler, connections=settings.connections
                )
            finally:
                journal.close()
            _check_any_page(path, journal, of_corpus=of_corpus)
            with atomic(outcomes, path) as (listed, warc):
                journal.write(warc, listed, user_agent=settings.user_agent)
            journal.remove()
    lines = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
    num_transient = sum(bool(line.get("transient")) for line in lines)
    return Outcomes(Counter(line["outcome"] for line in lines), num_transient)


def _check_any_page(path: Path, journal: Journal, *, of_corpus: Sequence[Path]) -> None:
    reasons = Counter(each["outcome"] for each in journal.outcomes.values())
    others = filter(Path.is_file, map(outcomes_path, of_corpus))
    if FETCHED in reasons or not journal.failures_that_may_pass() or any(_fetched_before(others)):
        return
    raise NoPageError(
        f"{path.name}: no page of {counted(reasons.total(), 'URL')} could be fetched: "
        f"{_most_frequent(reasons)}; check network, proxy and servers, and run again, which tries "
        "transient failures again; if these servers are gone for good, correct the list"
    )


def outcomes_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".warc.gz") + ".outcomes.jsonl")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    is_first = True
    while not claim(path, beside(path, "progress")):
        if is_first:
            print("waits: another job fetches pages to the same cache", flush=True)
        is_first = False
        time.sleep(_POLL)
    try:
        beside(path, "progress").touch()
        yield
    finally:
        release(path)


def _fetch_missing(
    urls: Sequence[str], path: Path, *, journal: Journal, crawler: Crawler, connections: int
) -> None:
    """Fetch URLs without an outcome, and once more, at the end, URLs whose failure may pass.

    UserError: the network of this machine is down.
    """
    crawler.network.begin(path.name, _probably_alive(urls, path, journal=journal))
    for find in (journal.missing, journal.failures_that_may_pass):
        crawler.forget_failures()
        _fetch_all(find(), journal, crawler=crawler, connections=connections)
        crawler.network.check()


def _probably_alive(urls: Sequence[str], path: Path, *, journal: Journal) -> list[str]:
    """Return URLs whose pages were fetched before, the latest first, and some of the file's own."""
    fetched = [url for url, outcome in journal.outcomes.items() if outcome["outcome"] == FETCHED]
    spread = urls[:: max(1, len(urls) // _NUM_ASKED)][:_NUM_ASKED]
    in_cache = _fetched_before(path.parent.parent.glob("*/*.outcomes.jsonl"))
    return [*fetched[-_NUM_ASKED:], *islice(in_cache, _NUM_ASKED), *spread]


def _fetched_before(outcomes_files: Iterable[Path]) -> Iterator[str]:
    """Yield a fetched URL of each WARC file that has one, the latest file first."""
    for other in sorted(outcomes_files, key=lambda other: other.stat().st_mtime, reverse=True):
        with other.open(encoding="utf-8") as lines:
            outcomes = map(json.loads, lines)
            yield from islice((o["url"] for o in outcomes if o["outcome"] == FETCHED), 1)


def _fetch_all(
    urls: Sequence[str], journal: Journal, *, crawler: Crawler, connections: int
) -> None:
    """Fetch URLs by several threads; the URLs of a host follow each other."""
    hosts: dict[str, list[str]] = {}
    for url in urls:
        hosts.setdefault(urlsplit(url).netloc, []).append(url)
    # Several threads may serve a host; the crawler keeps its pace.
    queues = [
        of_host[first :: crawler.connections_per_host]
        for of_host in sorted(hosts.values(), key=len, reverse=True)
        for first in range(min(len(of_host), crawler.connections_per_host))
    ]
    with ThreadPoolExecutor(connections) as pool:
        pending = {pool.submit(_fetch_queue, queue, journal, crawler) for queue in queues}
        try:
            while pending:
                done, pending = wait(pending, _PROGRESS_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if pending:
                    print(journal.progress(), flush=True)
        except BaseException:
            crawler.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def _fetch_queue(urls: Sequence[str], journal: Journal, crawler: Crawler) -> None:
    for url in urls:
        if crawler.stopped.is_set():
            return
        try:
            page = crawler.fetch(url)
        except PageError as error:
            if not crawler.stopped.is_set():
                journal.fail(url, error)
        else:
            journal.keep(url, page)
