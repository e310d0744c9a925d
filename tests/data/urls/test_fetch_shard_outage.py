"""Outages of the network, and hosts that do not answer: what is recorded, and what is repeated."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.urls.test_fetch_shard import fetch, outcomes
from tests.support.web_sites import WebSite, serving
from tokamake.data.urls.fetch_shard import outcomes_path
from tokamake.errors import TemporaryError

pytestmark = pytest.mark.extra("corpora", "fastwarc", "resiliparse")
DOWN = "the network of this machine seems to be down"


@pytest.fixture
def site() -> Iterator[WebSite]:
    with serving(all_hosts=True) as site:
        yield site


def urls(site: WebSite, num_hosts: int) -> list[str]:
    return [site.on(host, f"/{page}") for page in "ab" for host in range(2, 2 + num_hosts)]


def test_no_page_counts_as_missing_after_the_network_went_down(
    site: WebSite, tmp_path: Path
) -> None:
    path, listed = tmp_path / "list/0.warc.gz", urls(site, 60)
    site.pages_until_outage = 60
    with pytest.raises(TemporaryError, match=f"^0.warc.gz: {DOWN}"):
        fetch(listed, path)
    assert not path.exists()
    assert len(site.paths()) < 120 - 10  # it stopped before it tried all pages
    site.pages_until_outage = -1
    first = len(site.paths())
    assert fetch(listed, path) == {"fetched": 120}
    assert len(site.paths()) - first == 60  # pages from before the outage are kept


def test_pages_of_a_short_outage_are_fetched_at_the_end(site: WebSite, tmp_path: Path) -> None:
    path, listed = tmp_path / "list/0.warc.gz", urls(site, 30)
    site.num_lost = 15
    assert fetch(listed, path) == {"fetched": 60}
    assert len(site.paths()) == 75
    assert [line["url"] for line in outcomes(path)] == listed


@pytest.mark.parametrize("num_hosts", [1, 60])
def test_a_network_that_is_down_from_the_start_records_nothing(
    site: WebSite, tmp_path: Path, num_hosts: int
) -> None:
    path, listed = tmp_path / "list/0.warc.gz", urls(site, num_hosts)
    site.pages_until_outage = 0
    for _ in range(2):
        with pytest.raises(TemporaryError, match=DOWN):
            fetch(listed, path)
    site.pages_until_outage = -1
    assert fetch(listed, path) == {"fetched": 2 * num_hosts}


def test_a_host_that_is_gone_is_recorded_if_others_answer(site: WebSite, tmp_path: Path) -> None:
    path = tmp_path / "list/0.warc.gz"
    dead = "http://127.0.0.1:9/page"
    assert fetch([site.on(2, "/a"), site.on(2, "/missing"), dead], path) == {
        "fetched": 1,
        "status 404": 1,
        "robots.txt: no connection": 1,
    }
    assert [line.get("transient") for line in outcomes(path)] == [None, False, True]
    # Other files have no other host; hosts of the first one answer.
    for name in ("list/1.warc.gz", "again/0.warc.gz"):
        counts = fetch([dead], tmp_path / name, of_corpus=[path, tmp_path / name])
        assert counts == {"robots.txt: no connection": 1}


def test_a_corpus_without_any_page_is_tried_again_by_the_next_job(
    site: WebSite, tmp_path: Path
) -> None:
    path = tmp_path / "list/0.warc.gz"
    fetch([site.on(9, "/a")], tmp_path / "other/0.warc.gz")
    listed = [site.on(host, f"/{page}") for page in "ab" for host in range(2, 5)]
    site.refusals = {"/a": [(503, "0")] * 12, "/b": [(500, "0")] * 12}
    message = (
        "^0.warc.gz: no page of 7 URLs could be fetched: 3 status 503, 3 status 500, 1 status 404; "
        "check network, proxy and servers, and run again, which tries transient failures "
        "again; if these servers are gone for good, correct the list$"
    )
    for _ in range(2):
        with pytest.raises(TemporaryError, match=message):
            fetch([*listed, site.on(2, "/missing")], path)
        assert not path.exists()
        assert not outcomes_path(path).exists()
    site.refusals = {}
    assert fetch([*listed, site.on(2, "/missing")], path) == {"fetched": 6, "status 404": 1}
    # Without a page, permanent failures are the result of a list.
    assert fetch([site.on(2, "/missing")], tmp_path / "gone/0.warc.gz") == {"status 404": 1}


def test_a_host_that_hangs_is_given_up(site: WebSite, tmp_path: Path) -> None:
    path = tmp_path / "list/0.warc.gz"
    listed = [site.on(2, f"/hang/{number}") for number in range(30)]
    listed += [site.on(3, f"/{number}") for number in range(3)]
    assert fetch(listed, path, page_seconds=0.3, host_failures=2) == {
        "fetched": 3,
        "longer than 0.3 seconds": 2,
        "host unavailable": 28,
    }
    assert all(line["transient"] for line in outcomes(path)[:30])
    assert len([each for each in site.paths() if each.startswith("/hang/")]) == 4  # twice two


def test_one_answer_is_enough_to_go_on_with_a_host(site: WebSite, tmp_path: Path) -> None:
    site.refusals = {f"/{number}": [(503, "0")] * 2 for number in (0, 1, 3, 4)}
    listed = [site.on(2, f"/{number}") for number in range(6)]
    counts = fetch(listed, tmp_path / "list/0.warc.gz", host_failures=3)
    assert counts == {"fetched": 2, "status 503": 4}
