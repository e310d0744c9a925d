"""The journal of a job that was killed, or whose machine crashed."""

from pathlib import Path

import pytest

from tests.support.web_sites import page
from tokamake.data.urls.journal import Journal
from tokamake.data.urls.pages import HttpAnswer, PageError

pytestmark = pytest.mark.extra("corpora", "fastwarc")
URLS = [f"http://a.org/{number}" for number in range(6)]


def journal(folder: Path) -> Journal:
    return Journal(folder / "0.warc.gz", URLS, progress=folder / "progress")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """The outcomes of all URLs: pages, and one failure of each kind at the end."""
    made = journal(tmp_path)
    for url in URLS[:3]:
        made.keep(url, HttpAnswer(url, 200, "OK", (("Content-Type", "text/html"),), page(url)))
    made.fail(URLS[3], PageError("status 404"))
    made.fail(URLS[4], PageError("no connection", is_transient=True, is_unreachable=True))
    made.fail(URLS[5], PageError("no such host", is_unreachable=True))
    made.close()
    return tmp_path / "0.warc.gz!outcomes"


def restored(folder: Path) -> list[str]:
    made = journal(folder)
    made.close()
    return list(made.outcomes)


def test_a_new_job_repeats_failures_that_may_pass(lines: Path) -> None:
    assert restored(lines.parent) == URLS[:4]


@pytest.mark.parametrize("damage", ["hole", "cut", "no JSON", "another value", "no place"])
def test_damaged_lines_are_fetched_again(lines: Path, damage: str) -> None:
    whole = lines.read_bytes()
    first, second, rest = whole.split(b"\n", 2)
    damaged = {
        "hole": bytes(len(first) + 10) + second[9:],  # also over the end of the line
        "cut": first[:50] + b"\n" + second[:-1],
        "no JSON": b"\xff\n" + first[1:],
        "another value": b"[1]\n7",
        "no place": first.replace(b'"start"', b'"other"')
        + b'\n{"url": 3, "outcome": "status 404"}',
    }[damage]
    lines.write_bytes(damaged + b"\n" + rest)
    assert restored(lines.parent) == URLS[2:4]


def test_a_kill_while_it_is_restored_loses_nothing(
    lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    whole = lines.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            journal(lines.parent)
    assert lines.read_bytes() == whole
    assert restored(lines.parent) == URLS[:4]
