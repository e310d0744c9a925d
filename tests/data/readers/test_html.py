"""Pages as files, in folders and archives; names and contents that are pages or are not."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.readings import PACK, read
from tests.support.warc_files import PAGE, TEXT
from tokamake.data.readers import html, is_one_document, open_input, sniff
from tokamake.errors import UserError
from tokamake.files import sha256


def write(path: Path, data: str | bytes = PAGE) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("name", ["a.html", "a.HTM", "a.xhtml"])
@pytest.mark.parametrize("packing", ["", *PACK])
def test_a_page_is_one_document(tmp_path: Path, name: str, packing: str) -> None:
    path = write(
        tmp_path / f"{name}.{packing}".rstrip("."), PACK.get(packing, bytes)(PAGE.encode())
    )
    assert sniff(path) == ("html", packing)
    assert read(path) == [TEXT]
    assert is_one_document("html")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_pages_have_any_encoding(tmp_path: Path, encoding: str) -> None:
    page = PAGE.replace("sea", "Übersee").replace("<head>", "<head><meta charset=windows-1252>")
    assert read(write(tmp_path / "a.html", page.encode(encoding))) == [
        TEXT.replace("sea", "Übersee")
    ]


def test_other_names_need_the_format(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", PAGE.encode("utf-16"))
    with pytest.raises(UserError, match="is UTF-16, not UTF-8"):
        read(path)
    assert read(path, format="html") == [TEXT]
    with pytest.raises(UserError, match=r"is an HTML page or an error page.*the format html"):
        read(write(tmp_path / "a.jsonl"))
    assert read(write(tmp_path / "b.html"), format="text") == [PAGE]


def test_names_of_pages_do_not_hide_other_formats(tmp_path: Path) -> None:
    line = json.dumps({"text": "one"})
    assert read(write(tmp_path / "a.html", line)) == ["one"]
    with pytest.raises(UserError, match="PDF"):
        read(write(tmp_path / "b.html", "%PDF-1.7"))


def test_the_place_of_a_page_is_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text(PAGE)
    source = open_input(path)
    (block,) = source.blocks(("text",))
    assert source.place(int(block.numbers[0]), int(block.offsets[0])) == str(path)


def test_pages_in_archives(tmp_path: Path) -> None:
    page = PAGE.encode("utf-16")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x/a.html", page)
        archive.writestr("x/b.txt", "two")
    assert read(tmp_path / "a.zip") == [TEXT, "two"]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("a.htm")
        member.size = len(page)
        tar.addfile(member, io.BytesIO(page))
    formats = ("", "archive: {extractor: trafilatura}")
    assert [read(tmp_path / "a.tar", format=format) for format in formats] == [[TEXT]] * 2


def test_a_page_has_one_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds one text, not a, b"):
        [*open_input(write(tmp_path / "a.html")).blocks(("a", "b"))]


def test_a_page_that_is_too_long_is_a_bad_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "LONGEST_PAGE_BYTES", 5)
    path = write(tmp_path / "a.html")
    source = open_input(path)
    (block,) = source.blocks(("text",))
    assert [record.reason for record in block.records] == ["longer than 5 bytes; leave it out"]
    assert source.sha256 == sha256(path)  # of the whole file
