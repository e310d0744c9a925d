"""HTML pages of the report: corpora, evaluation, samples, and the summary of the run."""

import shlex
from pathlib import Path
from typing import Any

import pandas as pd

from tokamake.config.resolved_run import Run
from tokamake.data.indexed.length_histogram import median_bin
from tokamake.data.indexed.manifest_counts import (
    filter_name,
    num_dropped,
    num_failed,
    num_kept,
    verdicts,
)
from tokamake.report import filter_samples, html_pages
from tokamake.results.corpora import total
from tokamake.units import duration, in_bytes

_STOPPED = {
    "eod": "ended the document",
    "stop": "came to a stop text",
    "max_new_tokens": "reached the maximum length",
    "context": "filled the model's context",
}
_ACCOUNT = (
    *("records read", "skipped", "equal", "nearly equal", "quarantined", "filtered", "empty"),
    "documents",
)
_SUM = (
    '<p class="note">Records read = skipped records + equal, nearly equal, quarantined, filtered '
    "and empty documents + documents.</p>"
)
_PLACES = {"loss": 4, "perplexity": 2, "bits_per_byte": 4}
"""Measure of a model → number of decimals in tables."""


def corpora(rows: pd.DataFrame) -> str:
    """Tables of corpora: sizes, weights, epochs, and statistics of documents."""
    header = ["corpus", "merged datasets", "documents", "tokens", "text", "weight", "epochs"]
    (overall,) = total(rows).itertuples()
    sizes = html_pages.table(header, [*map(_corpus, rows.itertuples())], _corpus(overall))
    documents = html_pages.table(
        ["corpus", *_ACCOUNT], [*map(_documents, rows.itertuples())], _documents(overall)
    )
    header = ["corpus", "bytes per token", "mean length", "median length"]
    lengths = html_pages.table(header, [*map(_lengths, rows.itertuples())], _lengths(overall))
    sections = [("", sizes), ("From raw records to documents", f"{_SUM}\n{documents}")]
    if skipped := [line for row in rows.itertuples() for line in _skipped(row)]:
        table = html_pages.table(["corpus", "kind", "records"], skipped)
        sections.append(("Skipped records", table))
    if passed := [line for row in rows.itertuples() for line in _passed(row)]:
        header = ["corpus", "filter", "saw", "dropped", "failed on", "kept"]
        sections.append(("Filters", html_pages.table(header, passed)))
        filtered = [line for row in rows.itertuples() for line in _filtered(row)]
        header = [
            "corpus",
            "filter",
            "reason",
            "documents",
            "share",
            "change in characters",
            "mean",
        ]
        sections.append(("Verdicts of filters", html_pages.table(header, filtered)))
    sections.append(("Lengths", lengths))
    if samples := "\n".join(filter(None, map(_samples, rows.itertuples()))):
        sections.append(("Samples of filters", samples))
    return html_pages.page("Corpora", html_pages.sections(sections))


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


