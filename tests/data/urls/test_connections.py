"""Requests through proxies, and addresses that are private."""

import base64
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.proxy import Proxy, proxy_to
from tests.support.tls_server import tls_server
from tests.support.web_sites import WebSite, page, serving
from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.urls import connections
from tokamake.data.urls.cleaning import read_blacklist
from tokamake.data.urls.connections import Connection
from tokamake.data.urls.hosts import Crawler
from tokamake.data.urls.pages import PageError
from tokamake.errors import UserError


def crawler(**changes: Any) -> Crawler:
    settings = {"host_seconds": 0, "attempts": 1, "page_seconds": 5, **changes}
    return Crawler(
        FetchUrlsSettings.model_validate(settings), read_blacklist(None, with_default=True)
    )


@pytest.fixture
def site() -> Iterator[WebSite]:
    with serving() as site:
        yield site


@pytest.fixture
def proxy(site: WebSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_to(int(site.url.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        yield proxy


def test_pages_come_through_a_proxy_that_resolves_the_names(site: WebSite, proxy: Proxy) -> None:
    found = crawler().fetch("http://rivers.example/page?a=1")
    assert (found.url, found.body) == ("http://rivers.example/page?a=1", page("/page"))
    assert [target for target, _ in proxy.requests] == [
        "http://rivers.example/robots.txt",
        "http://rivers.example/page?a=1",
    ]
    assert site.paths() == ["/page"]


def test_no_proxy_and_this_machine_are_direct(
    site: WebSite, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, *_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, host)

    monkeypatch.setenv("no_proxy", "rivers.example,.lakes.example")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolve)
        for host in ("rivers.example", "blue.lakes.example"):
            with pytest.raises(PageError, match=r"^robots.txt: name not resolved$"):
                crawler().fetch(f"http://{host}/page")
    assert crawler(allow_private_addresses=True).fetch(f"{site.url}/page").status == 200
    with pytest.raises(PageError, match="private address"):
        crawler().fetch(f"{site.url}/page")
    assert not proxy.requests


@pytest.mark.parametrize(
    "host", ["10.1.2.3", "[fd00::1]", "192.168.1", "0xa.1.2.3", "db.internal", "nas.local"]
)
def test_private_hosts_are_refused_before_a_proxy_gets_them(proxy: Proxy, host: str) -> None:
    with pytest.raises(PageError, match="private address"):
        crawler().fetch(f"http://{host}/page")
    assert not proxy.requests
    assert crawler(allow_private_addresses=True).fetch(f"http://{host}/page").status == 200
    assert proxy.requests


def test_a_proxy_may_need_a_password(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"me:s%40fe@{proxy.address}")
    crawler().fetch("http://rivers.example/page")
    token = base64.b64encode(b"me:s@fe").decode()
    assert {password for _, password in proxy.requests} == {f"Basic {token}"}
    proxy.status = 407
    with pytest.raises(UserError, match=r"^proxy 127.0.0.1:\d+: refuses .* \(status 407\); write"):
        crawler().fetch("http://rivers.example/page")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_reaches_no_server_may_be_an_outage(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("https_proxy", proxy.address)
    proxy.status = 504
    with pytest.raises(PageError, match=r"^robots.txt: proxy: status 504$") as caught:
        crawler().fetch(f"{scheme}://rivers.example/page")
    assert caught.value.is_unreachable
    assert caught.value.is_transient


def test_https_goes_through_a_tunnel_and_checks_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tls_server(tmp_path, "rivers.example") as (port, trusting), proxy_to(port) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:word@{proxy.address}")
        monkeypatch.setattr(connections, "_tls", lambda: trusting)
        assert crawler().fetch("https://rivers.example/page").body == b"hello"
        assert {target for target, _ in proxy.requests} == {"rivers.example:443"}
        assert all(password.startswith("Basic ") for _, password in proxy.requests)
        with pytest.raises(PageError, match="invalid certificate"):
            crawler().fetch("https://lakes.example/page")


@pytest.mark.parametrize("value", ["socks5://127.0.0.1:1080", "http://", "http://host:port"])
def test_a_proxy_of_another_kind_is_a_mistake(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", value)
    with pytest.raises(UserError, match=r"^https_proxy: .* not the address of an HTTP proxy"):
        crawler()


def test_time_may_end_before_there_is_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    connect = connections.socket.create_connection

    def late(*place: object) -> object:
        made.expire()  # as the timer does
        return connect(*place)

    url = f"http://127.0.0.1:{server.server_port}/"
    made = Connection(url, seconds=5, allow_private=True, proxy=None)
    monkeypatch.setattr(connections.socket, "create_connection", late)
    with pytest.raises(TimeoutError):
        made.connect()
    made.close()
    server.server_close()


@pytest.mark.parametrize(
    ("address", "is_private"),
    [
        ("93.184.216.34", False),
        ("2606:2800:220:1::1", False),
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("169.254.169.254", True),
        ("224.0.0.1", True),
        ("0.0.0.0", True),
        ("::1", True),
        ("fe80::1%eth0", True),
        ("fd00::1", True),
        ("::ffff:10.0.0.1", True),
        ("2002:7f00:1::", True),
        ("64:ff9b::a00:1", True),
    ],
)
def test_addresses_of_this_machine_and_of_private_networks(address: str, is_private: bool) -> None:
    assert connections.is_private(address) == is_private
