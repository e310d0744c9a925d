"""Connections to web servers, direct or through a proxy, and the addresses that are refused."""

import base64
import http.client
import ipaddress
import socket
import ssl
from contextlib import suppress
from functools import cache
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from tokamake.errors import UserError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for any IPv4 address."""
_PRIVATE_NAMES = ("localhost", "local", "internal", "home.arpa")
"""Domains of private networks (RFC 6761, 6762, 8375 and ICANN's .internal)."""


class PrivateAddressError(Exception):
    """A host is this machine, or is in a private network."""


class Proxy(NamedTuple):
    host: str
    port: int
    headers: dict[str, str]
    """Password, if the proxy needs one."""


class Proxies:
    """Proxies of the environment: http_proxy, https_proxy and no_proxy, also in upper case."""

    def __init__(self) -> None:
        variables = getproxies()
        self._proxies: dict[str, Proxy] = {
            scheme: _parse(f"{scheme}_proxy", variables[scheme])
            for scheme in ("http", "https")
            if scheme in variables
        }

    def find(self, url: str) -> Proxy | None:
        """Return the proxy of a URL; None: the connection is direct, as always to this machine."""
        parts = urlsplit(url)
        proxy = self._proxies.get(parts.scheme)
        if not proxy or proxy_bypass(parts.netloc) or _is_this_machine(parts.hostname or ""):
            return None
        return proxy


def _parse(variable: str, text: str) -> Proxy:
    address = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(address)
        port = parts.port or http.client.HTTP_PORT
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme != "http" or not parts.hostname:
        raise UserError(
            f"{variable}: {address}: not the address of an HTTP proxy; write http://HOST:PORT, or "
            "unset the variable"
        )
    if parts.username is None:
        return Proxy(parts.hostname, port, {})
    password = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    token = base64.b64encode(password.encode()).decode()
    return Proxy(parts.hostname, port, {"Proxy-Authorization": f"Basic {token}"})


class Connection(http.client.HTTPConnection):
    """A connection to an address that was checked: the name is resolved once.

    A proxy resolves names itself. Then only literal addresses and names of private networks are
    refused.
    """

    has_expired = False
    has_answered = False
    """Whether the head of an answer has arrived."""

    def __init__(
        self, url: str, *, seconds: float, allow_private: bool, proxy: Proxy | None
    ) -> None:
        """Note the server of a URL. PrivateAddressError: a proxy may not get its name."""
        parts = urlsplit(url)
        self.name = parts.hostname or ""
        # Without a port, http.client takes the end of an IPv6 address for one.
        port = parts.port or self.default_port
        self._allow_private, self._proxy = allow_private, proxy
        place = (proxy.host, proxy.port) if proxy else (self.name, port)
        super().__init__(*place, timeout=seconds)
        if proxy and not allow_private and _is_private_name(self.name):
            raise PrivateAddressError
        if proxy and parts.scheme == "https":
            self.set_tunnel(self.name, port, proxy.headers)

    def connect(self) -> None:
        """Connect to the proxy, or to the first address of the host that answers."""
        if self._proxy:
            super().connect()
        else:
            self._connect_directly()
        self._check_time()

    def _connect_directly(self) -> None:
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        if not self._allow_private and any(is_private(str(each[4][0])) for each in addresses):
            raise PrivateAddressError
        error: OSError | None = None
        for *_, place in addresses:
            try:
                self.sock = socket.create_connection((str(place[0]), self.port), self.timeout)
            except OSError as caught:
                error = caught
            else:
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


class TlsConnection(Connection):
    default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        """Connect, and check the certificate of the host."""
        super().connect()
        self.sock = _tls().wrap_socket(self.sock, server_hostname=self.name)
        self._check_time()


@cache
def _tls() -> ssl.SSLContext:
    """Settings of TLS; reading all root certificates takes longer than a request."""
    return ssl.create_default_context()


def is_private(address: str) -> bool:
    """Whether an IP address is local, private or multicast."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if inner := ip.ipv4_mapped or ip.sixtofour:
            return is_private(str(inner))
        if ip in _NAT64:
            return is_private(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return not ip.is_global or ip.is_multicast


def _is_private_name(host: str) -> bool:
    """Whether a name, or a literal address, is private without a look-up."""
    if address := _literal_address(host):
        return is_private(address)
    return any(f".{host}".endswith(f".{name}") for name in _PRIVATE_NAMES)


def _is_this_machine(host: str) -> bool:
    address = _literal_address(host)
    return host == "localhost" or bool(address and ipaddress.ip_address(address).is_loopback)


def _literal_address(host: str) -> str:
    """Return a literal address in its usual form; empty: the host is a name."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    with suppress(OSError, UnicodeError):  # 127.1 and 0x7f.0.0.1 are addresses, too
        return socket.inet_ntoa(socket.inet_aton(host))
    return ""
