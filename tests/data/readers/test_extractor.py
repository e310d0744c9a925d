"""Extractors with hostile pages: limits of time and memory, crashes, missing packages."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.warc_files import PAGE, TEXT
from tokamake.data.readers import _extractor
from tokamake.data.readers._extractor import Extractor, WebPage, open_extractor
from tokamake.data.readers._records import BadRecord
from tokamake.errors import UserError

HOSTILE = {
    "nested": "<div>" * 100_000,
    "unclosed": "<p><a href=x><font>text " * 100_000,
    "attributes": f"<div {' '.join(f'a{number}=1' for number in range(100_000))}>text</div>",
    "formats": "<p><b><i><u><s><a>" * 50_000,
    "misnested": "<a><div>" * 20_000 + "</a>" * 20_000,
    "comments": "<!--" * 100_000,
    "tables": "<table><tr><td>" * 30_000,
    "zeros": "\0" * 100_000,
    "bytes": "",
}


@pytest.mark.parametrize("name", ["resiliparse", "trafilatura"])
def test_pages_after_a_hostile_one_have_their_texts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_extractor, "_SECONDS", 1)
    extractor = Extractor(name, 2)
    good = WebPage(PAGE.encode())
    pages = [WebPage(html.encode() or bytes(range(256)) * 1000) for html in HOSTILE.values()]
    texts = extractor.texts([item for page in pages for item in (page, good)])
    assert texts[1::2] == [TEXT] * len(pages)
    for text in texts[::2]:
        assert isinstance(text, str) or "cannot read the page" in text.reason


def test_a_page_beyond_a_limit_of_memory_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extractor, "_MEMORY_BYTES", 400 << 20)
    extractor = Extractor("resiliparse", 1)
    page = WebPage(("<p><a href='x'><font color=1>text " * 300_000).encode())
    (bad, text) = extractor.texts([page, WebPage(PAGE.encode())])
    assert isinstance(bad, BadRecord)
    assert text == TEXT


def test_a_process_that_something_else_ends_is_an_error() -> None:
    extractor = Extractor("resiliparse", 1)
    extractor.texts([WebPage(PAGE.encode())])
    process = extractor._idle.get()
    extractor._idle.put(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(UserError, match=r"process has ended with status -9.*memory"):
        extractor.texts([WebPage(PAGE.encode())])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extractor, "find_spec", lambda name: None if name == "trafilatura" else 1)
    with pytest.raises(UserError, match=r"trafilatura: needs .* pip install 'tokamake\[corpora\]'"):
        open_extractor("trafilatura", 7)


def test_a_package_that_fails_to_import_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trafilatura.py").write_text("raise ImportError('no lxml')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be imported \(ImportError: no lxml\)"):
        Extractor("trafilatura", 1).texts([WebPage(PAGE.encode())])
