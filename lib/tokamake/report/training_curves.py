"""Curves of a training over its steps: loss, learning rate, throughput; and its mixture."""

import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.report import style
from tokamake.report.style import BLUE, GREY, INK, MUTED, PALE_BLUE, VALIDATION_COLORS, Label
from tokamake.results.corpora import largest
from tokamake.results.metrics_file import read_metrics

_MAX_BARS = 30
_MAX_CORPORA = 6
_ACCURACIES = {
    "validation_token_accuracy": "tokens",
    "validation_sample_accuracy": "order of sentences",
}
"""Predictions of an encoder, by the key of their accuracy."""
_ACCURACY_AT = re.compile(r"validation_accuracy_at_(\d+)")
"""Keys of a biencoder's accuracies."""

Floats = npt.NDArray[np.float64]


def read_history(path: Path) -> pd.DataFrame:
    """Read the metrics of a run that has trained: columns of `results.metrics`."""
    history = read_metrics(path)
    needed = ("loss", "learning_rate", "tokens_per_second", "consumed_tokens")
    if any(key not in history or history[key].isna().all() for key in needed):
        raise UserError(f"{path}: no training step; run `tokamake train` again")
    return history


def measured(history: pd.DataFrame, kind: str) -> dict[str, tuple[Floats, Floats]]:
    """Steps and values of the columns KIND and KIND/NAME, by NAME; "" is KIND itself."""
    found = {}
    for column in history:
        key, _, name = column.partition("/")
        if key == kind:
            lines = history[["step", column]].dropna()
            found[name] = (lines["step"].to_numpy(float), lines[column].to_numpy())
    return found


def smooth(values: Floats) -> Floats:
    """Centred running mean (n,) over about a twentieth of the values.

    The window is narrow at the start, where losses fall too fast to average over later values. At
    the end, it has no right half.
    """
    half_width, length = max(1, len(values) // 40), len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(length)
    half = np.minimum(places, half_width)
    starts, ends = places - half, np.minimum(places + half + 1, length)
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_of_run(history: pd.DataFrame, run: Run) -> Figure:
    """Draw the losses of a run: of tokens of the vocabulary, or of the blocks of a global batch."""
    if run.architecture.has_towers:
        return loss(history, run.train.global_batch_size, of="query")
    return loss(history, run.architecture.vocab_size or 1)


def loss(history: pd.DataFrame, num_choices: int, *, of: str = "token") -> Figure:
    """Draw raw and smoothed training loss, validation losses, and the loss of a uniform guess.

    If losses of corpora are recorded, draw the corpora with the most lines, smoothed.

    Args:
        num_choices: tokens of the vocabulary, or blocks that a query is compared with.
        of: what has a loss: a token or a query.
    """
    corpora = measured(history, "loss")
    steps, raw = corpora.pop("")
    smoothed = smooth(raw)
    figure, axes = style.over_steps("Loss", height=4.8)
    axes.set_ylabel(f"nats per {of}")
    axes.plot(steps, raw, color=PALE_BLUE, linewidth=1.0)
    axes.plot(steps, smoothed, color=BLUE, linewidth=2.0)
    labels = [Label(smoothed[-1], f"training (smoothed) {smoothed[-1]:.3f}", BLUE)]
    for number, (name, (places, losses)) in enumerate(measured(history, "validation_loss").items()):
        color = VALIDATION_COLORS[number % len(VALIDATION_COLORS)]
        # Points of validation splits may coincide: later ones have smaller markers of other shapes.
        marker, size = "osD^v"[number % 5], max(2.5, 6.5 - 2 * number)
        axes.plot(places, losses, "-", color=color, linewidth=1.0)
        axes.plot(places, losses, marker, color=color, markersize=size)
        title = name or "validation"
        labels.append(Label(losses[-1], f"{title} {losses[-1]:.3f}", color))
    longest = sorted(corpora.items(), key=lambda item: (-len(item[1][0]), item[0]))
    for name, (places, losses) in longest[:_MAX_CORPORA]:
        line = smooth(losses)
        axes.plot(places, line, color=GREY, linewidth=1.2)
        labels.append(Label(line[-1], f"{name} {line[-1]:.3f}", MUTED))
    uniform = math.log(num_choices)
    axes.axhline(uniform, color=MUTED, linewidth=1.2, linestyle=(0, (5, 4)))
    labels.append(Label(uniform, f"uniform guess\nln {num_choices:,} = {uniform:.2f}", MUTED))
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, uniform + 0.04 * (high - low)))
    style.label_ends(axes, labels)
    return figure


