"""Figure of document lengths: for each corpus, the shares of documents and tokens per bin."""

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tokamake.data.indexed import length_histogram
from tokamake.report import style
from tokamake.report.style import BLUE, GREY, INK, MUTED
from tokamake.results.corpora import largest

_MAX_ROWS = 12
_MAX_TICKS = 18
_ROW_INCHES, _HEAD_INCHES = 1.25, 0.5


def lengths(corpora: pd.DataFrame, sequence_length: int) -> Figure:
    """Draw bars for each corpus: the shares of its documents and tokens by document length."""
    rows = largest(corpora[corpora["lengths"].astype(bool)], _MAX_ROWS)
    figure = _titled("Document lengths", _ROW_INCHES * max(2, len(rows)) + 0.6)
    if rows.empty:
        return figure
    panels = figure.subplots(len(rows), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    line = math.log2(sequence_length)
    for axes, corpus in zip(panels, rows.itertuples(), strict=True):
        _bars(axes, corpus)
        dashes = axes.axvline(line, color=MUTED, linewidth=1.2, linestyle=(0, (5, 4)))
        dashes.set_label(f"sequence length {sequence_length:,}")
    all_bins = length_histogram.add(rows["lengths"])
    first, last = (_place(all_bins[end]["longest"]) for end in (0, -1))
    panels[-1].set_xlim(min(first, line) - 0.4, max(last + 1, line) + 0.4)
    _label(panels[-1], range(first, last + 2))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper right", ncols=3, frameon=False)
    return figure


def _titled(title: str, height: float) -> Figure:
    """Make a figure with a title and space for a legend above panels of `height` inches."""
    total_height = height + _HEAD_INCHES
    figure = Figure(figsize=(style.WIDTH_INCHES, total_height), layout="constrained")
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, height / total_height))
    top = 1 - 0.12 / total_height
    figure.text(0.008, top, title, va="top", fontsize=13, fontweight="bold")
    return figure


def _place(longest: int) -> int:
    """Position of a bin on the axis: log2 of its shortest length, -1 for length 0."""
    return longest.bit_length() - 1


def _bars(axes: Axes, corpus: Any) -> None:
    places = [_place(length_bin["longest"]) for length_bin in corpus.lengths]
    documents = [length_bin["documents"] for length_bin in corpus.lengths]
    tokens = [length_bin["tokens"] for length_bin in corpus.lengths]
    for offset, colour, name, counts in (
        (0.29, BLUE, "share of documents", documents),
        (0.71, GREY, "share of tokens", tokens),
    ):
        shares = [count / max(1, sum(counts)) for count in counts]
        axes.bar([place + offset for place in places], shares, 0.4, color=colour, label=name)
    axes.set_title(corpus.corpus, loc="left", fontsize=11, color=INK)
    mean = corpus.tokens / corpus.documents if corpus.documents else 0.0
    axes.set_title(
        f"{corpus.documents:,} documents, {mean:,.0f} tokens each on average",
        loc="right",
        fontsize=10,
        color=MUTED,
    )
    axes.yaxis.set_major_locator(MaxNLocator(2))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="x", visible=False)
    axes.spines["left"].set_visible(False)


def _label(axes: Axes, places: range) -> None:
    step = 1 if len(places) <= _MAX_TICKS else 2
    shown = [place for place in places if place < 0 or place % step == 0]
    axes.set_xticks(shown, [_power(place) for place in shown])
    axes.set_xlabel("tokens of a document")


def _power(place: int) -> str:
    """Format 2 ** place: 512, 1k for 1,024, 1M for 1,048,576."""
    if place < 0:
        return "0"
    thousands, exponent = divmod(place, 10)
    return f"{2**exponent}{('', 'k', 'M', 'G', 'T')[thousands]}"
