"""Pages of MediaWiki's XML export (https://www.mediawiki.org/xml/export-0.11.xsd)."""

from collections.abc import Iterator
from typing import NamedTuple
from xml.parsers import expat

from tokamake.data.readers._input import Input
from tokamake.data.readers._records import LONGEST_BYTES
from tokamake.errors import UserError


class Page(NamedTuple):
    """A page, with the latest of its revisions in the dump."""

    offset: int
    """First byte in the file from which the page can be read, or -1; see `PageParser.feed`."""
    fields: dict[str, str]
    """Content of title, ns and id; redirect, if it is one."""
    revision: dict[str, str]
    """Content of id, timestamp, model and text; deleted and bytes, attributes of the text."""


_ROOT = b"<mediawiki>"
_ROOT_END = b"</mediawiki>"
_FIELDS = {
    *(("page", name) for name in ("title", "ns", "id")),
    *(("revision", name) for name in ("id", "timestamp", "model", "text")),
}
"""Parent and name of the elements whose content is read."""


class PageParser:
    """Parses a dump, or a part of it that begins with a page."""

    def __init__(self, raw: Input, *, start: int) -> None:
        """Prepare to parse from byte `start` of the file on: 0, or a cut."""
        self._raw = raw
        self.pages: list[Page] = []
        """Complete pages; the caller takes them out."""
        self.num_characters = 0
        """Length of their texts."""
        self._path: list[str] = []  # names of the open elements
        self._content: list[str] = []
        self._page: dict[str, str] = {}
        self._latest: dict[str, str] = {}
        self._revision: dict[str, str] = {}
        self._last_title = ""
        self._source_offset: int | None = None
        self._page_offset = -1
        self._num_fed = 0
        self._content_start = -1  # of the field that is open, in the bytes fed
        self._base = start
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.buffer_size = 1 << 16
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        if start:
            self._base -= len(_ROOT)
            self._parse(_ROOT)

    def feed(self, data: bytes, offset: int | None) -> None:
        """Parse the next bytes.

        `offset` is the byte of the file where the compressed stream that holds them begins, -1 if
        the file cannot be read from there; None for a file that is not compressed.
        """
        self._source_offset = offset
        self._parse(data)
        if 0 <= self._content_start < self._num_fed - LONGEST_BYTES:
            raise UserError(
                f'{self._raw.path}: the page "{self._page.get("title", "")}" is longer than '
                f"{LONGEST_BYTES:,} bytes; is it a dump of articles?"
            )

    def finish(self, *, is_part: bool) -> None:
        """Check that the dump is complete; a part before its end lacks the end of the root."""
        self._parse(_ROOT_END if is_part else b"", is_final=True)

    def take(self) -> Iterator[Page]:
        pages, self.pages, self.num_characters = self.pages, [], 0
        yield from pages

    def _parse(self, data: bytes, *, is_final: bool = False) -> None:
        self._num_fed += len(data)
        try:
            self._parser.Parse(data, is_final)
        except expat.ExpatError as error:
            raise self._damaged(error) from None

    def _damaged(self, error: expat.ExpatError) -> UserError:
        is_cut = error.code in (
            expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS],
            expat.errors.codes[expat.errors.XML_ERROR_UNCLOSED_TOKEN],
            expat.errors.codes[expat.errors.XML_ERROR_PARTIAL_CHAR],
        )
        fault = "ends in the middle" if is_cut else f"is not valid XML ({error})"
        where = f' after the page "{self._last_title}"' if self._last_title else ""
        if not self._raw.compression:
            where += f", at byte {self._base + self._parser.ErrorByteIndex}"
        return UserError(
            f"{self._raw.path}: the dump {fault}{where}; fetch it again: the lost pages cannot be "
            "counted"
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        parent = self._path[-1] if self._path else ""
        self._path.append(name)
        if name == "page":
            self._page, self._latest = {}, {}
            self._page_offset = (
                self._base + self._parser.CurrentByteIndex
                if self._source_offset is None
                else self._source_offset
            )
        elif name == "revision":
            self._revision = {}
        elif name == "redirect" and parent == "page":
            self._page["redirect"] = attributes.get("title", "")
        elif (parent, name) in _FIELDS:
            if name == "text":
                self._revision |= {
                    key: attributes[key] for key in ("deleted", "bytes") if key in attributes
                }
            self._content, self._content_start = [], self._parser.CurrentByteIndex
            self._parser.CharacterDataHandler = self._content.append

    def _end(self, name: str) -> None:
        self._path.pop()
        parent = self._path[-1] if self._path else ""
        if (parent, name) in _FIELDS:
            self._parser.CharacterDataHandler, self._content_start = None, -1
            element = self._page if parent == "page" else self._revision
            element[name] = "".join(self._content)
        elif name == "revision":
            if self._revision.get("timestamp", "") >= self._latest.get("timestamp", ""):
                self._latest = self._revision
        elif name == "page":
            self._last_title = self._page.get("title", "")
            self.pages.append(Page(self._page_offset, self._page, self._latest))
            self.num_characters += len(self._latest.get("text", ""))
