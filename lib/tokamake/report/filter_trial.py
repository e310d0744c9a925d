"""Results of `try-filters`, as text for a terminal and as an HTML page."""

import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from pydantic import PrivateAttr

from tokamake.data.filters import Document, DocumentFilter, Drop
from tokamake.data.indexed.manifest_counts import filter_name, num_kept, verdicts
from tokamake.report import filter_samples, html_pages
from tokamake.runtime.console import counted

_HEADER = ("verdict", "documents", "share", "mean", "change in characters")
_MAX_BAD = 5
_MARKS = {"": "{}", "-": "[-{}-]", "+": "{{+{}+}}"}
"""Marks of removed and added text, as in git's word diff."""


class Trial(NamedTuple):
    """The effect of the filters of a corpus on a sample of its documents."""

    corpus: str
    num_files: int
    num_documents: int
    num_kept: int
    """Documents that all filters kept."""
    counts: list[dict[str, Any]]
    """Counts and samples of each filter, as in a manifest."""
    seconds_per_mb: list[float]
    """Time of each filter per MB of text that it saw."""
    bad: list[str]
    """Places of documents that cannot be read or on which a filter failed, with the reasons."""
    stops: bool
    """Whether a job stops at such a document, by `tokenize.on_bad_document`."""


class TimedFilter(DocumentFilter):
    """A filter together with the time that it takes."""

    _filter: DocumentFilter = PrivateAttr()
    _seconds: float = PrivateAttr(0.0)
    _bytes: int = PrivateAttr(0)

    @classmethod
    def around(cls, filter: DocumentFilter) -> "TimedFilter":
        timed = cls()
        timed._filter = filter
        return timed

    @property
    def metadata_keys(self) -> tuple[str, ...]:
        return self._filter.metadata_keys

    @property
    def seconds_per_mb(self) -> float:
        return self._seconds / max(1, self._bytes) * 1e6

    def apply(self, document: Document) -> Drop | None:
        """Apply the filter, and add its time, also if it fails or is interrupted."""
        self._bytes += len(document.text.encode())
        started = time.perf_counter()
        try:
            return self._filter.apply(document)
        finally:
            self._seconds += time.perf_counter() - started


def text(trial: Trial) -> str:
    """Tables and examples for a terminal."""
    lines = [f"{trial.corpus}: {_headline(trial)}", ""]
    for number, (title, rows) in enumerate(_tables(trial)):
        lines += [title, *_aligned([_HEADER, *rows] if not number else rows, _widths(trial)), ""]
    examples = [line for entry in trial.counts for line in _examples(entry)]
    bad = [f"  {line}" for line in _bad(trial)]
    lines += [_bad_title(trial), *bad, ""] if bad else []
    return "\n".join([*lines, *examples])


def page(trials: Sequence[Trial], note: str = "") -> str:
    """Tables and examples as a self-contained HTML page; `note` comes first."""
    parts = []
    for trial in trials:
        body = [_paragraph(_headline(trial))]
        for (title, rows), entry in zip(_tables(trial), trial.counts, strict=True):
            body.append(html_pages.table((title, *_HEADER[1:]), rows))
            samples = filter_samples.samples("examples", entry["samples"])
            body.append(samples or "<p></p>")
        if bad := _bad(trial):
            body.append(html_pages.folded(_bad_title(trial), "".join(map(_paragraph, bad))))
        parts.append((trial.corpus, "\n".join(body)))
    above = f"{_paragraph(note)}\n" if note else ""
    return html_pages.page("Filters on a sample of documents", above + html_pages.sections(parts))


def _bad_title(trial: Trial) -> str:
    action = "stop: a job stops at the first one" if trial.stops else "quarantine: set aside"
    return f"bad documents (tokenize.on_bad_document: {action})"


def _paragraph(line: str) -> str:
    return f"<p>{escape(line)}</p>"


def _headline(trial: Trial) -> str:
    share = trial.num_kept / trial.num_documents
    bad = f", {counted(len(trial.bad), 'bad document')}" if trial.bad else ""
    return (
        f"{counted(trial.num_documents, 'document')} of "
        f"{counted(trial.num_files, 'file')}; all filters keep {trial.num_kept:,} "
        f"({share:.1%}){bad}"
    )


def _tables(trial: Trial) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield the title and the rows of each filter: seen, kept, and each other verdict."""
    for entry, seconds in zip(trial.counts, trial.seconds_per_mb, strict=True):
        speed = f", {seconds:.3g} s/MB" if entry["documents"] else ""
        title = filter_name(entry) + speed
        seen, kept = entry["documents"], num_kept(entry)
        share = f"{kept / seen:.1%}" if seen else "–"
        rows: list[tuple[str, ...]] = []
        rows += [("seen", f"{seen:,}", "", "", ""), ("kept", f"{kept:,}", share, "", "")]
        rows += [
            (
                _named(verdict.reason, entry),
                f"{verdict.documents:,}",
                f"{verdict.share:.1%}",
                "" if verdict.mean is None else f"{verdict.mean:,.4g}",
                "" if verdict.characters is None else f"{verdict.characters:+,}",
            )
            for verdict in verdicts([entry])
            if verdict.documents
        ]
        yield title, rows


def _named(reason: str, entry: Mapping[str, Any]) -> str:
    if reason in entry["metrics"]:
        return f"measured: {reason}"
    return f"dropped: {reason}" if reason in entry["dropped"] else reason


def _widths(trial: Trial) -> list[int]:
    rows = [_HEADER, *(row for _, rows in _tables(trial) for row in rows)]
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    lines = []
    for name, *numbers in rows:
        cells = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
        lines.append("  ".join(["  " + name.ljust(widths[0]), *cells]).rstrip())
    return lines


def _examples(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the dropped and the changed samples of a filter."""
    chosen = [s for s in filter_samples.in_order(entry["samples"]) if s["verdict"] != "kept"]
    if not chosen:
        return
    yield f"examples of {filter_name(entry)}"
    for sample in chosen:
        yield f"  {filter_samples.described(sample)} · {printable(sample['place'])}"
        if "after" not in sample:
            yield f"    {printable(sample['text'])}"
            continue
        yield f"    {marked(sample['text'], sample['after'])}"
    yield ""


def marked(before: str, after: str) -> str:
    """The second text as one line, with marks of what it lacks of the first one, and adds."""
    pieces = filter_samples.changes(before, after)
    return "".join(_MARKS[kind].format(printable(piece)) for kind, piece in pieces)


def printable(text: str) -> str:
    """Return a text as one line, without control characters, which could steer the terminal."""
    text = text.replace("\n", "⏎")
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _bad(trial: Trial) -> list[str]:
    more = len(trial.bad) - _MAX_BAD
    return [*trial.bad[:_MAX_BAD], *([f"and {more:,} more"] if more > 0 else [])]
