"""Requests of pages: one URL, within limits of bytes and seconds, at an address that is allowed."""

import http.client
import re
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from threading import Timer
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tokamake.data.urls.connections import (
    Connection,
    PrivateAddressError,
    Proxies,
    Proxy,
    TlsConnection,
)
from tokamake.errors import UserError

TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which another attempt may succeed."""
REDIRECTS = (301, 302, 303, 307, 308)
UNAVAILABLE = "host unavailable"
"""Reason of URLs that are not requested, because their host does not answer."""
_BLOCK = 1 << 16
_GATEWAY = (502, 503, 504)
"""Statuses of a proxy that cannot reach a server."""
_NO_PASSWORD = 407


class HttpAnswer(NamedTuple):
    """The answer of a server."""

    url: str
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    """As sent, maybe with a content encoding; empty if it was not wanted."""

    def header(self, name: str) -> str:
        """Value of a header; empty: it is missing."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def media_type(self) -> str:
        return self.header("content-type").partition(";")[0].strip().lower()

    @property
    def wait(self) -> float | None:
        """Seconds that the server asks to wait (Retry-After), a number or a date."""
        text = self.header("retry-after").strip()
        if re.fullmatch(r"[0-9]{1,9}", text):
            return float(text)
        with suppress(ValueError, TypeError, OverflowError):
            return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
        return None


class PageError(Exception):
    """A URL has no page, for a reason that a table of reasons can count.

    `is_transient`: the URL may have a page another time. `is_unreachable`: the server sent nothing,
    maybe because the network of this machine is down. `is_timeout`: another attempt at once would
    take as long again.
    """

    def __init__(
        self,
        reason: str,
        *,
        is_transient: bool = False,
        is_unreachable: bool = False,
        is_timeout: bool = False,
    ) -> None:
        super().__init__(reason)
        self.is_transient, self.is_unreachable = is_transient, is_unreachable
        self.is_timeout = is_timeout

    @property
    def may_pass(self) -> bool:
        """Whether the reason may be an outage of this machine's network, or of the server."""
        return self.is_transient or self.is_unreachable

    def about(self, subject: str) -> "PageError":
        """Return the same error of another subject, such as robots.txt."""
        return PageError(
            f"{subject}: {self}", is_transient=self.is_transient, is_unreachable=self.is_unreachable
        )


class RequestLimits(NamedTuple):
    user_agent: str
    max_bytes: int
    seconds: float
    allow_private: bool
    proxies: Proxies


def request(url: str, limits: RequestLimits, *, wants: Callable[[HttpAnswer], bool]) -> HttpAnswer:
    """Send a GET request, without redirects. `wants` decides by status and headers on the body.

    Raises:
        PageError: there is no answer within the limits.
        UserError: the proxy asks for a password.
    """
    kind = TlsConnection if urlsplit(url).scheme == "https" else Connection
    proxy = limits.proxies.find(url)
    try:
        connection = kind(
            url, seconds=limits.seconds, allow_private=limits.allow_private, proxy=proxy
        )
        # Socket timeouts alone would let a server send a byte now and then for ever.
        timer = Timer(limits.seconds, connection.expire)
        timer.daemon = True
        timer.start()
        try:
            page = _answer(connection, url, limits, proxy=proxy, wants=wants)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if connection.has_expired or isinstance(error, TimeoutError):
                raise _too_long(connection, limits) from None
            raise _connection_error(error, connection, proxy=proxy) from None
        finally:
            timer.cancel()
            connection.close()
    except PrivateAddressError:
        raise PageError("private address") from None
    if connection.has_expired:  # what was read may be a part
        raise _too_long(connection, limits)
    return page


def _answer(
    connection: Connection,
    url: str,
    limits: RequestLimits,
    *,
    proxy: Proxy | None,
    wants: Callable[[HttpAnswer], bool],
) -> HttpAnswer:
    parts = urlsplit(url)
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._[]")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._[]?")
    headers = {
        "User-Agent": limits.user_agent,
        "Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.1",
        "Accept-Encoding": "gzip",
        "Connection": "close",
    }
    by_proxy = proxy if parts.scheme == "http" else None  # of https, it sees a tunnel only
    if by_proxy:
        target, headers = f"http://{parts.netloc}{target}", {**headers, **by_proxy.headers}
    connection.request("GET", target, headers=headers)
    response = connection.getresponse()
    is_refusal = response.status == _NO_PASSWORD
    # Servers that are busy send Retry-After.
    is_refusal |= response.status in _GATEWAY and not response.getheader("Retry-After")
    if by_proxy and is_refusal:
        raise _proxy_error(response.status, by_proxy)
    connection.has_answered = True
    page = HttpAnswer(url, response.status, response.reason, tuple(response.getheaders()), b"")
    return page._replace(body=_body(response, limits)) if wants(page) else page


def _body(response: http.client.HTTPResponse, limits: RequestLimits) -> bytes:
    too_large = PageError(f"larger than {limits.max_bytes:,} bytes")
    if (response.length or 0) > limits.max_bytes:
        raise too_large
    parts, size = [], 0
    while block := response.read(_BLOCK):
        parts.append(block)
        size += len(block)
        if size > limits.max_bytes:
            raise too_large
    if response.length:  # http.client reports no end before the stated length
        raise PageError("cut by the server", is_transient=True)
    return b"".join(parts)


def _too_long(connection: Connection, limits: RequestLimits) -> PageError:
    return PageError(
        f"longer than {limits.seconds:g} seconds",
        is_transient=True,
        is_unreachable=not connection.has_answered,
        is_timeout=True,
    )


def _connection_error(
    error: Exception, connection: Connection, *, proxy: Proxy | None
) -> PageError:
    if isinstance(error, socket.gaierror):
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
            return PageError("no such host", is_unreachable=True)
        return PageError("name not resolved", is_transient=True, is_unreachable=True)
    if isinstance(error, ssl.SSLCertVerificationError):
        return PageError("invalid certificate")
    if isinstance(error, ValueError | http.client.HTTPException) and not isinstance(error, OSError):
        return PageError("invalid answer", is_transient=True)
    if proxy and (refusal := re.match(r"Tunnel connection failed: (\d+)", str(error))):
        return _proxy_error(int(refusal[1]), proxy)
    return PageError("no connection", is_transient=True, is_unreachable=not connection.has_answered)


def _proxy_error(status: int, proxy: Proxy) -> PageError:
    """Return the error of a status that a proxy sends in place of the server's answer."""
    if status == _NO_PASSWORD:
        raise UserError(
            f"proxy {proxy.host}:{proxy.port}: refuses the user or the password (status 407); "
            "write http://USER:PASSWORD@HOST:PORT in http_proxy and https_proxy"
        )
    is_transient = status >= 500 or status in TEMPORARY
    return PageError(f"proxy: status {status}", is_transient=is_transient, is_unreachable=True)
