"""The runs at a glance: what was built, with what, how good, how long, at what cost."""

import math
import shlex
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from tokamake.config.objective import objective_data
from tokamake.report import html_pages
from tokamake.report.describe_run import (
    best_checkpoint,
    losses_of,
    recipe_of,
    shape_of,
    start_of,
    unit_of,
)
from tokamake.report.html_pages import cell
from tokamake.report.page.contents import PageContents
from tokamake.units import amount, duration

TITLE = "Overview"
PLACE = 0

_HEADER = (
    *("run", "state", "tokens", "training loss", "validation loss", "perplexity"),
    *("bits per byte", "training time", "node-hours"),
)


def render(contents: PageContents) -> str:
    """A sentence and the numbers of the best run; with several runs, a table of all.

    Without a best run, there is the table alone.
    """
    if contents.runs.empty:
        return "<p>No run has begun: the workflow writes run.yaml when its data are ready.</p>"
    spent = contents.costs
    rows = [_row(contents, run, spent=spent) for run in contents.runs.itertuples()]
    table = html_pages.table(_HEADER, rows) if len(rows) > 1 else ""
    best = best_run(contents)
    if best is None:
        return (
            "<p>The runs differ in objective, tokenizer or data, so losses do not tell which one "
            "is the best. <code>tokamake report</code> with the folder of a run shows more.</p>\n"
            f"{table}"
        )
    intro = f"<p>The best run is <strong>{escape(best.run)}</strong>.</p>" if table else ""
    tiles = _tiles(contents, best, spent=spent)
    return "\n".join([intro, _sentences(contents, best), tiles, table, _facts(contents, best)])


def best_run(contents: PageContents) -> Any:
    """The run with the lowest validation loss, else training loss; None: they do not compare."""
    order = ["validation_loss", "last_loss", "run"]
    kinds = {
        (run.train.objective, run.tokenizer, run.architecture.vocab_size, run.data_root)
        for run in contents.settings.values()
    }
    if len(kinds) > 1:
        return None
    return next(contents.runs.sort_values(order, kind="stable").itertuples())


def progress(contents: PageContents, name: str) -> tuple[int, int | None]:
    """Last logged step of a run, and its number of steps."""
    history, run = contents.histories.get(name), contents.settings.get(name)
    step = 0 if history is None else int(history["step"].max())
    return step, run.train.train_steps if run else None


def state(contents: PageContents, name: str) -> str:
    step, steps = progress(contents, name)
    if (contents.folders[name] / "train.json").is_file():
        return f"trained, {step:,} steps" if step else "trained"
    return f"step {step:,} of {steps:,}" if steps else f"step {step:,}"


def _latest(contents: PageContents, name: str, kind: str) -> float | None:
    """Last value of a metric, also of a run that still trains."""
    history = contents.histories.get(name)
    if history is None or kind not in history:
        return None
    values = history[kind].dropna()
    return float(values.iloc[-1]) if len(values) else None


def _or(value: Any, other: float | None) -> Any:
    return other if pd.isna(value) else value


def _sentences(contents: PageContents, best: Any) -> str:
    run = contents.settings.get(best.run)
    if run is None:
        return ""
    parameters = "" if pd.isna(best.parameters) else f" with {amount(best.parameters)} parameters"
    start = f"from run {run.parent}" if run.parent else "from random weights"
    if run.train.finetune is not None and not run.parent:
        start = f"from {run.checkpoint}"
    mixture = contents.mixtures[contents.mixtures["run"] == best.run]
    corpora = ", ".join(mixture[mixture["share_of_samples"] > 0]["corpus"])
    on = f" on {escape(corpora)}" if corpora else ""
    article = "An" if run.architecture.family[0] in "aeiou" else "A"
    return (
        f"<p>{article} {escape(run.architecture.family)} model{parameters}, trained "
        f"{escape(start)}{on}. {escape(state(contents, best.run).capitalize())}.</p>"
    )


