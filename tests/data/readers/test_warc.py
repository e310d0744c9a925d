"""Records of WARC and WET files, the texts of their pages, and damaged files."""

import gzip
import json
import re
import zlib
from pathlib import Path

import pytest

from tests.support.readings import PACK, read, records, small_steps
from tests.support.warc_files import PAGE, TEXT, conversion, record, response
from tokamake.data.indexed.trace import trace
from tokamake.data.readers import BadRecord, open_input, sniff, warc
from tokamake.data.readers._extractor import Extractor
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError

INFO = record("warcinfo", b"software: x\r\n")
REQUEST = record("request", b"GET / HTTP/1.1\r\n\r\n", Content_Type="application/http")


def write(folder: Path, *parts: bytes, name: str = "a.warc") -> Path:
    path = folder / name
    path.write_bytes(b"".join(parts))
    return path


@pytest.mark.parametrize("step", [1, 3, 1 << 19])
@pytest.mark.parametrize("packing", ["", *PACK])
def test_texts_of_conversion_records_stay_as_they_are(
    tmp_path: Path, packing: str, step: int
) -> None:
    texts = ["one\n\n", "zwei\r\n\r\nWARC/1.0\r\n", "", "üç 😀"]
    pack = PACK.get(packing, bytes)
    path = write(tmp_path, *(pack(part) for part in [INFO, *map(conversion, texts)]))
    assert sniff(path) == ("warc", packing)
    with small_steps(step):
        assert read(path) == texts


def test_a_page_has_its_main_text_and_fields_for_filters(tmp_path: Path) -> None:
    path = write(tmp_path, INFO, REQUEST, response(headers="Content-Type: text/html"))
    raw = open_input(path)
    (block,) = raw.blocks(("text",))
    assert [*block.records] == [
        {
            "text": TEXT,
            "url": "http://example.org/",
            "date": "2024-01-02T03:04:05Z",
            "content_type": "text/html",
            "record_id": "<urn:uuid:1>",
            "language": "",
        }
    ]
    assert block.numbers.tolist() == [2]
    assert block.offsets.tolist() == [len(INFO + REQUEST)]
    assert raw.place(2) == f"{path}: record 2"


def test_records_that_are_no_documents_count_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(warc._LIMITS, "response", 5000)
    raw = open_input(
        write(
            tmp_path,
            INFO,
            REQUEST,
            record("response", b"x", Content_Type="text/dns"),
            response(status=404),
            response(headers="Content-Type: image/png"),
            response(PAGE + "x" * 5000),
            response(""),
            conversion("one"),
        )
    )
    assert [item["text"] for item in records(raw)] == ["", "one"]
    assert raw.documents == 2
    assert raw.skipped == {
        "records of type warcinfo": 1,
        "records of type request": 1,
        "responses that are not HTTP": 1,
        "responses with HTTP status 404 (Not Found)": 1,
        "responses that are not HTML": 1,
        "records longer than 5,000 bytes": 1,
    }


LATIN = PAGE.replace("sea", "Übersee café")


@pytest.mark.parametrize(
    ("page", "headers"),
    [
        (LATIN.encode("latin-1"), "Content-Type: text/html; charset=latin-1"),
        (LATIN.replace("<head>", "<head><meta charset=cp1252>").encode("cp1252"), ""),
        (LATIN.encode(), "Content-Type: text/html"),
        (("\ufeff" + LATIN).encode("utf-16-le"), "Content-Type: text/html; charset=utf-8"),
        (gzip.compress(LATIN.encode()), "Content-Type: text/html\r\nContent-Encoding: gzip"),
        (zlib.compress(LATIN.encode()), "Content-Type: text/html\r\nContent-Encoding: deflate"),
        (LATIN.encode(), "Content-Type: text/html\r\nContent-Encoding: gzip"),
        (LATIN.encode(), "Content-Type: text/html\r\nTransfer-Encoding: chunked"),
        (
            f"{len(LATIN.encode()):x}\r\n{LATIN}\r\n0\r\n\r\n".encode(),
            "Content-Type: text/html\r\nTransfer-Encoding: chunked",
        ),
    ],
)
def test_encodings_of_pages(tmp_path: Path, page: bytes, headers: str) -> None:
    path = write(tmp_path, response(page, headers=headers or "Content-Type: text/html"))
    assert read(path) == [TEXT.replace("sea", "Übersee café")]


