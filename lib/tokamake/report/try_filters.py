"""Tool `try-filters`: run the filters of a config on a sample of the raw documents."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.data import TokenizeSettings
    from tokamake.config.tasks import Tasks
    from tokamake.data.corpus.corpora import Corpus
    from tokamake.data.readers import Input, RecordBlock
    from tokamake.report.filter_trial import Trial


def try_filters(
    config: Path,
    /,
    *,
    corpus: tuple[str, ...] = (),
    documents: int = 1000,
    examples: int = 3,
    page: Path | None = None,
) -> None:
    """Show the effect of the filters of a config on a sample of the raw documents.

    The sample is the same at each call: documents from evenly spaced files and places. Nothing else
    of the workflow has to exist. For each filter, a table has the documents that it saw, kept,
    changed and dropped, by reason, with the mean of the numbers that decided, the change in
    characters, and its seconds per MB of text. Examples follow, with file and line. Duplicates,
    near-duplicates and repeated text stay: finding them takes all documents.

    Args:
        config: config file of a workflow, such as config/config.yaml: its settings `corpora` and
            `tokenize`.
        corpus: names of corpora; by default all that have filters.
        documents: number of documents of each corpus.
        examples: number of examples of each verdict of a filter.
        page: HTML file to write with the same tables and examples.
    """
    if documents < 1:
        raise UserError(f"--documents {documents}: give at least 1")
    if examples < 0:
        raise UserError(f"--examples {examples}: give 0 or more")
    from tokamake import files
    from tokamake.report import filter_trial

    settings, rows, tasks = _read(config, corpus)
    trials = []
    for row in rows:
        trials.append(_trial(row, settings, tasks=tasks, documents=documents, examples=examples))
        print(filter_trial.text(trials[-1]))
    if note := _not_tried(settings):
        print(note)
    if page is not None:
        files.write_text(page, filter_trial.page(trials, note))
        print(f"{page}: {len(trials)} {'corpus' if len(trials) == 1 else 'corpora'}")


def _not_tried(settings: "TokenizeSettings") -> str:
    """Line about settings that drop or cut documents, but are no filters; empty: none is set."""
    names = ("deduplicate", "near_duplicates", "repeats")
    asked = [f"tokenize.{name}" for name in names if getattr(settings, name)]
    if not asked:
        return ""
    pronoun = "it compares" if len(asked) == 1 else "they compare"
    return f"not tried: {', '.join(asked)}: {pronoun} all documents"


def _read(config: Path, names: Sequence[str]) -> "tuple[TokenizeSettings, list[Corpus], Tasks]":
    """Read settings, the chosen rows of the table of corpora, and the evaluation tasks."""
    from tokamake.config.data import TokenizeSettings
    from tokamake.config.root import EvaluateSettings
    from tokamake.config_files import read_yaml, validate
    from tokamake.data.corpus.corpora import INDEXED, read_corpora

    values = read_yaml(config, "name the config file of a workflow")
    if not isinstance(values, dict):
        raise UserError(f"{config}: not a config; name the config file of a workflow")
    settings = validate(TokenizeSettings, values.get("tokenize") or {}, f"{config}: tokenize")
    table = values.get("corpora", "config/corpora.tsv")
    if not isinstance(table, str):
        raise UserError(f"{config}: corpora: names no table; give one with raw files")
    rows = {row.corpus: row for row in read_corpora(Path(table))}
    if unknown := [name for name in names if name not in rows]:
        raise UserError(f"--corpus {unknown[0]}: not in {table}; name one of {', '.join(rows)}")
    filtered = [
        name
        for name, row in rows.items()
        if row.format != INDEXED and (settings.filters if row.filters is None else row.filters)
    ]
    if without := [name for name in names if name not in filtered]:
        raise UserError(
            f"{rows[without[0]].where}: {without[0]} has no filters; set tokenize.filters, or its "
            "column filters"
        )
    if not filtered:
        raise UserError(
            f"{config}: no corpus has filters; set tokenize.filters, or the column filters of "
            f"{table}"
        )
    evaluate = validate(EvaluateSettings, values.get("evaluate") or {}, f"{config}: evaluate")
    return settings, [rows[name] for name in names or filtered], evaluate.tasks


def _trial(
    row: "Corpus", settings: "TokenizeSettings", *, tasks: "Tasks", documents: int, examples: int
) -> "Trial":
    """Run the filters of a corpus on a sample."""
    from tokamake.config.filters import complete_filters
    from tokamake.data.corpus.corpora import refuse_addresses
    from tokamake.data.corpus.documents import Fields, split_keys
    from tokamake.data.corpus.drawn_documents import draw
    from tokamake.data.corpus.raw_files import raw_files
    from tokamake.data.filters import _run_and_count
    from tokamake.report.filter_trial import TimedFilter, Trial

    refuse_addresses(row)
    filters = settings.filters if row.filters is None else row.filters
    loaded = _run_and_count.load_filters(complete_filters(filters, tasks))
    _run_and_count.set_up(loaded)
    timed = [TimedFilter.around(each.filter) for each in loaded]
    run = _run_and_count.FilterRun(
        [each._replace(filter=timer) for each, timer in zip(loaded, timed, strict=True)],
        seconds=settings.filter_seconds,
        num_samples=examples,
    )
    paths = [Path(file.path) for file in raw_files(row, {})]
    bad: list[str] = []
    num_documents = num_kept = 0
    for drawn in draw(
        paths,
        documents,
        fields=Fields(split_keys([row.text_key]), row.template).checked(),
        format=row.format,
        metadata_keys=run.metadata_keys,
    ):
        source, block, columns, indices, unreadable = drawn
        set_aside = partial(_set_aside, bad, source, block)
        for index, reason in unreadable:
            set_aside(index, reason)
        _, kept = run.apply(columns, block, indices=indices, source=source, on_failure=set_aside)
        num_documents += drawn.num_documents
        num_kept += len(kept)
    if not num_documents:
        raise UserError(f"{row.where}: files: {row.files}: no document; name other files")
    return Trial(
        row.corpus,
        len(paths),
        num_documents,
        num_kept,
        run.counts,
        [timer.seconds_per_mb for timer in timed],
        bad,
        stops=settings.on_bad_document == "stop",
    )


def _set_aside(
    bad: list[str], source: "Input", block: "RecordBlock", index: int, reason: str
) -> None:
    from tokamake.data.corpus.documents import place

    bad.append(f"{place(source, block, index)}: {reason}")
