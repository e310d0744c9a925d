"""The report of made-up runs, and its texts."""

import json
from pathlib import Path
from typing import Any

from tests.support.html_page import Page
from tokamake.report.report import report


def shown(*folders: Path, **options: Any) -> Page:
    report(*folders, **options)
    page = Page((folders[0] if len(folders) == 1 else folders[0].parent) / "report.html")
    assert not any("cannot be shown" in text for text in page.texts)
    return page


def after(texts: list[str], title: str, number: int) -> list[str]:
    """Texts that follow a title."""
    start = texts.index(title) + 1
    return texts[start : start + number]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
