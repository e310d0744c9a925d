"""Requests of pages: one URL, within limits of bytes and seconds, at an address that is allowed."""

import http.client
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from threading import Timer
from typing import NamedTuple
from urllib.parse import quote, urlsplit

TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which another attempt may succeed."""
REDIRECTS = (301, 302, 303, 307, 308)
_BLOCK = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for any IPv4 address."""


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
    """A URL has no page, for a reason that a table of reasons can count."""

    def __init__(
        self, reason: str, *, is_temporary: bool = False, is_unreachable: bool = False
    ) -> None:
        """Note the reason, and whether another attempt, or another network, may succeed."""
        super().__init__(reason)
        self.is_temporary, self.is_unreachable = is_temporary, is_unreachable


class RequestLimits(NamedTuple):
    """RequestLimits of a request."""

    user_agent: str
    max_bytes: int
    seconds: float
    allow_private: bool


def request(url: str, limits: RequestLimits, *, wants: Callable[[HttpAnswer], bool]) -> HttpAnswer:
    """Send a GET request, without redirects. `wants` decides by status and headers on the body.

    Raises:
        PageError: there is no answer within the limits.
    """
    parts = urlsplit(url)
    kind = _TlsConnection if parts.scheme == "https" else _Connection
    connection = kind(parts.hostname or "", parts.port, timeout=limits.seconds)
    connection.allow_private = limits.allow_private
    # Socket timeouts alone would let a server send a byte now and then for ever.
    timer = Timer(limits.seconds, connection.expire)
    timer.daemon = True
    timer.start()
    try:
        page = _answer(connection, url, limits, wants=wants)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if connection.has_expired or isinstance(error, TimeoutError):
            raise _too_long(limits) from None
        raise _connection_error(error) from None
    finally:
        timer.cancel()
        connection.close()
    if connection.has_expired:  # what was read may be a part
        raise _too_long(limits)
    return page


def _answer(
    connection: "_Connection",
    url: str,
    limits: RequestLimits,
    *,
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
    connection.request("GET", target, headers=headers)
    response = connection.getresponse()
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
        raise PageError("cut by the server", is_temporary=True)
    return b"".join(parts)


def _too_long(limits: RequestLimits) -> PageError:
    return PageError(f"longer than {limits.seconds:g} seconds")


def _connection_error(error: Exception) -> PageError:
    if isinstance(error, socket.gaierror):
        is_unknown = error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None))
        return PageError("no such host", is_temporary=not is_unknown, is_unreachable=True)
    if isinstance(error, ssl.SSLCertVerificationError):
        return PageError("invalid certificate")
    if isinstance(error, ValueError | http.client.HTTPException) and not isinstance(error, OSError):
        return PageError("invalid answer", is_temporary=True)
    return PageError("no connection", is_temporary=True, is_unreachable=True)


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was checked: the name is resolved once."""

    allow_private = False
    has_expired = False

    def connect(self) -> None:
        """Connect to the first address of the host that answers."""
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        if not self.allow_private and any(_is_private(each[4][0]) for each in addresses):
            raise PageError("private address")
        error: OSError | None = None
        for *_, place in addresses:
            try:
                self.sock = socket.create_connection((str(place[0]), self.port), self.timeout)
            except OSError as caught:
                error = caught
            else:
                self._check_time()
                return
        raise error or OSError("no address")

    def _check_time(self) -> None:
        """Raise TimeoutError if the time ended while there was no socket to shut down."""
        if self.has_expired:
            raise TimeoutError

    def expire(self) -> None:
        """End the connection: its time is over."""
        self.has_expired = True
        with suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


class _TlsConnection(_Connection):
    default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        """Connect, and check the certificate of the host."""
        super().connect()
        self.sock = _tls().wrap_socket(self.sock, server_hostname=self.host)
        self._check_time()


@cache
def _tls() -> ssl.SSLContext:
    """Settings of TLS; reading all root certificates takes longer than a request."""
    return ssl.create_default_context()


def _is_private(address: object) -> bool:
    """Whether an IP address is local, private or multicast."""
    ip = ipaddress.ip_address(str(address).partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if inner := ip.ipv4_mapped or ip.sixtofour:
            return _is_private(inner)
        if ip in _NAT64:
            return _is_private(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    return not ip.is_global or ip.is_multicast
