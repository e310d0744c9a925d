"""Mixture of the corpora: asked for, realized, and epochs."""

from html import escape

import pandas as pd

from tokamake.data.mixture.shares import MANY_EPOCHS
from tokamake.data.samples.index_folder import read_index
from tokamake.errors import UserError
from tokamake.report import html_pages
from tokamake.report.html_pages import cell
from tokamake.report.page.contents import PageContents
from tokamake.report.page.figures import Axes
from tokamake.report.page.sections.overview import progress
from tokamake.results.corpora import largest

TITLE = "Mixture"
PLACE = 30

_HEADER = (
    *("corpus", "training tokens", "share of tokens", "share asked for", "share of samples"),
    "epochs",
)
_MAX_BARS = 20


def render(contents: PageContents) -> str:
    """A table and a figure for each mixture; runs with equal shares are shown together."""
    groups: dict[str, list[pd.DataFrame]] = {}
    for _, rows in contents.mixtures.groupby("run", sort=False):
        shares = rows[["corpus", "trained_tokens", "share_of_samples"]].round(3)
        groups.setdefault(shares.to_csv(index=False), []).append(rows)
    parts = []
    for alike in groups.values():
        names = ", ".join(rows["run"].iloc[0] for rows in alike)
        title = f"<h3>{escape(names)}</h3>\n" if len(groups) > 1 else ""
        plans = "".join(_plan(contents, str(rows["run"].iloc[0])) for rows in alike)
        parts.append(title + plans + _table(contents, alike) + _figure(contents, alike[0]))
    return "\n".join(parts)


def _plan(contents: PageContents, name: str) -> str:
    """A note about a run that has not finished: its mixture is the one of all its steps."""
    step, steps = progress(contents, name)
    if not steps or (contents.folders[name] / "train.json").is_file():
        return ""
    return (
        f'<p class="note">The numbers are for all {steps:,} steps. Run {escape(name)} is at step '
        f"{step:,}: each corpus has had about {step / steps:.0%} of its epochs.</p>\n"
    )


def _table(contents: PageContents, alike: list[pd.DataFrame]) -> str:
    """Shares of each corpus, its epochs in the runs, and a warning about many epochs."""
    asked = _asked(contents, alike[0]["run"].iloc[0])
    lines, repeated = [], []
    for number, row in enumerate(alike[0].itertuples()):
        epochs = [float(rows["epochs"].iloc[number]) for rows in alike]
        least, most = (f"{bound(epochs):.2f}" for bound in (min, max))
        if max(epochs) > MANY_EPOCHS:
            repeated.append(row.corpus)
        lines.append(
            [
                row.corpus,
                f"{row.trained_tokens:,}",
                f"{row.share_of_tokens:.1%}",
                cell(asked.get(row.corpus), ".1%"),
                f"{row.share_of_samples:.1%}" if row.trained_tokens else "held out",
                "–" if not row.trained_tokens else least if least == most else f"{least}–{most}",
            ]
        )
    table = html_pages.table(_HEADER, lines)
    if not repeated:
        return table
    return table + html_pages.warning(
        f"{', '.join(repeated)}: more than {MANY_EPOCHS} epochs. Repeated text teaches less "
        "than new text."
    )


def _figure(contents: PageContents, rows: pd.DataFrame) -> str:
    shown = largest(rows, _MAX_BARS)
    figure = contents.figures.bars(
        "Share of each corpus",
        [*shown["corpus"]],
        {
            "of all tokens": [*shown["share_of_tokens"]],
            "of the training samples": [*shown["share_of_samples"]],
        },
        axes=Axes("corpus", "share", y_form="0.0%"),
    )
    return f'<div class="plots">{figure}</div>'


def _asked(contents: PageContents, run: str) -> dict[str, float]:
    """Weight of each corpus in the weighting file, as a share."""
    try:
        drawn = read_index(contents.folders[run] / "index")["splits"]["train"]["files"]
    except (UserError, KeyError):
        return {}
    weights: dict[str, float] = {}
    for file in drawn:
        weights[file["corpus"]] = weights.get(file["corpus"], 0.0) + file.get("weight", 0.0)
    whole = sum(weights.values())
    return {name: weight / whole for name, weight in weights.items()} if whole else {}
