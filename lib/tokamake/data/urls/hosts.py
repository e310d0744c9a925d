"""Crawling of hosts: robots.txt, the pace of requests, redirects and further attempts."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore, Event, Lock
from urllib.parse import urljoin, urlsplit

from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.urls.cleaning import Blacklist, clean
from tokamake.data.urls.connections import Proxies
from tokamake.data.urls.network import Network
from tokamake.data.urls.pages import (
    REDIRECTS,
    TEMPORARY,
    UNAVAILABLE,
    HttpAnswer,
    PageError,
    RequestLimits,
    request,
)
from tokamake.data.urls.robots import Robots, parse_robots

_HTML = ("text/html", "application/xhtml+xml")
_ROBOTS_BYTES = 500_000
"""Size of a robots.txt that a crawler must read (RFC 9309)."""
_PROBE_SECONDS = 10
"""Time in which a host answers that has answered before."""


class _Host:
    """The pace of requests to a host, its failures in a row, and its robots.txt, read once."""

    def __init__(self, *, connections: int, seconds: float, stopped: Event) -> None:
        self._free = BoundedSemaphore(connections)
        self._lock = Lock()
        self._next = 0.0
        self._stopped = stopped
        self.seconds = seconds
        self.num_failures = 0
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
            if self._stopped.wait(start - now):
                raise PageError("stopped", is_transient=True, is_timeout=True)
            yield

    def pause(self, seconds: float) -> None:
        """Send no request for some time."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)

    def forget_failures(self) -> None:
        """Ask the host again as if it had not failed; a robots.txt that was read stays."""
        self.num_failures = 0
        if isinstance(self.robots, PageError) and self.robots.may_pass:
            self.robots = None


class Crawler:
    """Fetches pages; threads share it, so that all keep to the pace of each host."""

    def __init__(self, settings: FetchUrlsSettings, blacklist: Blacklist) -> None:
        """UserError: a proxy of the environment has an invalid address."""
        self._settings, self._blacklist = settings, blacklist
        self.connections_per_host = settings.connections_per_host
        self._limits = RequestLimits(
            settings.user_agent,
            settings.max_page_bytes,
            settings.page_seconds,
            settings.allow_private_addresses,
            Proxies(),
        )
        self.stopped = Event()
        """Set: waits end, and no further request is sent."""
        self.network = Network(
            self._answers, max_wait_seconds=settings.max_wait_seconds, stopped=self.stopped
        )
        self._hosts: dict[str, _Host] = {}
        self._lock = Lock()

    def fetch(self, url: str) -> HttpAnswer:
        """Return the HTML page of a URL, after redirects.

        Raises:
            PageError: it has none, with a reason.
            UserError: the network of this machine is down.
        """
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
            raise PageError(f"status {page.status}", is_transient=page.status >= 500)
        if page.media_type not in _HTML:
            raise PageError(f"content type {page.media_type[:60] or 'missing'}")
        return page

    def forget_failures(self) -> None:
        """Ask hosts again that did not answer."""
        with self._lock:
            for host in self._hosts.values():
                host.forget_failures()

    def _answers(self, url: str) -> bool:
        """Whether the host of a URL answers at all."""
        limits = self._limits._replace(seconds=min(self._limits.seconds, _PROBE_SECONDS))
        try:
            request(urljoin(url, "/robots.txt"), limits, wants=lambda _: False)
        except PageError as error:
            return not error.is_unreachable
        return True

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
        """Send a request, and again if it failed, but none to a host that has failed often."""
        host = self._host(url)
        if host.num_failures >= self._settings.host_failures:
            raise PageError(UNAVAILABLE, is_transient=True)
        try:
            page = self._attempt(host, url, limits=limits, wants=wants)
        except PageError as error:
            host.num_failures = host.num_failures + 1 if error.is_transient else 0
            if error.is_unreachable:
                self.network.note_failure(url, str(error))
            raise
        host.num_failures = 0
        return page

    def _attempt(
        self,
        host: _Host,
        url: str,
        *,
        limits: RequestLimits,
        wants: Callable[[HttpAnswer], bool],
    ) -> HttpAnswer:
        longest = self._settings.max_wait_seconds
        for attempt in range(self._settings.attempts):
            wait: float | None = None
            try:
                with host.turn():
                    page = request(url, limits, wants=wants)
                self.network.note_answer(url)
                if page.status not in TEMPORARY:
                    return page
                error, wait = PageError(f"status {page.status}", is_transient=True), page.wait
            except PageError as caught:
                if not caught.is_transient or caught.is_timeout:
                    raise
                error = caught
            if attempt + 1 == self._settings.attempts:
                raise error
            if wait is not None and wait > longest:
                raise PageError(
                    f"{error}, with a wait above {longest:g} seconds", is_transient=True
                )
            pause = min(2.0**attempt, longest) if wait is None else wait
            host.pause(pause)
        raise AssertionError("no attempt")

    def _host(self, url: str) -> _Host:
        parts = urlsplit(url)
        with self._lock:
            settings = self._settings
            return self._hosts.setdefault(
                parts.netloc,
                _Host(
                    connections=settings.connections_per_host,
                    seconds=settings.host_seconds,
                    stopped=self.stopped,
                ),
            )

    def _robots(self, url: str) -> Robots:
        host = self._host(url)
        with host.robots_lock:
            if host.robots is None:
                try:
                    host.robots = self._read_robots(url)
                    host.seconds = max(host.seconds, host.robots.delay)
                except PageError as caught:
                    host.robots = caught
            if isinstance(host.robots, PageError):
                raise host.robots.about("robots.txt")
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
        if page.status >= 500:
            raise PageError(f"status {page.status}", is_transient=True)
        return Robots()


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
