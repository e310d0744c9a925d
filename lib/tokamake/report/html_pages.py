"""Self-contained HTML pages with tables, lists of values, or samples.

Functions here escape all text.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import pandas as pd

_STYLE = """
body { margin: 1.5rem; background: #fff; color: #22272e; max-width: 56rem;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { margin: 0 0 1rem; font-size: 1.2rem; }
h2 { margin: 2rem 0 0.5rem; font-size: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 1.1rem 0.35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #e4e7eb; }
thead th { color: #6b7480; font-weight: 600; border-bottom: 2px solid #a9b1bb; }
tbody th { font-weight: 600; }
tfoot th, tfoot td { font-weight: 600; border-top: 2px solid #a9b1bb; border-bottom: none; }
.number { text-align: right; padding: 0.35rem 0 0.35rem 1.1rem; }
td.number { white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0.35rem 1.5rem; margin: 0; }
dt { color: #6b7480; }
dd { margin: 0; overflow-wrap: anywhere; }
.sample { margin: 0 0 1rem; padding: 0.7rem 1rem; background: #f6f7f9; border-radius: 6px;
  border-left: 3px solid #2f6db5; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 14px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.sample del { background: #fbdada; text-decoration-color: #b3261e; }
.sample ins { background: #d9f2dc; text-decoration: none; }
.question { margin: 0 0 2rem; }
.question .sample { margin: 0.5rem 0 0; }
.sample.hit { border-left-color: #2e7d32; }
details { margin: 0.4rem 0; }
summary { cursor: pointer; margin-bottom: 0.4rem; }
.note { margin: 0.2rem 0 0; color: #6b7480; white-space: normal;
  font: 0.85rem system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
"""


def page(title: str, body: str) -> str:
    """Wrap the HTML `body` in a page with a plain-text title."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str] = ()) -> str:
    """Format a table: the first column names the row, the other columns hold numbers."""
    head = _row(header, cell="th")
    body = "\n".join(_row(row) for row in rows)
    foot = f"\n<tfoot>\n{_row(footer)}\n</tfoot>" if footer else ""
    return f"<table>\n<thead>\n{head}\n</thead>\n<tbody>\n{body}\n</tbody>{foot}\n</table>"


def sections(parts: Sequence[tuple[str, str]]) -> str:
    """Join pieces of HTML, each under its title; an empty title is left out."""
    return "\n".join(
        f"<h2>{escape(title)}</h2>\n{body}" if title else body for title, body in parts
    )


def definitions(values: Sequence[tuple[str, str]]) -> str:
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values)
    return f"<dl>\n{items}\n</dl>"


def folded(title: str, body: str) -> str:
    """Fold HTML under a title of plain text; a click unfolds it."""
    return f"<details>\n<summary>{escape(title)}</summary>\n{body}\n</details>"


def sample(prompt: str, text: str, note: str) -> str:
    """Format a sample: the prompt in bold, then the text. Keep line ends."""
    return (
        f'<div class="sample"><strong>{escape(prompt)}</strong>{escape(text)}'
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
    columns = "".join(f'<{cell} class="number">{escape(number)}</{cell}>' for number in numbers)
    return f"<tr><th>{escape(name)}</th>{columns}</tr>"