def _tiles(contents: PageContents, best: Any, *, spent: pd.DataFrame) -> str:
    validation = _or(best.validation_loss, _latest(contents, best.run, "validation_loss"))
    tokens = _or(best.consumed_tokens, _latest(contents, best.run, "consumed_tokens"))
    speed = _or(best.tokens_per_second, _latest(contents, best.run, "tokens_per_second"))
    own = spent[spent["run"] == best.run]
    is_data = spent["run"].isna() & (spent["data_set"] == best.data_set)
    run = contents.settings.get(best.run)
    unit = unit_of(run) if run and validation is not None else ""
    split = (contents.read(best.run, "evaluate.json") or {}).get("split", "test")
    held_out = f"held-out documents of the {split} split"
    tiles = [
        ("validation loss", cell(validation, ".4f"), f"{unit}{_validated(contents, best.run)}"),
        ("perplexity", cell(best.perplexity, ",.2f"), held_out),
        ("bits per byte", cell(best.bits_per_byte, ".4f"), held_out),
        ("tokens trained", "–" if tokens is None else amount(tokens), state(contents, best.run)),
        (
            "training time",
            "–" if pd.isna(best.seconds) else duration(best.seconds),
            "" if speed is None else f"{speed:,.0f} tokens/s",
        ),
        (
            "node-hours",
            cell(own["node_hours"].sum(), ".3g") if len(own) else "–",
            _spent(own, data=spent[is_data]["node_hours"].sum()),
        ),
    ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
        if value != "–"
    )
    return f'<dl class="tiles">{items}</dl>'


def _spent(own: pd.DataFrame, *, data: float) -> str:
    """Share of training in a run's node-hours, and the node-hours of its data folder."""
    hours = own.groupby("stage")["node_hours"].sum()
    if "train" not in hours:
        return ""
    return f"{hours['train']:.3g} of them training" + (f"; the data: {data:.3g} more" * bool(data))


def _validated(contents: PageContents, name: str) -> str:
    """Split and step of the last validation."""
    history = contents.histories.get(name)
    if history is None or "validation_loss" not in history:
        return ""
    step = int(history.dropna(subset=["validation_loss"])["step"].max())
    return f", validation split, step {step:,}" if step else ", validation split, before training"


def _row(contents: PageContents, run: Any, *, spent: pd.DataFrame) -> list[str]:
    own = spent[spent["run"] == run.run]["node_hours"].sum()
    losses = (
        _or(run.last_loss, _latest(contents, run.run, "loss")),
        _or(run.validation_loss, _latest(contents, run.run, "validation_loss")),
    )
    tokens = _or(run.consumed_tokens, _latest(contents, run.run, "consumed_tokens"))
    return [
        run.run,
        state(contents, run.run),
        "–" if tokens is None else f"{tokens:,.0f}",
        *(cell(loss, ".4f") for loss in losses),
        cell(run.perplexity, ",.2f"),
        cell(run.bits_per_byte, ".4f"),
        "–" if pd.isna(run.seconds) else duration(run.seconds),
        cell(own, ".3g") if own else "–",
    ]


def _continuing(folder: Path) -> str:
    """Checkpoint of a run that has not finished, and the command that continues there."""
    newest = folder / "training/latest"
    saved = newest.read_text().strip().removeprefix("global_step") if newest.is_file() else "0"
    place = f"saved at step {int(saved):,}" if saved.isdecimal() and int(saved) else "not saved yet"
    command = f"tokamake train --config {shlex.quote(str(folder / 'run.yaml'))}"
    return f"{place}; the same command as before continues there, or on one rank: {command}"


def _facts(contents: PageContents, best: Any) -> str:
    """Shape, recipe, losses and checkpoint of the best run."""
    run, trained = contents.settings.get(best.run), contents.read(best.run, "train.json")
    if run is None:
        return ""
    values = [("model", shape_of(run)), ("recipe", recipe_of(run)), *start_of(run)]
    if trained:
        values += [*losses_of(trained, run), ("checkpoint", trained["checkpoint"])]
        values.append(("ranks", f"{trained['world_size']:,}"))
    else:
        values.append(("not finished", _continuing(contents.folders[best.run])))
    if run.architecture.is_causal and trained:
        history, chosen = contents.histories.get(best.run), Path(trained["checkpoint"])
        chosen = chosen if history is None else best_checkpoint(history, chosen)
        values.append(("serve the best", f"tokamake serve {shlex.quote(str(chosen))}"))
    if uniform := objective_data(run.train.objective).uniform_loss(run.train, run.architecture):
        is_sum = uniform > math.log(run.architecture.vocab_size or 1)
        more = ", and of the order of sentences" if is_sum else ""
        values.append(("loss of a uniform guess", f"{uniform:.4f} nats per token{more}"))
    return html_pages.definitions(values)