DAMAGE = {
    "cut in a content": (lambda a, b: a + b[:-50], "is cut by the end of the file at byte"),
    "cut in a header": (lambda a, b: a + b[:30], "is cut by the end of the file at byte"),
    "cut in its end": (lambda a, b: a + b[:-2], "is cut by the end of the file at byte"),
    "garbage at the end": (lambda a, b: a + b + b"garbage", "does not begin with WARC/"),
    "garbage between": (lambda a, b: a + b"garbage\r\n" + b, "does not begin with WARC/"),
    "too short": (lambda a, b: a + response(length=50) + b, "does not end after its Content-Len"),
    "too long": (lambda a, b: a + response(length=400) + b, "does not end after its Content-Len"),
    "huge": (lambda a, b: a + response(length=10**15) + b, "is cut by the end of the file"),
    "negative": (lambda a, b: a + response(length=-5) + b, "states -5 as its Content-Length"),
    "no number": (lambda a, b: a + response(length="ab") + b, "states ab as its Content-Length"),
    "endless header": (lambda a, _: a + b"WARC/1.0\r\n" + b"x" * 99999, "more than 65,536 bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("packing", ["", "gz"])
def test_a_damaged_file_is_one_error_with_the_offset(
    tmp_path: Path, name: str, packing: str
) -> None:
    damage, fault = DAMAGE[name]
    first = response(url="http://first.org/")
    path = write(tmp_path, PACK.get(packing, bytes)(damage(first, response())))
    with pytest.raises(UserError, match=r"a\.warc: the record at byte \d+ .*fetch") as raised:
        read(path)
    assert fault in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cut_gzip_member_is_an_error(tmp_path: Path) -> None:
    members = gzip.compress(INFO) + gzip.compress(response())
    path = write(tmp_path, members[:-20], name="a.warc.gz")
    with pytest.raises(UserError, match=r"gz data is truncated, near byte \d+"):
        read(path)


def test_a_large_page_takes_bounded_memory_and_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(response(b"<div>" * 20_000_000) + conversion("one")))
    raw = open_input(path)
    assert [item["text"] for item in records(raw)] == ["one"]
    assert raw.skipped == {"records longer than 16,777,216 bytes": 1}


def test_a_page_that_an_extractor_cannot_read_is_a_bad_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamake.data.readers._extractor._SECONDS", 0.5)
    monkeypatch.setattr(warc, "open_extractor", Extractor)
    hostile = "<div>" * 100_000
    path = write(tmp_path, response(), response(hostile, url="http://h.org"), response())
    first, bad, last = records(open_input(path))
    assert first["text"] == last["text"] == TEXT
    assert isinstance(bad, BadRecord)
    assert "http://h.org: resiliparse cannot read the page (it took more than" in bad.reason
    assert bad.raw == hostile.encode()


def test_the_extractor_is_a_setting_of_the_format(tmp_path: Path) -> None:
    path = write(tmp_path, response(PAGE.replace("</main>", f"</main><p>{'Aside. ' * 20}</p>")))
    both = [
        read(path, format=f"warc: {{extractor: {name}}}") for name in warc.SETTINGS["extractor"]
    ]
    assert both[0] != both[1]
    assert all(TEXT in texts[0] for texts in both)
    with pytest.raises(UserError, match="warc: extractor: x: choose one of resiliparse, trafila"):
        read(path, format="warc: {extractor: x}")


def test_shards_are_the_same_for_any_workers_and_trace_finds_records(
    tmp_path: Path, sampled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [response(PAGE.replace("sea", f"sea {number}")) for number in range(40)]
    path = write(tmp_path, INFO, *pages, response(status=500))
    for workers in (1, 3):
        prefix = tmp_path / f"shard-{workers}"
        tokenize((str(path),), tokenizer=sampled / "tokenizer", output=prefix, workers=workers)
    contents = [(tmp_path / f"shard-{workers}.bin").read_bytes() for workers in (1, 3)]
    assert contents[0] == contents[1]
    manifest = json.loads((tmp_path / "shard-1.json").read_text())
    assert manifest["inputs"][0]["skipped"] == {
        "records of type warcinfo": 1,
        "responses with HTTP status 500 (Internal Server Error)": 1,
    }
    assert "2 skipped because they are no documents" in capsys.readouterr().out
    trace(tmp_path / "shard-3", 7)
    output = capsys.readouterr().out
    assert re.search(r"a\.warc: record 8( at byte (\d+))?\n", output)
    assert "sea 7." in output
    trace(tmp_path / "shard-3", 0)
    assert f"a.warc: record 1 at byte {len(INFO)}\n" in capsys.readouterr().out
