"""Self-contained HTML pages with tables, lists of values, or samples.

Functions here escape all text.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

_STYLE = Path(__file__).parent / "page/style.css"


def page(title: str, body: str) -> str:
    """Wrap the HTML `body` in a page with a plain-text title."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str] = ()) -> str:
    """Format a table: the first column names the row, the other columns hold numbers."""
    head = _row(header, cell="th")
    body = "\n".join(_row(row) for row in rows)
    foot = f"\n<tfoot>\n{_row(footer)}\n</tfoot>" if footer else ""
    return (
        f'<div class="wide">\n<table>\n<thead>\n{head}\n</thead>\n<tbody>\n{body}\n</tbody>{foot}\n'
        "</table>\n</div>"
    )


def sections(parts: Sequence[tuple[str, str]], level: int = 3) -> str:
    """Join pieces of HTML, each under its title; empty pieces and titles are left out."""
    return "\n".join(
        f"<h{level}>{escape(title)}</h{level}>\n{body}" if title else body
        for title, body in parts
        if body
    )


def definitions(values: Sequence[tuple[str, str]]) -> str:
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values)
    return f'<dl class="facts">\n{items}\n</dl>'


def folded(title: str, body: str) -> str:
    """Fold HTML under a title of plain text; a click unfolds it."""
    return f"<details>\n<summary>{escape(title)}</summary>\n{body}\n</details>"


def warning(message: str) -> str:
    """Format a message that the reader should not miss."""
    return f'<p class="warning" role="note">{escape(message)}</p>\n'


def sample(prompt: str, text: str, note: str) -> str:
    """Format a sample: the prompt in bold, then the text, in the direction of its script."""
    return (
        f'<div class="sample" dir="auto"><strong>{escape(prompt)}</strong>{escape(text)}'
        f'<p class="note">{escape(note)}</p></div>'
    )


def found(heading: str, text: str, *, marked: str | None, note: str) -> str:
    """Format a text that a search found; `marked` is the part that answers. None: it does not."""
    shown = escape(text)
    if marked:
        part = escape(marked)
        shown = shown.replace(part, f"<ins>{part}</ins>", 1)
    kind = "sample" if marked is None else "sample hit"
    return (
        f'<div class="{kind}"><strong>{escape(heading)}</strong>\n{shown}'
        f'<p class="note">{escape(note)}</p></div>'
    )


def cell(value: Any, form: str) -> str:
    """Format a number, such as with ",.2f"; a missing one (None, NaN, NA) is a dash."""
    return "–" if pd.isna(value) else format(value, form)


def _row(cells: Sequence[str], cell: str = "td") -> str:
    name, *numbers = cells
    column = ' scope="col"' if cell == "th" else ""
    columns = "".join(
        f'<{cell}{column} class="number">{escape(number)}</{cell}>' for number in numbers
    )
    scope = "col" if cell == "th" else "row"
    return f'<tr><th scope="{scope}">{escape(name)}</th>{columns}</tr>'
