"""Reader of WARC and WET files, as Common Crawl and other crawlers write them.

A document is a `conversion` record, whose text is taken as it is, or a `response` record with an
HTML page of status 200, whose main text an extractor finds. Other records are no documents: the
manifest counts them by reason. Its fields beside `text` are `url`, `date`, `content_type`,
`record_id` and `language` (empty if no header names it).
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tokamake.data.readers._extractor import LONGEST_PAGE_BYTES, WebPage, open_extractor
from tokamake.data.readers._input import Input
from tokamake.data.readers._records import (
    LONGEST_BYTES,
    BadRecord,
    LazySequence,
    RecordBlock,
    utf8_fault,
)
from tokamake.data.readers._warc_records import BEGINNING, WarcRecord, WarcRecords
from tokamake.errors import UserError

if TYPE_CHECKING:
    from fastwarc.warc import WarcRecord as HttpRecord

UNIT = "record"
HAS_MAGIC = True
HAS_BYTE_RANGES = False
SETTINGS = {"extractor": ("resiliparse", "trafilatura")}

_LIMITS = {"response": LONGEST_PAGE_BYTES, "conversion": LONGEST_BYTES}
_BLOCK_BYTES = 1 << 23
_BLOCK_RECORDS = 1024
_HTML = ("text/html", "application/xhtml+xml")
_GZIP = b"\x1f\x8b"

Record = dict[str, Any] | BadRecord


def accepts(head: bytes, path: Path) -> bool:
    return head.startswith(BEGINNING)


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the documents as blocks. Numbers count all records of the file, from 0."""
    if raw.head and not raw.head.startswith(BEGINNING):
        raise UserError(f"{raw.path}: does not begin with a WARC record; leave out the format")
    found: list[_FoundRecord] = []
    size = 0
    for number, record in enumerate(WarcRecords(raw.chunks(), raw.path, limits=_LIMITS)):
        document = _document(record)
        if isinstance(document, str):
            raw.skipped[document] = raw.skipped.get(document, 0) + 1
            continue
        found.append(_FoundRecord(document, number, -1 if raw.compression else record.offset))
        size += len(record.content or b"")
        if size >= _BLOCK_BYTES or len(found) >= _BLOCK_RECORDS:
            yield _block(raw, found)
            found, size = [], 0
    if found:
        yield _block(raw, found)


class _FoundRecord(NamedTuple):
    document: "_RecordText | BadRecord"
    number: int
    offset: int


class _RecordText(NamedTuple):
    fields: dict[str, str]
    content: str | WebPage
    """The text, or the page that has it."""


class _LazyTexts(LazySequence[Record]):
    """Documents of a block. The first access extracts all their texts: `trace` reads one block."""

    def __init__(self, found: Sequence[_FoundRecord], raw: Input) -> None:
        self._documents = [item.document for item in found]
        self._raw = raw

    def __len__(self) -> int:
        return len(self._documents)

    def item(self, index: int) -> Record:
        return self._records[index]

    @cached_property
    def _records(self) -> list[Record]:
        pages = [
            document.content
            for document in self._documents
            if isinstance(document, _RecordText) and isinstance(document.content, WebPage)
        ]
        texts = iter(_extract(self._raw, pages))
        records: list[Record] = []
        for document in self._documents:
            if isinstance(document, BadRecord):
                records.append(document)
                continue
            fields, content = document
            text = content if isinstance(content, str) else next(texts)
            if isinstance(text, BadRecord):
                text = text._replace(reason=f"{fields['url']}: {text.reason}")
            records.append(text if isinstance(text, BadRecord) else {"text": text, **fields})
        return records


def _extract(raw: Input, pages: list[WebPage]) -> list[str | BadRecord]:
    if not pages:
        return []
    return open_extractor(raw.settings["extractor"], raw.workers).texts(pages)


def _block(raw: Input, found: list[_FoundRecord]) -> RecordBlock:
    numbers = np.array([item.number for item in found], np.int64)
    offsets = np.array([item.offset for item in found], np.int64)
    return RecordBlock(_LazyTexts(found, raw), numbers, offsets, None)


def _document(record: WarcRecord) -> _RecordText | BadRecord | str:
    """Return the document of a record, or the kind of records that have none."""
    if record.type not in _LIMITS:
        return f"records of type {record.type}" if record.type else "records without a type"
    if record.content is None:
        return _too_long(_LIMITS[record.type])
    if record.type == "response":
        return _page(record)
    try:
        return _RecordText(_fields(record), record.content.decode())
    except UnicodeDecodeError as error:
        return BadRecord(f"{utf8_fault(error)}; leave the record out", record.content)


def _page(record: WarcRecord) -> _RecordText | BadRecord | str:
    assert record.content is not None
    data = record.header + record.content + b"\r\n\r\n"
    http = _http(data, auto_decode="none")
    if http is None or http.http_headers is None or http.http_headers.status_code is None:
        return "responses that are not HTTP"  # for instance of DNS
    if http.http_headers.status_code != 200:
        return f"responses with HTTP status {_status(http.http_headers.status_code)}"
    media_type = http.http_content_type or record.fields.get("warc-identified-payload-type", "")
    if media_type.partition(";")[0].strip().lower() not in _HTML:
        return "responses that are not HTML"
    # Some crawlers decode contents and leave the header that states the encoding as it is.
    content = _content(data, auto_decode="all")
    content = _content(data, auto_decode="none") if content is None else content
    assert content is not None
    if len(content) > LONGEST_PAGE_BYTES:  # after its content encoding
        return _too_long(LONGEST_PAGE_BYTES)
    if content.startswith(_GZIP):
        return BadRecord("its Content-Encoding cannot be decoded; leave the record out", content)
    fields = _fields(record, language=http.http_headers.get("Content-Language") or "")
    fields["content_type"] = media_type
    return _RecordText(fields, WebPage(content, http.http_charset or ""))


def _too_long(num_bytes: int) -> str:
    return f"records longer than {num_bytes:,} bytes"


def _status(code: int) -> str:
    """Code and phrase: 404 (Not Found)."""
    try:
        return f"{code} ({HTTPStatus(code).phrase})"
    except ValueError:
        return f"{code}"


def _http(data: bytes, *, auto_decode: Literal["all", "none"]) -> "HttpRecord | None":
    """Parse the HTTP headers of a record. None: it has none, or invalid ones."""
    try:
        from fastwarc.warc import WarcRecord as HttpRecord
    except ImportError:
        raise UserError(
            "the format warc needs the package fastwarc; pip install 'tokamake[corpora]'"
        ) from None
    try:
        http = HttpRecord.from_bytes(data)
        if http.is_http:
            http.parse_http(auto_decode=auto_decode)
            return http
    except OSError:
        pass
    return None


def _content(data: bytes, *, auto_decode: Literal["all", "none"]) -> bytes | None:
    """Return the content of an HTTP response, up to a byte more than the largest page."""
    try:
        http = _http(data, auto_decode=auto_decode)
        return None if http is None else http.reader.read(LONGEST_PAGE_BYTES + 1)
    except OSError:
        return None


def _fields(record: WarcRecord, *, language: str = "") -> dict[str, str]:
    fields = record.fields
    return {
        "url": fields.get("warc-target-uri", "").strip("<>"),
        "date": fields.get("warc-date", ""),
        "content_type": fields.get("content-type", ""),
        "record_id": fields.get("warc-record-id", ""),
        "language": fields.get("warc-identified-content-language", language),
    }
