"""Pages of a server that misbehaves: each URL has a page or a reason."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.web_sites import WebSite, page, serving
from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.urls import hosts
from tokamake.data.urls.cleaning import read_blacklist
from tokamake.data.urls.hosts import Crawler, _redirected
from tokamake.data.urls.pages import HttpAnswer, PageError


@pytest.fixture
def site() -> Iterator[WebSite]:
    with serving() as site:
        yield site


def crawler(**changes: Any) -> Crawler:
    settings = {"host_seconds": 0, "allow_private_addresses": True, "page_seconds": 1, **changes}
    return Crawler(
        FetchUrlsSettings.model_validate(settings), read_blacklist(None, with_default=True)
    )


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/private/page", "robots.txt"),
        ("/to/private/page", "robots.txt"),
        ("/missing", "status 404"),
        ("/loop", "too many redirects"),
        ("/picture", "content type image/png"),
        ("/endless", "larger than 100,000 bytes"),
        ("/slow", "longer than 1 seconds"),
        ("/cut", "cut by the server"),
        ("/to/file.pdf", "redirected to a URL to leave out: extension"),
        ("/to//youtube.com/watch", "redirected to a URL to leave out: domain"),
    ],
)
def test_a_page_that_is_not_kept_has_a_reason(site: WebSite, path: str, reason: str) -> None:
    with pytest.raises(PageError) as caught:
        crawler(max_page_bytes=100_000, attempts=1).fetch(site.url + path)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("path", "is_transient", "is_unreachable"),
    [
        ("/missing", False, False),
        ("/endless", False, False),
        ("/busy", True, False),
        ("/cut", True, False),
        ("/slow", True, False),
        ("/hang/1", True, True),
    ],
)
def test_failures_are_permanent_or_may_pass(
    site: WebSite, path: str, is_transient: bool, is_unreachable: bool
) -> None:
    site.refusals["/busy"] = [(503, "")]
    with pytest.raises(PageError) as caught:
        crawler(max_page_bytes=100_000, attempts=1).fetch(site.url + path)
    assert (caught.value.is_transient, caught.value.is_unreachable) == (
        is_transient,
        is_unreachable,
    )


@pytest.mark.parametrize("path", ["/page", "/private/open", "/chunked", "/to/to/page"])
def test_a_page_comes_as_the_server_sent_it(site: WebSite, path: str) -> None:
    found = crawler(user_agent="mine/2 (+https://example.org)").fetch(site.url + path)
    assert found.url == site.url + path.removeprefix("/to/to")
    assert found.body == page(path.removeprefix("/to/to"))
    assert site.user_agents == {"mine/2 (+https://example.org)"}


def test_a_busy_server_gets_the_request_again_when_it_asks(site: WebSite) -> None:
    site.refusals["/busy"] = [(429, "1"), (503, "")]
    assert crawler(max_wait_seconds=1).fetch(f"{site.url}/busy").status == 200
    times = [seconds for path, seconds in site.requests if path == "/busy"]
    assert len(times) == 3
    assert times[1] - times[0] >= 0.99
    site.refusals["/busy"] = [(429, "3600")]
    with pytest.raises(PageError, match="status 429, with a wait above 60 seconds"):
        crawler().fetch(f"{site.url}/busy")
    site.refusals["/busy"] = [(500, "0")] * 5
    with pytest.raises(PageError, match=r"^status 500$"):
        crawler(attempts=2).fetch(f"{site.url}/busy")
    assert len(site.refusals["/busy"]) == 3


def test_without_robots_txt_all_is_allowed_and_with_a_broken_one_nothing(site: WebSite) -> None:
    site.robots = None
    assert crawler().fetch(f"{site.url}/private/page").status == 200
    site.refusals["/robots.txt"] = [(503, "0")] * 2
    broken = crawler(attempts=2)
    for _ in range(2):  # the second time without a request
        with pytest.raises(PageError, match=r"^robots.txt: status 503$"):
            broken.fetch(f"{site.url}/page")
    broken.forget_failures()
    assert broken.fetch(f"{site.url}/page").status == 200
    site.robots = "User-agent: *\nCrawl-delay: 1000\n"
    with pytest.raises(PageError, match=r"^robots.txt: Crawl-delay above 60 seconds$"):
        crawler().fetch(f"{site.url}/page")


def test_private_addresses_need_a_setting(site: WebSite) -> None:
    with pytest.raises(PageError, match="private address"):
        crawler(allow_private_addresses=False).fetch(f"{site.url}/page")
    assert not site.requests


@pytest.mark.parametrize(("most", "seconds"), [(1, 0.0), (3, 0.1)])
def test_threads_keep_the_pace_of_a_host(site: WebSite, most: int, seconds: float) -> None:
    polite = crawler(connections_per_host=most, host_seconds=seconds)
    start = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(polite.fetch, [f"{site.url}/{number}" for number in range(8)]))
    assert site.most_running <= most
    assert len(site.requests) == 9  # and robots.txt once
    assert time.monotonic() - start >= 8 * seconds


def test_waits_for_a_host_add_up(site: WebSite, monkeypatch: pytest.MonkeyPatch) -> None:
    polite, waits = crawler(connections_per_host=3, host_seconds=2), list[float]()

    def note(seconds: float) -> bool:
        waits.append(seconds)
        return False

    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(polite.stopped, "wait", note)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(polite.fetch, [f"{site.url}/{number}" for number in range(8)]))
    assert sorted(waits) == [2.0 * number for number in range(9)]


def test_hosts_that_do_not_answer_are_unreachable() -> None:
    with pytest.raises(PageError) as caught:
        crawler(attempts=1).fetch("http://127.0.0.1:9/")
    assert str(caught.value) == "robots.txt: no connection"
    assert caught.value.is_unreachable


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("b?c=d", "http://a.org/b?c=d"),
        ("/café".encode().decode("latin-1"), "http://a.org/café"),
        ("/caf\xe9", "http://a.org/café"),
        ("http://[bad", ""),
        ("", ""),
    ],
)
def test_a_redirect_is_utf_8_or_latin_1_and_an_invalid_one_leads_nowhere(
    location: str, target: str
) -> None:
    answer = HttpAnswer("http://a.org/page", 302, "Found", (("Location", location),), b"")
    assert _redirected(answer) == target
