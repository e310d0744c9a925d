"""Tables of corpora: sizes, documents, filters and lengths."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from tokamake.data.indexed.length_histogram import median_bin
from tokamake.data.indexed.manifest_counts import (
    filter_name,
    num_dropped,
    num_failed,
    num_kept,
    verdicts,
)
from tokamake.report import filter_samples, html_pages
from tokamake.units import in_bytes

_ACCOUNT = (
    *("records read", "skipped", "equal", "nearly equal", "quarantined", "filtered", "empty"),
    "documents",
)
_SIZES = (
    *("corpus", "merged datasets", "documents", "tokens", "text", "bytes per token"),
    *("tokens per byte", "mean length", "median length"),
)
_PASSED = ("corpus", "filter", "saw", "dropped", "failed on", "kept")
_VERDICTS = (*("corpus", "filter", "reason", "documents", "share", "change in characters", "mean"),)
_SUM = (
    '<p class="note">Records read = skipped records + equal, nearly equal, quarantined, filtered '
    "and empty documents + documents.</p>"
)


def tables(rows: Sequence[Any]) -> list[tuple[str, str]]:
    """Titles and tables: sizes, documents, skipped records, filters, lengths, samples of filters.

    Args:
        rows: a row for each corpus, then their sum, with the columns of `results.documents` and
            `datasets`.
    """
    *corpora, every = rows
    sizes = html_pages.table(_SIZES, [*map(_sizes, corpora)], _sizes(every))
    documents = html_pages.table(
        ["corpus", *_ACCOUNT], [*map(_documents, corpora)], _documents(every)
    )
    parts = [("", sizes), ("From raw records to documents", f"{documents}\n{_SUM}")]
    if skipped := [line for row in corpora for line in _skipped(row)]:
        table = html_pages.table(["corpus", "kind", "records"], skipped)
        parts.append(("Skipped records", table))
    if passed := [line for row in corpora for line in _passed(row)]:
        parts.append(("Filters", html_pages.table(_PASSED, passed)))
        filtered = [line for row in corpora for line in _filtered(row)]
        parts.append(("Verdicts of filters", html_pages.table(_VERDICTS, filtered)))
    if samples := "\n".join(filter(None, map(_samples, corpora))):
        parts.append(("Samples of filters", samples))
    return parts


def _filtered(row: Any) -> list[list[str]]:
    return [
        [
            row.corpus,
            verdict.filter,
            verdict.reason,
            f"{verdict.documents:,}",
            f"{verdict.share:.2%}",
            "–" if verdict.characters is None else f"{verdict.characters:+,}",
            "–" if verdict.mean is None else f"{verdict.mean:,.4g}",
        ]
        for verdict in verdicts(row.filters or ())
    ]


def _samples(row: Any) -> str:
    """Samples of all filters of a corpus, folded under its name."""
    listed = [
        filter_samples.samples(filter_name(entry), entry.get("samples", ()))
        for entry in row.filters or ()
    ]
    body = "\n".join(filter(None, listed))
    return html_pages.folded(row.corpus, body) if body else ""


def _sizes(row: Any) -> list[str]:
    """Cells of `_SIZES`. Lengths are in tokens, with the end-of-document token."""
    median = median_bin(row.lengths)
    has_bytes = not pd.isna(row.text_bytes) and row.tokens and row.text_bytes
    return [
        row.corpus,
        f"{row.datasets:,}",
        f"{row.documents:,}",
        f"{row.tokens:,}",
        "–" if pd.isna(row.text_bytes) else in_bytes(row.text_bytes),
        f"{row.text_bytes / row.tokens:.2f}" if has_bytes else "–",
        f"{row.tokens / row.text_bytes:.4f}" if has_bytes else "–",
        f"{row.tokens / row.documents:,.0f}" if row.documents else "–",
        "–" if median is None else _range(median["shortest"], median["longest"]),
    ]


def _documents(row: Any) -> list[str]:
    """Cells of `_ACCOUNT`: records read, why some became no document, and the documents."""
    read = row.documents_in
    if pd.isna(read):
        return [row.corpus, *["–"] * (len(_ACCOUNT) - 1), f"{row.documents:,}"]
    skipped = sum(row.skipped.values())
    left_out = [
        *(skipped, row.duplicate_documents - row.near_duplicate_documents),
        *(row.near_duplicate_documents, row.quarantined_documents, row.filtered_documents),
    ]
    counts = [read + skipped, *left_out, row.empty_documents]
    return [row.corpus, *(html_pages.cell(count, ",") for count in [*counts, row.documents])]


def _skipped(row: Any) -> list[list[str]]:
    skipped = sorted(row.skipped.items(), key=lambda item: -item[1])
    return [[row.corpus, reason, f"{number:,}"] for reason, number in skipped]


def _passed(row: Any) -> list[list[str]]:
    """Documents that each filter saw, dropped, failed on and kept."""
    return [
        [
            row.corpus,
            filter_name(entry),
            *(f"{n:,}" for n in (entry["documents"], num_dropped(entry), num_failed(entry))),
            f"{num_kept(entry):,}",
        ]
        for entry in row.filters or ()
    ]


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"