def accuracy(history: pd.DataFrame) -> Figure:
    """Draw the share of tokens, samples or blocks that an encoder finds in validations."""
    figure, axes = style.over_steps("Accuracy")
    labels = []
    titles = {
        column: f"in the top {match[1]}"
        for column in history
        if (match := _ACCURACY_AT.fullmatch(column))
    }
    axes.set_ylabel(f"{'blocks found' if titles else 'right predictions'} in validation")
    accuracies = {
        title + f" ({split})" * bool(split): values
        for key, title in {**_ACCURACIES, **titles}.items()
        for split, values in measured(history, key).items()
    }
    for number, (name, (places, shares)) in enumerate(accuracies.items()):
        color = (BLUE, *VALIDATION_COLORS)[number % (1 + len(VALIDATION_COLORS))]
        axes.plot(places, shares, "-o", color=color, linewidth=1.6, markersize=4)
        labels.append(Label(shares[-1], f"{name} {shares[-1]:.1%}", color))
    highest = max((shares.max() for _, shares in accuracies.values()), default=1.0)
    axes.set_ylim(0, min(1.0, 1.25 * highest) or 1.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    style.label_ends(axes, labels)
    return figure


def learning_rate(history: pd.DataFrame) -> Figure:
    """Draw the learning rate over steps, with a label at the highest logged one."""
    steps, rate = measured(history, "learning_rate")[""]
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


def throughput(history: pd.DataFrame) -> Figure:
    """Draw training tokens per second and their median."""
    steps, speed = measured(history, "tokens_per_second")[""]
    median = float(np.median(speed))
    figure, axes = style.over_steps("Throughput")
    axes.set_ylabel("tokens per second")
    axes.plot(steps, speed, "-o", color=PALE_BLUE, linewidth=1.0, markersize=2.5)
    axes.axhline(median, color=BLUE, linewidth=1.6)
    axes.set_ylim(0, max(speed.max() * 1.1, 1.0))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    style.label_ends(axes, [Label(median, f"median\n{median:,.0f} tokens/s", BLUE)])
    return figure


def mixture(corpora: pd.DataFrame) -> Figure:
    """Draw bars for each corpus: its share of all tokens and of the training samples."""
    rows = largest(corpora, _MAX_BARS)
    figure = Figure(figsize=(style.WIDTH_INCHES, 1.5 + 0.62 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title("Mixture", loc="left", fontsize=13, fontweight="bold", pad=12)
    _bars(axes, rows)
    axes.set_yticks(range(len(rows)), rows["corpus"], color=INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(0, 1.12 * rows[["share_of_tokens", "share_of_samples"]].max().max())
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
    return figure


def _bars(axes: Axes, rows: pd.DataFrame) -> None:
    for offset, colour, name, shares in (
        (-0.18, GREY, "share of tokens", rows["share_of_tokens"]),
        (0.18, BLUE, "share of training samples", rows["share_of_samples"]),
    ):
        places = [place + offset for place in range(len(rows))]
        bars = axes.barh(places, shares, height=0.32, color=colour, label=name)
        axes.bar_label(
            bars, [f"{share:.1%}" for share in shares], padding=4, fontsize=10, color=MUTED
        )
