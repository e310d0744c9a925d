"""warcio, another implementation of ISO 28500, writes WARC files and reads the same from them."""

import gzip
import hashlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.support.warc_files import PAGE
from tokamake.data.readers import open_input, warc
from tokamake.data.readers._warc_records import WarcRecords
from tokamake.errors import UserError

pytestmark = [
    pytest.mark.extra("corpora", "fastwarc"),
    pytest.mark.extra("oracles", "warcio"),
]
BODY = PAGE.encode() * 3
LIMITS = dict.fromkeys(
    (
        *("warcinfo", "request", "response", "metadata", "resource"),
        *("revisit", "conversion", "continuation"),
    ),
    1 << 20,
)


def chunked(body: bytes) -> bytes:
    parts = [body[start : start + 100] for start in range(0, len(body), 100)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


RESPONSES = {
    "plain": ([("Content-Length", str(len(BODY)))], BODY),
    "chunked": ([("Transfer-Encoding", "chunked")], chunked(BODY)),
    "gzip": ([("Content-Encoding", "gzip")], gzip.compress(BODY, mtime=0)),
    "both": (
        [("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked")],
        chunked(gzip.compress(BODY, mtime=0)),
    ),
}
"""Headers and the body as sent; all have the payload BODY."""


def write(path: Path, *, packed: bool) -> None:
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with path.open("wb") as stream:
        writer = WARCWriter(stream, gzip=packed, warc_version="1.1")
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "warcio"}))
        for name, (headers, body) in RESPONSES.items():
            http = StatusAndHeaders(
                "200 OK", [("Content-Type", "text/html"), *headers], protocol="HTTP/1.1"
            )
            url = f"http://example.org/{name}"
            response = writer.create_warc_record(
                url, "response", payload=BytesIO(body), http_headers=http
            )
            ask = StatusAndHeaders(
                f"GET /{name} HTTP/1.1", [("Host", "example.org")], is_http_request=True
            )
            request = writer.create_warc_record(url, "request", http_headers=ask)
            writer.write_request_response_pair(request, response)
            revisit = writer.create_revisit_record(
                url, "sha1:A", url, "2024-01-01T00:00:00Z", http_headers=http
            )
            writer.write_record(revisit)
        for kind in ("metadata", "resource", "conversion", "continuation"):
            writer.write_record(
                writer.create_warc_record(
                    f"http://example.org/{kind}",
                    kind,
                    payload=BytesIO(f"{kind}\r\n\r\nWARC/1.1 \0".encode()),
                    warc_content_type="text/plain",
                )
            )


def by_warcio(path: Path, **options: Any) -> list[Any]:
    """What warcio reads: type, URL and content of each record; or the payload of responses."""
    from warcio.archiveiterator import ArchiveIterator

    with path.open("rb") as stream:
        return [
            (
                record.rec_type,
                record.rec_headers.get_header("WARC-Target-URI") or "",
                record.content_stream().read(),
            )
            for record in ArchiveIterator(stream, **options)
        ]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_records_of_all_types_have_the_bytes_that_warcio_reads(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, packed=name.endswith(".gz"))
    raw = open_input(tmp_path / name)
    found = [
        (record.type, record.fields.get("warc-target-uri", ""), record.content)
        for record in WarcRecords(raw.chunks(), raw.path, limits=LIMITS)
    ]
    assert found == by_warcio(tmp_path / name, no_record_parse=True)
    assert {kind for kind, _, _ in found} == set(LIMITS)


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_payloads_are_decoded_as_by_warcio(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, packed=name.endswith(".gz"))
    expected = {url: data for kind, url, data in by_warcio(tmp_path / name) if kind == "response"}
    raw = open_input(tmp_path / name)
    found = {}
    for record in WarcRecords(raw.chunks(), raw.path, limits={"response": 1 << 20}):
        if record.content is not None:
            document = warc._document(record)
            assert isinstance(document, warc._RecordText)
            assert isinstance(document.content, warc.WebPage)
            found[document.fields["url"]] = document.content[0]
    assert found == expected
    assert len(found) == len(RESPONSES)
    assert {hashlib.sha1(body).hexdigest() for body in found.values()} == {
        hashlib.sha1(BODY).hexdigest()
    }


@pytest.mark.parametrize("change", [-1, 1, 7])
def test_a_wrong_length_is_an_error_where_warcio_sees_other_digests(
    tmp_path: Path, change: int
) -> None:
    from warcio.archiveiterator import ArchiveIterator

    path = tmp_path / "a.warc"
    write(path, packed=False)
    data = path.read_bytes()
    start = data.index(b"Content-Length: ", data.index(b"WARC-Type: response"))
    size = int(data[start + 16 : data.index(b"\r\n", start)])
    path.write_bytes(data.replace(b": %d\r\n" % size, b": %d\r\n" % (size + change), 1))
    raw = open_input(path)
    with pytest.raises(UserError, match="does not end after its Content-Length"):
        list(WarcRecords(raw.chunks(), path, limits=LIMITS))
    with path.open("rb") as stream:
        records = ArchiveIterator(stream, check_digests=True, no_record_parse=True)
        passed = []
        for record in (next(records), next(records)):
            record.content_stream().read()
            passed.append(record.digest_checker.passed)
    assert passed[1] is False
