"""Style of all figures: colours, fonts, axes, labels beside lines, reproducible SVG files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

INK, MUTED, GRID = "#22272e", "#6b7480", "#e4e7eb"
BLUE, PALE_BLUE, ORANGE, GREY = "#2f6db5", "#b5cde8", "#c4601d", "#a9b1bb"
VALIDATION_COLORS = (ORANGE, "#7a4fa3", "#2e8b57", "#b03060", "#8c6d1f")
WIDTH_INCHES = 9.0
"""648 pt, or 864 CSS pixels."""
_LINE_INCHES = 0.22

_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "tokamake",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "white",
    "lines.solid_capstyle": "round",
}


class Label(NamedTuple):
    """Text beside the right end of a line."""

    y: float
    text: str
    colour: str


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style to figures made in this context, regardless of matplotlibrc."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def over_steps(title: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """Make a figure whose horizontal axis counts steps."""
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=12)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.01)
    return figure, axes


def label_ends(axes: Axes, labels: list[Label]) -> None:
    """Write labels to the right of the axes, moved apart where they would overlap.

    Set the limits of the axes before this call.
    """
    ordered = sorted(labels)
    for label, y in zip(ordered, _spread(axes, ordered), strict=True):
        axes.annotate(
            label.text,
            (1.0, y),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            color=label.colour,
            verticalalignment="center",
            annotation_clip=False,
        )


def _spread(axes: Axes, ordered: list[Label]) -> list[float]:
    """Return heights without overlaps: move labels up from the bottom, then down from the top."""
    (low, high), figure = axes.get_ylim(), axes.get_figure()
    assert isinstance(figure, Figure)
    line = _LINE_INCHES / (0.8 * figure.get_figheight()) * (high - low)
    halves = [line * (1 + label.text.count("\n")) / 2 for label in ordered]
    heights = [label.y for label in ordered]
    for index, half in enumerate(halves):
        floor = heights[index - 1] + halves[index - 1] if index else low
        heights[index] = max(heights[index], floor + half)
    for index, half in reversed(list(enumerate(halves))):
        has_next = index + 1 < len(heights)
        ceiling = heights[index + 1] - halves[index + 1] if has_next else high
        heights[index] = min(heights[index], ceiling - half)
    return heights


def scientific(value: float) -> str:
    """Format a number in scientific notation, as matplotlib math text: $2.93 \\times 10^{-4}$."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return rf"${mantissa} \times 10^{{{int(exponent)}}}$"


def save(figure: Figure, path: Path) -> None:
    """Write an SVG file. Its bytes depend only on the figure: no date, no creator."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
