"""Crawling of hosts: robots.txt, the pace of requests, redirects and further attempts."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore, Lock
from urllib.parse import urljoin, urlsplit

from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.urls.cleaning import Blacklist, clean
from tokamake.data.urls.pages import (
    REDIRECTS,
    TEMPORARY,
    HttpAnswer,
    PageError,
    RequestLimits,
    request,
)
from tokamake.data.urls.robots import DISALLOW_ALL, Robots, parse_robots

_HTML = ("text/html", "application/xhtml+xml")
_ROBOTS_BYTES = 500_000
"""Size of a robots.txt that a crawler must read (RFC 9309)."""


class _Host:
    """The pace of requests to a host, and its robots.txt, which is read once."""

    def __init__(self, *, connections: int, seconds: float) -> None:
        self._free = BoundedSemaphore(connections)
        self._lock = Lock()
        self._next = 0.0
        self.seconds = seconds
        self.robots: Robots | PageError | None = None
        self.robots_lock = Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until the host may get another request."""
        with self._free:
            with self._lock:
                now = time.monotonic()
                start = max(now, self._next)
                self._next = start + self.seconds
            time.sleep(start - now)
            yield

    def pause(self, seconds: float) -> None:
        """Send no request for some time."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


class Crawler:
    """Fetches pages; threads share it, so that all keep to the pace of each host."""

    def __init__(self, settings: FetchUrlsSettings, blacklist: Blacklist) -> None:
        self._settings, self._blacklist = settings, blacklist
        self.connections_per_host = settings.connections_per_host
        self._limits = RequestLimits(
            settings.user_agent,
            settings.max_page_bytes,
            settings.page_seconds,
            settings.allow_private_addresses,
        )
        self._hosts: dict[str, _Host] = {}
        self._lock = Lock()

    def fetch(self, url: str) -> HttpAnswer:
        """Return the HTML page of a URL, after redirects. PageError: it has none, with a reason."""
        for _ in range(self._settings.max_redirects + 1):
            if not self._robots(url).allows(url):
                raise PageError("robots.txt")
            page = self._request(url, self._limits, wants=_has_html)
            if page.status not in REDIRECTS:
                break
            url = self._target(page)
        else:
            raise PageError("too many redirects")
        if page.status != 200:
            raise PageError(f"status {page.status}")
        if page.media_type not in _HTML:
            raise PageError(f"content type {page.media_type[:60] or 'missing'}")
        return page

    def _target(self, page: HttpAnswer) -> str:
        if not (target := _redirected(page)):
            raise PageError("invalid redirect")
        url, reason = clean(target, self._blacklist)
        if reason:
            raise PageError(f"redirected to a URL to leave out: {reason or 'none'}")
        return url

    def _request(
        self, url: str, limits: RequestLimits, *, wants: Callable[[HttpAnswer], bool]
    ) -> HttpAnswer:
        """Send a request, again if it may succeed later."""
        host, longest = self._host(url), self._settings.max_wait_seconds
        for attempt in range(self._settings.attempts):
            wait: float | None = None
            try:
                with host.turn():
                    page = request(url, limits, wants=wants)
                if page.status not in TEMPORARY:
                    return page
                error, wait = PageError(f"status {page.status}"), page.wait
            except PageError as caught:
                if not caught.is_temporary:
                    raise
                error = caught
            if attempt + 1 == self._settings.attempts:
                raise error
            if wait is not None and wait > longest:
                raise PageError(f"{error}, with a wait above {longest:g} seconds")
            pause = min(2.0**attempt, longest) if wait is None else wait
            host.pause(pause)
        raise AssertionError("no attempt")

    def _host(self, url: str) -> _Host:
        parts = urlsplit(url)
        with self._lock:
            settings = self._settings
            return self._hosts.setdefault(
                parts.netloc,
                _Host(connections=settings.connections_per_host, seconds=settings.host_seconds),
            )

    def _robots(self, url: str) -> Robots:
        host = self._host(url)
        with host.robots_lock:
            if host.robots is None:
                try:
                    host.robots = self._read_robots(url)
                    host.seconds = max(host.seconds, host.robots.delay)
                except PageError as caught:
                    host.robots = PageError(
                        f"robots.txt: {caught}", is_unreachable=caught.is_unreachable
                    )
            if isinstance(host.robots, PageError):
                error = host.robots
                raise PageError(str(error), is_unreachable=error.is_unreachable)
            return host.robots

    def _read_robots(self, url: str) -> Robots:
        """Read robots.txt: a missing one allows all, one that cannot be read forbids all."""
        address = urljoin(url, "/robots.txt")
        limits = self._limits._replace(max_bytes=_ROBOTS_BYTES)
        for _ in range(6):
            page = self._request(address, limits, wants=_is_found)
            if page.status not in REDIRECTS:
                break
            address, reason = clean(_redirected(page), _NO_BLACKLIST)
            if reason:
                return Robots()
        if page.status == 200:
            text = page.body.decode(errors="replace")
            robots = parse_robots(text, self._settings.user_agent)
            if robots.delay > self._settings.max_wait_seconds:
                raise PageError(f"Crawl-delay above {self._settings.max_wait_seconds:g} seconds")
            return robots
        return DISALLOW_ALL if page.status >= 500 else Robots()


_NO_BLACKLIST = Blacklist(frozenset(), frozenset())


def _redirected(page: HttpAnswer) -> str:
    """Address that an answer leads to; empty: none, or an invalid one."""
    location = page.header("location")
    with suppress(UnicodeError):  # http.client decodes headers as Latin-1, servers send UTF-8
        location = location.encode("latin-1").decode()
    try:
        return urljoin(page.url, location) if location else ""
    except ValueError:
        return ""


def _has_html(page: HttpAnswer) -> bool:
    return page.status == 200 and page.media_type in _HTML


def _is_found(page: HttpAnswer) -> bool:
    return page.status == 200
