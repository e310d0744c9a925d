"""Figures with hover and zoom, drawn by Bokeh in the reader's browser.

Colours are Okabe and Ito's, which colour-blind readers tell apart, on white. On dark screens,
style.css inverts figures as a whole, so that prints are the same in both.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokamake.report.page.series import Floats, thinned

if TYPE_CHECKING:
    from bokeh.plotting import figure as Plot

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A")
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
PALE, MUTED = "#A9C4DB", "#5F6670"
_POINTS = 2_000
"""Points of a curve, at most."""
_MAX_MARKERS = 30
"""Points of a curve with markers, at most."""
_ALL_POINTS = 200_000
"""Points of all curves of a page, at most: 8 bytes each, about 2 MB in base64."""


class Curve(NamedTuple):
    """A curve, or points."""

    name: str
    x: Floats
    y: Floats
    color: str = COLORS[0]
    dash: str = "solid"
    kind: str = "line"
    """line, points (markers alone) or both."""
    width: float = 2.0
    notes: Sequence[str] = ()
    """Texts of the points, for hover."""


class Axes(NamedTuple):
    """Names and scales of the axes of a figure."""

    x: str
    y: str
    x_log: bool = False
    y_log: bool = False
    y_form: str = "0,0.[0000]"
    """Format of values in hover, as of numeral.js, or of printf if it begins with %."""
    from_zero: bool = False
    y_ticks: str = ""
    """Format of numbers at the axis, as of numeral.js; empty: Bokeh chooses."""


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def dash(number: int) -> str:
    return DASHES[number // len(COLORS) % len(DASHES)]


class Figures:
    """The figures of a page.

    Attributes:
        max_points: points of each curve; set it to `points_for(curves)` before the first figure.
    """

    def __init__(self) -> None:
        self._items: list[str] = []
        self.max_points = _POINTS

    @property
    def is_used(self) -> bool:
        return bool(self._items)

    def curves(
        self,
        title: str,
        lines: Sequence[Curve],
        *,
        axes: Axes,
        note: str = "",
        has_legend: bool = True,
    ) -> str:
        """HTML of a figure of curves, with a legend if there are several names, and a table."""
        drawn = [line for line in map(_finite, lines) if len(line.x)]
        if not drawn:
            return ""
        plot = _plot(drawn, axes)
        for line in drawn:
            x, y = line.x, line.y
            if not line.notes:
                x, y = thinned(x, y, max_points=self.max_points)
            _draw(plot, line._replace(x=x, y=y), axes=axes)
        names = legend(drawn) if has_legend else ""
        return self._figure(title, plot, lines=drawn, axes=axes, text=(names, note))

    def bars(
        self,
        title: str,
        places: Sequence[str],
        shares: dict[str, Sequence[float]],
        *,
        axes: Axes,
        note: str = "",
    ) -> str:
        """HTML of a figure of bars: `shares` has the values of each series at all places."""
        from bokeh.models import FactorRange
        from bokeh.plotting import figure

        ranges: dict[str, Any] = {"x_range": FactorRange(factors=[*places])}
        plot = figure(height=260, **ranges, **_OPTIONS)
        _style(plot, axes)
        width, lines = 0.8 / len(shares), []
        for number, (name, values) in enumerate(shares.items()):
            offset = width * (number - (len(shares) - 1) / 2)
            data = {"x": [(place, offset) for place in places], "y": [*values], "at": [*places]}
            bars = plot.vbar(
                x="x", top="y", width=width * 0.92, source=_source(data), color=color(number),
                name=name, bottom=0,
            )  # fmt: skip
            _hover(
                plot, bars, shown=[("", "$name"), (axes.x, "@at"), (axes.y, f"@y{{{axes.y_form}}}")]
            )
            x = np.arange(len(places), dtype=float)
            lines.append(Curve(name, x, np.asarray(values, float), color(number)))
        plot.y_range.start = 0  # type: ignore[attr-defined]
        plot.xgrid.grid_line_color = None
        if len(places) > 6:
            plot.xaxis.major_label_orientation = 0.7
        text = (legend(lines), note)
        return self._figure(title, plot, lines=lines, axes=axes, text=text, places=places)

    def _figure(
        self,
        title: str,
        plot: "Plot",
        *,
        lines: Sequence[Curve],
        axes: Axes,
        text: tuple[str, str],
        places: Sequence[str] = (),
    ) -> str:
        """HTML of a figure; `text`: its legend, and a note below."""
        from bokeh.embed import json_item

        names, note = text

        name = f"figure-{len(self._items) + 1}"
        self._items.append(name)
        item = json.dumps(json_item(plot), separators=(",", ":")).replace("<", "\\u003c")
        shown = [line for line in lines if line.kind != "points"]
        table = _bar_table(shown, places) if places else _table(shown, axes)
        label = f"{title}: {axes.y} by {axes.x}, {_summary(shown, places)}"
        return (
            f'<figure class="plot">\n<figcaption>{escape(title)}</figcaption>\n'
            f'{names}<div class="canvas" id="{name}" role="img" tabindex="0" '
            f'aria-label="{escape(label)}"></div>\n'
            f'<script type="application/json" data-figure="{name}">{item}</script>\n'
            + (f'<p class="note">{escape(note)}</p>\n' if note else "")
            + f"<details><summary>Numbers</summary>{table}</details>\n</figure>\n"
        )


def points_for(curves: int) -> int:
    """Points of each curve of a page of `curves` curves."""
    return max(100, min(_POINTS, _ALL_POINTS // max(1, curves)))


def legend(lines: Iterable[Curve]) -> str:
    """Names and colours of curves; a click hides or shows a curve. Empty: there is one name."""
    by_name = {line.name: line for line in lines}
    if len(by_name) < 2:
        return ""
    items = "".join(
        f'<button type="button" aria-pressed="true" data-line="{escape(name)}">'
        f'<span class="swatch" style="border-color:{line.color};border-style:'
        f'{"solid" if line.dash == "solid" else "dotted" if "dot" in line.dash else "dashed"}">'
        f"</span>{escape(name)}</button>"
        for name, line in by_name.items()
    )
    return f'<div class="legend">{items}</div>\n'


_OPTIONS: dict[str, Any] = {
    **{"sizing_mode": "stretch_width", "toolbar_location": "above"},
    **{"tools": "pan,box_zoom,wheel_zoom,reset,save", "active_drag": "box_zoom"},
}


def _plot(lines: Sequence[Curve], axes: Axes) -> "Plot":
    from bokeh.models import BasicTickFormatter, LogTicker, NumeralTickFormatter, Range1d
    from bokeh.plotting import figure

    x = _limits([line.x for line in lines], is_log=axes.x_log)
    y = _limits([line.y for line in lines], is_log=axes.y_log)
    if axes.from_zero and not axes.y_log:
        y = (0.0, y[1])
    plot = figure(
        height=300,
        x_range=Range1d(start=x[0], end=x[1]),
        y_range=Range1d(start=y[0], end=y[1]),
        x_axis_type="log" if axes.x_log else "linear",
        y_axis_type="log" if axes.y_log else "linear",
        **_OPTIONS,
    )
    _style(plot, axes)
    plot.xaxis.formatter = NumeralTickFormatter(format="0[.]00a")
    if axes.x_log:
        plot.xaxis.ticker = LogTicker(mantissas=[1, 3])
        plot.xaxis.formatter = BasicTickFormatter(
            precision=0, power_limit_low=-1, power_limit_high=3
        )
    if axes.y_ticks:
        plot.yaxis.formatter = NumeralTickFormatter(format=axes.y_ticks)
    return plot


def _finite(line: Curve) -> Curve:
    """The points that were measured."""
    known = np.isfinite(line.x) & np.isfinite(line.y)
    return line if known.all() else line._replace(x=line.x[known], y=line.y[known], notes=())


def _limits(values: Sequence[Floats], *, is_log: bool) -> tuple[float, float]:
    """Ends of an axis, with a margin."""
    joined = np.concatenate(values)
    joined = joined[np.isfinite(joined) & ((joined > 0) | (not is_log))]
    if not len(joined):
        return (0.1, 1.0)
    low, high = float(joined.min()), float(joined.max())
    if is_log:
        return low / 1.15, high * 1.15
    margin = 0.03 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _style(plot: "Plot", axes: Axes) -> None:
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    plot.outline_line_color = None
    plot.xaxis.axis_label, plot.yaxis.axis_label = axes.x, axes.y
    font = "system-ui, sans-serif"
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_label_text_font = axis.major_label_text_font = font
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = MUTED
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.axis_line_color = axis.major_tick_line_color = "#A9B1BB"
        axis.minor_tick_line_color = None
    plot.grid.grid_line_color = "#E4E7EB"


def _draw(plot: "Plot", line: Curve, *, axes: Axes) -> None:
    whole = np.isfinite(line.x).all() and (line.x == line.x.round()).all()
    fits = whole and len(line.x) and abs(line.x).max() < 2**31
    x = line.x.astype(np.int32 if fits else np.float64)
    data: dict[str, Any] = {"x": x, "y": line.y.astype(np.float32)}
    if line.notes:
        data["note"] = [*line.notes]
    source = _source(data)
    glyphs: list[Any] = []
    if line.kind != "points":
        glyphs.append(
            plot.line(
                "x", "y", source=source, color=line.color, line_width=line.width, name=line.name,
                line_dash=line.dash,
            )
        )  # fmt: skip
    is_dense = line.kind == "both" and len(line.x) > _MAX_MARKERS
    if len(line.x) == 1 or (line.kind != "line" and not is_dense):
        marker = "inverted_triangle" if line.notes else "circle"
        glyphs.append(
            plot.scatter(
                "x", "y", source=source, color=line.color, size=11 if line.notes else 6,
                marker=marker, name=line.name,
            )
        )  # fmt: skip
    form = "0,0" if fits else "%.3e"
    shown = [("", "$name"), (axes.x, f"@x{{{form}}}"), (axes.y, f"@y{{{axes.y_form}}}")]
    _hover(plot, glyphs[0], shown=[("", "@note")] if line.notes else shown)


def _hover(plot: "Plot", glyph: Any, *, shown: list[tuple[str, str]]) -> None:
    from bokeh.models import HoverTool

    kinds: dict[str, Any] = {text.partition("{")[0]: "printf" for _, text in shown if "{%" in text}
    plot.add_tools(HoverTool(renderers=[glyph], tooltips=shown, formatters=kinds, visible=False))


def _source(data: dict[str, Any]) -> Any:
    from bokeh.models import ColumnDataSource

    return ColumnDataSource(data)


def _table(lines: Sequence[Curve], axes: Axes) -> str:
    from tokamake.report.html_pages import table

    rows = [
        [line.name, f"{len(line.x):,}", *map(_number, _facts(line.y)), _number(line.x[-1])]
        for line in lines
    ]
    header = ["", "points", "first", "lowest", "highest", "last", f"last {axes.x}"]
    return table(header, rows)


def _bar_table(lines: Sequence[Curve], places: Sequence[str]) -> str:
    from tokamake.report.html_pages import table

    rows = [[place, *(_number(line.y[row]) for line in lines)] for row, place in enumerate(places)]
    return table(["", *(line.name for line in lines)], rows)


def _facts(values: Floats) -> list[float]:
    return [values[0], np.nanmin(values), np.nanmax(values), values[-1]]


def _number(value: float) -> str:
    whole = np.isfinite(value) and value == round(value) and abs(value) < 1e15
    return f"{value:,.0f}" if whole else f"{value:,.5g}"


def _summary(lines: Sequence[Curve], places: Sequence[str]) -> str:
    """The figure in words, for screen readers."""
    if places:
        return f"{', '.join(line.name for line in lines)} of {len(places)} bars"
    ends = [f"{line.name} ends at {_number(line.y[-1])}" for line in lines[:8]]
    return "; ".join([*ends, *(["and others"] if len(lines) > 8 else [])])
