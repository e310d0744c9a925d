"""The look of all figures: colours, type, axes, labels beside the lines, reproducible SVG files."""

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
"""One a set, again from the first where there are more."""
WIDTH_INCHES = 9.0
"""648 pt, so 864 CSS pixels wide."""
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
    """Give figures made inside the house's look, whatever matplotlibrc says."""
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
    """Write labels to the right of the axes at their heights, moved apart where they would touch.

    The axes' limits must be final.
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
    """Heights in the same order with room between: moved up from below, then down from the top."""
    (low, high), figure = axes.get_ylim(), axes.get_figure()
    assert isinstance(figure, Figure)
    line = _LINE_INCHES / (0.8 * figure.get_figheight()) * (high - low)
    halves = [line * (1 + label.text.count("\n")) / 2 for label in ordered]
    heights = [label.y for label in ordered]
    for index, half in enumerate(halves):
        floor = heights[index - 1] + halves[index - 1] if index else low
        heights[index] = max(heights[index], floor + half)
    for index, half in reversed(list(enumerate(halves))):
        above = index + 1 < len(heights)
        ceiling = heights[index + 1] - halves[index + 1] if above else high
        heights[index] = min(heights[index], ceiling - half)
    return heights


def scientific(value: float) -> str:
    """Write a small number as in print: 2.93 × 10 to the power of -4, in matplotlib's math text."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return rf"${mantissa} \times 10^{{{int(exponent)}}}$"


def save(figure: Figure, path: Path) -> None:
    """Write an SVG file whose bytes depend on the figure alone."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
