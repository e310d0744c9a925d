"""Corpora: sizes, lengths, filters, duplicates, and documents that were set aside."""

import json
from collections.abc import Iterator
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tokamake.data.indexed import length_histogram
from tokamake.report import corpus_tables, html_pages
from tokamake.report.page.contents import PageContents
from tokamake.report.page.figures import Axes
from tokamake.results.corpora import sums

TITLE = "Corpora"
PLACE = 20

_MAX_CORPORA = 6
"""Corpora in the figure of lengths."""
_EXAMPLES = 5
_MAX_TEXT = 400
_MAX_LINE = 1_000_000
"""Characters of a line that are read."""


def render(contents: PageContents) -> str:
    """Tables of each data folder, a figure of lengths, and examples."""
    parts = []
    for name, datasets in contents.documents.groupby("data_set", sort=False):
        rows = _by_corpus(datasets)
        title = f"Data folder {name}" if contents.documents["data_set"].nunique() > 1 else ""
        tables = [(title or heading, body) if not heading else (heading, body)
                  for heading, body in corpus_tables.tables(rows)]  # fmt: skip
        parts.append(html_pages.sections([tables[0], ("", _lengths(contents, rows)), *tables[1:]]))
        parts.append(_quarantined(contents, str(name), rows=rows))
    return "\n".join(parts)


def _by_corpus(datasets: pd.DataFrame) -> list[Any]:
    """A row for each corpus, in the order of the datasets, and their sum."""
    rows = [
        {"corpus": name, "datasets": len(own), **sums(own.to_dict("records"))}
        for name, own in datasets.groupby("corpus", sort=False)
    ]
    every = {"corpus": "all", "datasets": len(datasets), **sums(datasets.to_dict("records"))}
    return [*pd.DataFrame([*rows, every]).itertuples()]


def _lengths(contents: PageContents, rows: list[Any]) -> str:
    largest = sorted(rows[:-1], key=lambda row: -row.tokens)[:_MAX_CORPORA]
    bins = length_histogram.add(row.lengths for row in largest)
    if not bins:
        return ""
    shares = {}
    for row in largest:
        known = {each["shortest"]: each["tokens"] for each in row.lengths}
        values = np.array([known.get(each["shortest"], 0) for each in bins], float)
        shares[row.corpus] = (values / max(1.0, values.sum())).tolist()
    places = [f"{each['shortest']:,}" for each in bins]
    figure = contents.figures.bars(
        "Tokens by length of their document",
        places,
        shares,
        axes=Axes("tokens of a document, from", "share of tokens", y_form="0.0%"),
        note="Each group has the lengths up to the next one. Documents longer than a training "
        "sample are cut into several.",
    )
    return f'<div class="plots">{figure}</div>'


def _quarantined(contents: PageContents, data_set: str, *, rows: list[Any]) -> str:
    """The first documents that could not be read, with their places and the reasons."""
    if not any(row.quarantined_documents for row in rows if not pd.isna(row.quarantined_documents)):
        return ""
    data = contents.results / "data" / ("" if data_set == "default" else data_set)
    examples = islice(_examples(data / "shards"), _EXAMPLES)
    body = "\n".join(examples) or "<p>The shards, which have them, are deleted.</p>"
    return html_pages.folded("Examples of quarantined documents", body)


def _examples(shards: Path) -> Iterator[str]:
    for path in sorted(shards.rglob("*.quarantine.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            while line := lines.readline(_MAX_LINE):
                yield _example(line, path)
                if not line.endswith("\n"):  # cut, or the last one
                    break


def _example(line: str, path: Path) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    entry = entry if isinstance(entry, dict) else {}
    text = str(entry.pop("raw", "") or entry.pop("raw_base64", "") or line)[:_MAX_TEXT]
    note = escape(", ".join(f"{key} {value}" for key, value in entry.items()) or path.name)
    return f'<div class="sample">{escape(text)}<p class="note">{note}</p></div>'
