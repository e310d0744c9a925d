"""Reader of dumps of Wikipedia and other wikis of MediaWiki, such as pages-articles.xml.bz2.

Documents are the articles: pages of namespace 0 that are no redirects, with the plain text of
their latest revision in the dump. They have WikiExtractor's fields: id, revid, url, title,
text. A byte range holds the pages from the first cut in it on; see `_page_cuts`.
"""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np

from tokamake.data.readers._input import Input
from tokamake.data.readers._page_cuts import cuts, next_page
from tokamake.data.readers._page_xml import Page, PageParser
from tokamake.data.readers._records import BadRecord, RecordBlock
from tokamake.data.readers._wikitext import DROPPED_NAMESPACES, plain_text
from tokamake.errors import UserError

UNIT = "page"
HAS_MAGIC = True
HAS_BYTE_RANGES = True
DIVISIBLE = ("bz2",)

_START = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?<mediawiki[\s>]", re.DOTALL
)
_BASE = re.compile(rb"<base>([^<]*)/[^</]*</base>")
_NAMESPACE = re.compile(rb'<namespace key="(-?[0-9]+)"[^>]*>([^<]+)</namespace>')
_FILES, _CATEGORIES = "6", "14"
"""Numbers of the namespaces whose links are no text."""
_BLOCK_CHARACTERS = 1 << 20
_HEADER_BYTES = 1 << 20
"""The header of a dump is shorter, so a multistream dump has its second stream before."""
_NUMBER = re.compile("[0-9]{1,18}")
_REDIRECT = re.compile(r"\s*#redirect", re.IGNORECASE)

Record = dict[str, Any] | BadRecord


def accepts(head: bytes, path: Path) -> bool:
    return bool(_START.match(head))


def is_divisible(path: Path, compression: str) -> bool:
    """Whether a compressed dump is a multistream one, so that byte ranges of it can be read."""
    return any(True for _ in cuts(path, 1, compression=compression, max_bytes=_HEADER_BYTES))


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the articles of a file, or of the pages from the first cut in a byte range on."""
    if not _START.match(raw.head):
        raise UserError(
            f"{raw.path}: is no dump of MediaWiki, which begins with <mediawiki>; leave out the "
            "format, or fetch pages-articles.xml.bz2 again"
        )
    start, end = _cut_range(raw)
    if start == end:
        return
    parser, articles = PageParser(raw, start=start), _Articles(raw)
    for data, offset in _content(raw, start, end=end):
        parser.feed(data, offset)
        if parser.num_characters > _BLOCK_CHARACTERS:
            yield from articles.block(parser.take())
    parser.finish(is_part=end is not None)
    yield from articles.block(parser.take())


def _cut_range(raw: Input) -> tuple[int, int | None]:
    """Return the cuts that a byte range holds the pages between; None is the end of the file."""
    size = raw.path.stat().st_size
    start = next_page(raw.path, raw.start, compression=raw.compression)
    if raw.end is None:
        return start, size if start == size else None
    end = max(start, next_page(raw.path, raw.end, compression=raw.compression))
    return start, None if end == size > start else end


def _content(raw: Input, start: int, *, end: int | None) -> Iterator[tuple[bytes, int | None]]:
    """Yield the bytes of the XML, with the offset that `PageParser.feed` takes."""
    if raw.compression not in DIVISIBLE:
        offset = -1 if raw.compression else None
        yield from ((chunk, offset) for chunk in raw.chunks(start, end))
        return
    member = offset = start
    for first_byte, data in raw.members(start, end):
        if first_byte != member:
            member = first_byte
            # Only a stream that begins with a page can be read without the ones before it.
            offset = first_byte if data.lstrip().startswith(b"<page>") else offset
        yield data, offset


class _Articles:
    """Makes records of pages, and counts the pages that are no articles."""

    def __init__(self, raw: Input) -> None:
        self._raw = raw
        base = _BASE.search(raw.head)
        self._url = f"{_decoded(base[1])}?curid=" if base else "?curid="
        names = {_decoded(name): _decoded(key) for key, name in _NAMESPACE.findall(raw.head)}
        self._namespaces = names
        self._dropped = DROPPED_NAMESPACES | {
            name.lower() for name, key in names.items() if key in (_FILES, _CATEGORIES)
        }

    def block(self, pages: Iterator[Page]) -> Iterator[RecordBlock]:
        """Yield the articles among the pages as a block, if there are any."""
        records: list[Record] = []
        numbers, offsets = [], []
        for page in pages:
            if reason := self._reason_to_skip(page):
                self._raw.skipped[reason] = self._raw.skipped.get(reason, 0) + 1
                continue
            record = self._record(page)
            records.append(record)
            number = page.fields.get("id", "")
            numbers.append(int(number) if _NUMBER.fullmatch(number) else 0)
            offsets.append(page.offset)
        if records:
            yield RecordBlock(
                records, np.array(numbers, np.int64), np.array(offsets, np.int64), None
            )

    def _record(self, page: Page) -> Record:
        number, title = page.fields.get("id", ""), page.fields.get("title", "")
        if not _NUMBER.fullmatch(number):
            return BadRecord(f'the page "{title}" has no id; fetch the dump again', title.encode())
        text = page.revision.get("text", "")
        num_bytes = page.revision.get("bytes", "0")
        if not text and num_bytes != "0":
            return BadRecord(
                f'the page "{title}" lacks its text, of {num_bytes} bytes; fetch the dump again, '
                "or pages-articles if it is a dump of stubs",
                title.encode(),
            )
        return {
            "id": number,
            "revid": page.revision.get("id", ""),
            "url": self._url + number,
            "title": title,
            "text": plain_text(text, self._dropped),
        }

    def _reason_to_skip(self, page: Page) -> str:
        """Return the kind of a page that is no article; empty for an article."""
        namespace = page.fields.get("ns")
        if namespace is None:  # dumps before 2012 have none
            prefix, colon, _ = page.fields.get("title", "").partition(":")
            namespace = self._namespaces.get(prefix, "0") if colon else "0"
        if namespace != "0":
            return "pages of other namespaces"
        if "redirect" in page.fields or _REDIRECT.match(page.revision.get("text", "")):
            return "redirects"
        if page.revision.get("model", "wikitext") != "wikitext":
            return "pages of other content models than wikitext"
        if "deleted" in page.revision or "text" not in page.revision:
            return "deleted pages"
        return ""


def _decoded(value: bytes) -> str:
    return unescape(value.decode(errors="replace"))
