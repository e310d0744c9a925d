"""HTML as text and as tables, with a check that every tag is closed."""

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Texts of a page, cell by cell, without styles and scripts.

    Attributes:
        texts: texts in their order.
        sections: id of a section → its texts.
        tags: number of each tag.
        attributes: attributes of each tag, in their order.
    """

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.sections: dict[str, list[str]] = {}
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self._section = ""
        self.feed(page.read_text(encoding="utf-8") if isinstance(page, Path) else page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        values = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes.append((tag, values))
        if tag == "section":
            self._section = str(values.get("id"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] not in ("style", "script"):
            self.texts.append(data)
            self.sections.setdefault(self._section, []).append(data)
