"""Curves of a training over its steps: loss, learning rate, throughput; and its mixture."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from tokamake.report import style
from tokamake.report.metrics_history import MetricsHistory, smooth
from tokamake.report.mixture import Component, largest
from tokamake.report.style import BLUE, GREY, INK, MUTED, PALE_BLUE, VALIDATION_COLORS, Label

_MAX_BARS = 30
_MAX_CORPORA = 6


def loss(history: MetricsHistory, vocab_size: int) -> Figure:
    """Draw raw and smoothed training loss, validation losses, and the loss of a uniform guess.

    If losses of corpora are recorded, draw those of the corpora with the most lines, smoothed.
    """
    steps, raw = history.training["step"], history.training["loss"]
    smoothed = smooth(raw)
    figure, axes = style.over_steps("Loss", height=4.8)
    axes.set_ylabel("nats per token")
    axes.plot(steps, raw, color=PALE_BLUE, linewidth=1.0)
    axes.plot(steps, smoothed, color=BLUE, linewidth=2.0)
    labels = [Label(smoothed[-1], f"training (smoothed) {smoothed[-1]:.3f}", BLUE)]
    for number, (name, (places, losses)) in enumerate(history.validation.items()):
        color = VALIDATION_COLORS[number % len(VALIDATION_COLORS)]
        # Points of validation splits may coincide: later ones have smaller markers of other shapes.
        marker, size = "osD^v"[number % 5], max(2.5, 6.5 - 2 * number)
        axes.plot(places, losses, "-", color=color, linewidth=1.0)
        axes.plot(places, losses, marker, color=color, markersize=size)
        title = "validation" if name == "valid" else name
        labels.append(Label(losses[-1], f"{title} {losses[-1]:.3f}", color))
    longest = sorted(history.corpora.items(), key=lambda item: (-len(item[1][0]), item[0]))
    for name, (places, losses) in longest[:_MAX_CORPORA]:
        line = smooth(losses)
        axes.plot(places, line, color=GREY, linewidth=1.2)
        labels.append(Label(line[-1], f"{name} {line[-1]:.3f}", MUTED))
    uniform = math.log(vocab_size)
    axes.axhline(uniform, color=MUTED, linewidth=1.2, linestyle=(0, (5, 4)))
    labels.append(Label(uniform, f"uniform guess\nln {vocab_size:,} = {uniform:.2f}", MUTED))
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, uniform + 0.04 * (high - low)))
    style.label_ends(axes, labels)
    return figure


def accuracy(history: MetricsHistory) -> Figure:
    """Draw the share of tokens, and of samples, that an encoder predicts in validations."""
    figure, axes = style.over_steps("Accuracy")
    axes.set_ylabel("right predictions in validation")
    labels = []
    for number, (name, (places, shares)) in enumerate(history.accuracies.items()):
        color = (BLUE, *VALIDATION_COLORS)[number % (1 + len(VALIDATION_COLORS))]
        axes.plot(places, shares, "-o", color=color, linewidth=1.6, markersize=4)
        labels.append(Label(shares[-1], f"{name} {shares[-1]:.1%}", color))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    style.label_ends(axes, labels)
    return figure


def learning_rate(history: MetricsHistory) -> Figure:
    """Draw the learning rate over steps, with a label at the highest logged one."""
    steps, rate = history.training["step"], history.training["learning_rate"]
    figure, axes = style.over_steps("Learning rate")
    axes.plot(steps, rate, color=BLUE, linewidth=2.0)
    axes.set_ylim(0, max(rate.max() * 1.12, 1e-12))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    peak = int(rate.argmax())
    axes.annotate(
        f"highest logged {style.scientific(rate[peak])} at step {steps[peak]:,.0f}",
        (steps[peak], rate[peak]),
        xytext=(0, 8),
        textcoords="offset points",
        horizontalalignment="left" if peak < len(rate) / 2 else "right",
        color=BLUE,
    )
    style.label_ends(axes, [Label(rate[-1], f"last {style.scientific(rate[-1])}", BLUE)])
    return figure


def throughput(history: MetricsHistory) -> Figure:
    """Draw training tokens per second and their median."""
    steps, speed = history.training["step"], history.training["tokens_per_second"]
    median = float(np.median(speed))
    figure, axes = style.over_steps("Throughput")
    axes.set_ylabel("tokens per second")
    axes.plot(steps, speed, "-o", color=PALE_BLUE, linewidth=1.0, markersize=2.5)
    axes.axhline(median, color=BLUE, linewidth=1.6)
    axes.set_ylim(0, max(speed.max() * 1.1, 1.0))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    style.label_ends(axes, [Label(median, f"median\n{median:,.0f} tokens/s", BLUE)])
    return figure


def mixture(corpora: list[Component]) -> Figure:
    """Draw bars for each corpus: its share of all tokens and of the training samples."""
    rows = largest(corpora, _MAX_BARS)
    figure = Figure(figsize=(style.WIDTH_INCHES, 1.5 + 0.62 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title("Mixture", loc="left", fontsize=13, fontweight="bold", pad=12)
    _bars(axes, rows)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], color=INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(0, 1.12 * max(max(row.share_of_tokens, row.share_of_samples) for row in rows))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
    return figure


def _bars(axes: Axes, rows: list[Component]) -> None:
    for offset, colour, name, shares in (
        (-0.18, GREY, "share of tokens", [row.share_of_tokens for row in rows]),
        (0.18, BLUE, "share of training samples", [row.share_of_samples for row in rows]),
    ):
        places = [place + offset for place in range(len(rows))]
        bars = axes.barh(places, shares, height=0.32, color=colour, label=name)
        axes.bar_label(
            bars, [f"{share:.1%}" for share in shares], padding=4, fontsize=10, color=MUTED
        )