def _corpus(row: Any) -> list[str]:
    return [
        row.corpus,
        f"{row.datasets:,}",
        f"{row.documents:,}",
        f"{row.tokens:,}",
        "–" if pd.isna(row.text_bytes) else in_bytes(row.text_bytes),
        f"{row.share_of_samples:.1%}" if row.trained_tokens else "held out",
        f"{row.epochs:.2f}" if row.trained_tokens else "–",
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


def _lengths(row: Any) -> list[str]:
    median = median_bin(row.lengths)
    return [
        row.corpus,
        "–" if pd.isna(row.text_bytes) or not row.tokens else f"{row.text_bytes / row.tokens:.2f}",
        f"{row.tokens / row.documents:,.0f}" if row.documents else "–",
        "–" if median is None else _range(median["shortest"], median["longest"]),
    ]


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


def evaluation(
    scored: dict[str, Any], earlier: dict[int, dict[str, Any]], *, tasks: dict[str, dict[str, Any]]
) -> str:
    """Tables of held-out loss, and of scores of tasks, after each segment: by step."""
    header = ("corpus", "documents", "tokens", "bytes", "loss", "perplexity", "bits per byte")
    rows = [_scores(name, scores) for name, scores in scored["corpora"].items()]
    last = html_pages.table(header, rows, _scores("overall", scored["overall"]))
    split = scored.get("split")  # stated only if it is not the test split
    sections = [(f"Split {split}" if split else "", last)]
    if earlier:
        measures = ["step", *header[-len(_PLACES) :]]
        step_rows = [_scores(f"{step:,}", value["overall"]) for step, value in earlier.items()]
        step_rows.append(_scores("last", scored["overall"]))
        cells = [[row[0], *row[-len(_PLACES) :]] for row in step_rows]
        sections.append(("After each segment", html_pages.table(measures, cells)))
    sections += [(f"Task {task}", _task(steps)) for task, steps in tasks.items()]
    return html_pages.page("Evaluation", html_pages.sections(sections))


def _task(steps: dict[str, dict[str, Any]]) -> str:
    """Table of the scores of a task: a row for each metric, a column for each step."""
    metrics = dict.fromkeys(metric for scores in steps.values() for metric in scores)
    rows = [
        [metric, *(_number(scores.get(metric)) for scores in steps.values())] for metric in metrics
    ]
    header = ["step", *steps] if len(steps) > 1 else ["", "score"]
    return html_pages.table(header, rows)


def _number(value: float | None) -> str:
    return html_pages.cell(value, ",.4f" if isinstance(value, float) else ",")


def _scores(name: str, scores: dict[str, Any]) -> list[str]:
    counts = [f"{scores[key]:,}" for key in ("documents", "tokens", "bytes")]
    measures = [html_pages.cell(scores[key], f",.{digits}f") for key, digits in _PLACES.items()]
    return [name, *counts, *measures]


def samples(drawn: list[dict[str, Any]]) -> str:
    """Page of prompts and their continuations."""
    body = "\n".join(
        html_pages.sample(
            sample["prompt"],
            sample["text"],
            f"{sample['num_new_tokens']} tokens; {_STOPPED[sample['stopped']]}",
        )
        for sample in drawn
    )
    return html_pages.page("Samples", body)


def summary(run: Run, trained: dict[str, Any], num_parameters: int, *, best: Path) -> str:
    """Page with the summary of a run: model, training, result, checkpoint to serve, versions."""
    versions = ", ".join(f"{name} {number}" for name, number in trained["versions"].items())
    values = [
        ("model", shape_of(run)),
        ("parameters", f"{num_parameters:,}"),
        ("recipe", recipe_of(run)),
        *_start(run),
        ("data folder", run.data_set),
        ("trained", f"{trained['consumed_tokens']:,} tokens in {trained['step']:,} steps"),
        *losses_of(trained, run),
        ("time", f"{duration(trained['seconds'])} on {_ranks(trained['world_size'])}"),
        ("mean speed", f"{trained['tokens_per_second']:,.0f} tokens/s"),
        ("checkpoint", trained["checkpoint"]),
        ("serve the best", f"tokamake serve {shlex.quote(str(best))}"),
        ("versions", versions),
    ]
    if not run.architecture.is_causal:  # an encoder cannot continue text
        values = [each for each in values if each[0] != "serve the best"]
    return html_pages.page(f"Run {run.run}", html_pages.definitions(values))


def shape_of(run: Run) -> str:
    """Shape of the model in a line."""
    shape = run.architecture
    return (
        f"{shape.family}: {shape.num_hidden_layers} layers, width {shape.hidden_size:,}, "
        f"MLP {shape.intermediate_size:,}, {shape.num_attention_heads} query and "
        f"{shape.num_key_value_heads} key-value heads, vocabulary {shape.vocab_size:,}"
        f"{', tied embeddings' if shape.tie_word_embeddings else ''}"
    )


def recipe_of(run: Run) -> str:
    """Steps, batch, optimizer, schedule and precision in a line."""
    train = run.train
    ramp = train.rampup_batch_size
    batch = f"{f'{ramp[0]:,} to ' if ramp else ''}{train.global_batch_size:,}"
    return (
        f"{train.train_steps:,} steps of {batch} × {train.sequence_length:,} "
        f"tokens, {train.optimizer.name}, {train.schedule.name} schedule, "
        f"{train.precision or 'bf16 on GPUs, fp32 on CPUs'}, ZeRO stage {train.zero_stage}"
    )


def _start(run: Run) -> list[tuple[str, str]]:
    """Initial checkpoint of the run, if its weights were not random."""
    finetune = run.train.finetune
    if finetune is None:
        return []
    mode = "weights alone" if finetune else f"continued at step {run.step:,}"
    if not run.train.load_optimizer:
        mode += " with a new optimizer"
    parent = f"run {run.parent}: " if run.parent else ""
    return [("start", f"{parent}{run.checkpoint}, {mode}")]


def losses_of(trained: dict[str, Any], run: Run) -> list[tuple[str, str]]:
    """Names and values of the losses at the end of training."""
    # The loss of the order of sentences is a mean over samples.
    unit = "nats, tokens and order" if run.architecture.has_sample_head else "nats per token"
    unit = "nats per query" if run.architecture.has_towers else unit
    first, last = trained["first_loss"], trained["last_loss"]
    measurements, losses = trained["validation_losses"], []
    if last is not None:
        text = f"{last:.4f} {unit} at the last logged step, {first:.4f} at the first"
        losses.append(("training loss", text))
    for key, loss in measurements[-1].items() if measurements else ():
        if key != "step":
            kind, _, name = key.replace("_", " ").partition("/")
            value = f"{loss:.4f} {unit}" if kind.endswith("loss") else f"{loss:.1%}"
            losses.append((f"{kind} ({name})" if name else kind, value))
    return losses


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number:,} ranks"
