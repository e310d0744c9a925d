"""Reads the config of a workflow, then checks everything that it names."""

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokamake.config.data_set import DataSet
from tokamake.config.fields import FETCH
from tokamake.config.objective import objective_data
from tokamake.config.root import Config
from tokamake.config.runs import NamedRun, read_runs
from tokamake.config.schedule import unfinished_warmup
from tokamake.config_files import parse_yaml
from tokamake.data.corpus.corpora import Corpus, check_rows, merge_tables, patterns, read_corpora
from tokamake.data.corpus.sample_corpus import KEYS, sample_names
from tokamake.data.mixture.weigh import read_listed_corpora
from tokamake.errors import UserError
from tokamake.preflight.data import check_earlier_keys, check_splits, held_out_splits
from tokamake.preflight.detoxify import check_detoxify
from tokamake.preflight.finetune import check_finetuned
from tokamake.preflight.initial_models import InitialModel, check_initial_models
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.tokenizer import check_planned_tokenizer
from tokamake.runtime.console import counted
from tokamake.workflow.planned_data import (
    check_empty,
    check_indexes,
    check_repeated,
    explaining_default_table,
    extended_plan,
    read_previous,
)
from tokamake.workflow.snakemake_internals import check_braces


def check_config_files(paths: Iterable[str | Path]) -> None:
    """Check that config files are valid YAML without duplicate keys.

    Snakemake keeps the last of several equal keys, and its message about invalid YAML names neither
    the file nor the line. A file that does not exist is left to Snakemake.
    """
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None
        is_json = False
        with suppress(ValueError):  # JSON may be indented with tabs
            json.loads(text)
            is_json = True
        # yte's templates have a syntax of their own.
        if not is_json and "__use_yte__" not in text:
            parse_yaml(text, _shown(path))


def shown_files(paths: Iterable[str | Path]) -> str:
    """Config files as messages name them."""
    return ", ".join(map(os.path.relpath, paths))


def _shown(path: Path) -> str:
    """Path as the user would write it: Snakemake makes paths of `--configfile` absolute."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else path)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Make many objects: a plan is half a million, and a fifth of the time would go to cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@_without_garbage_collection()
def read_workflow_config(
    values: dict[str, Any],
    config_files: Iterable[str | Path],
    *,
    is_main_process: bool,
    num_ranks: int = 1,
) -> WorkflowConfig:
    """Read the config and the tables that it names; decide shards and merged datasets.

    Args:
        config_files: where it comes from, for messages.
        is_main_process: whether Snakemake plans jobs here; a job only reads the plan.
        num_ranks: of a training, for `global_batch_size: null`.
    """
    source = shown_files(config_files)
    context = {"num_ranks": num_ranks} | (FETCH if is_main_process else {})
    runs = read_runs(values, source, context=context)
    shared = next(iter(runs.values())).config
    for run, where in runs.values():
        _check_braces(run, where)
    tables = _read_tables({n: run for n, run in runs.items() if run.config.finetune is None})
    corpora = merge_tables(tables.values())
    raw_outputs = {
        f"results/raw/{corpus}/{name}": sample.file_bytes
        for corpus, sample in shared.sample_corpus.items()
        for name in sample_names(corpus, sample.num_files)
    }
    if shared.detoxify:
        # One shard: byte ranges of a size that nobody knows could lie behind the file's end.
        raw_outputs[DataSet(shared.data_set).kept_texts] = shared.plan.shard_bytes
    previous = read_previous(DataSet(shared.data_set))
    if previous and not is_main_process:
        plan = previous  # a job takes it as it is, even if raw files arrived since
    else:
        plan = extended_plan(runs, corpora, declared=raw_outputs, previous=previous)
    return WorkflowConfig(
        named_runs=runs,
        tables=tables,
        corpora=corpora,
        raw_outputs=raw_outputs,
        plan=plan,
        previous_plan=previous,
    )


def _check_sample_keys(config: WorkflowConfig) -> None:
    """Check the text keys of files that `sample_corpus` will write."""
    folders = tuple(f"results/raw/{corpus}/" for corpus in config.shared.sample_corpus)
    for corpus in config.corpora.values():
        if corpus.template or not all(path.startswith(folders) for path in patterns(corpus)):
            continue
        if missing := [key for key in corpus.text_key.split(",") if key not in KEYS]:
            raise UserError(
                f"{corpus.where}: text_key: {missing[0]}: documents of sample_corpus have "
                f"{', '.join(KEYS)}; name one of these keys"
            )


def check_workflow_config(
    config: WorkflowConfig, *, is_main_process: bool
) -> dict[str, InitialModel]:
    """Check the data, models and files that a config names; the main process opens checkpoints.

    Returns:
        Initial model of each run that pretrains, as far as it is opened.
    """
    pretrained = {name: config.named_runs[name] for name in config.runs}
    if is_main_process:
        check_earlier_keys(config)
        check_empty(config.corpora, config.plan)
        check_indexes(config.corpora, config.plan, previous=config.previous_plan)
        check_repeated(config.tables.values(), config.plan)
        _check_sample_keys(config)
    models = check_initial_models(pretrained, is_main_process=is_main_process)
    if is_main_process:
        for where, files in check_finetuned(config.named_runs, models).items():
            check_braces(files, f"{where}: finetune")
    for name, (run, where) in pretrained.items():
        check_splits(run.train, config.tables[name], where=where)
    needs_tokenizer = config.given_tokenizer is None and not config.shared.tokenizer.has_ids
    for corpus in config.corpora.values():
        if corpus.is_indexed and needs_tokenizer:
            raise UserError(
                f"{corpus.where}: format indexed: its tokens need the tokenizer that made them; "
                "name it in tokenizer.path, or give tokenizer.kind: ids and tokenizer.vocab_size"
            )
    if is_main_process:
        check_planned_tokenizer(config, models)
        check_detoxify(config)
        _report(config)
    return models


def _read_tables(runs: Mapping[str, NamedRun]) -> dict[str, list[Corpus]]:
    """Corpora of each run: first from its table, then from its weighting file."""
    known: dict[tuple[Path | None, ...], list[Corpus]] = {}
    tables = {}
    for name, (run, where) in runs.items():
        files = run.corpus_table, run.weights, run.data_root
        if files not in known:
            known[files] = []
            if run.corpus_table:
                with explaining_default_table(run, where):
                    known[files] += read_corpora(run.corpus_table)
            if run.weights:
                known[files] += read_listed_corpora(run.weights, run.data_root)
            check_rows(known[files])
        tables[name] = known[files]
    return tables


def _check_braces(run: Config, where: str) -> None:
    settings = {
        "corpora": run.corpus_table,
        "weights": run.weights,
        "tokenizer.path": run.tokenizer.path,
        "model.architecture": run.model.architecture,
        "model.checkpoint": run.model.folder,
    }
    for name, path in settings.items():
        if isinstance(path, Path):
            check_braces([path], f"{where}: {name}")


def _report(config: WorkflowConfig) -> None:
    """Say how a config is understood where a user may expect something else."""
    _report_lists({run.weights: config.tables[name] for name, run in config.runs.items()})
    _report_evaluation(
        {
            name: held_out_splits(run.train, config.tables[name])
            for name, run in config.runs.items()
            if objective_data(run.train.objective).generates
        }
    )
    for name, run in config.runs.items():
        if run.train.span and (note := unfinished_warmup(run.train.schedule, run.train.span)):
            print(f"tokamake: run {name}: {note}", file=sys.stderr)


def _report_lists(tables: Mapping[Path | None, list[Corpus]]) -> None:
    """Say which corpora the lists of existing datasets have; file names may have decided it."""
    for weights, table in tables.items():
        listed = [
            f"{row.corpus} ({counted(len(row.listed), 'dataset')})" for row in table if row.listed
        ]
        if weights:
            more = f" and {len(listed) - 8:,} more" if len(listed) > 8 else ""
            print(f"tokamake: {weights}: corpora {', '.join(listed[:8])}{more}", file=sys.stderr)


def _report_evaluation(splits: Mapping[str, list[str]]) -> None:
    """Print the split on which models without a test split are evaluated; runs share a line.

    Args:
        splits: held-out splits of each run, see `held_out_splits`.
    """
    by_use: dict[str, list[str]] = {}
    for run, names in splits.items():
        if "test" not in names:
            use = f"evaluation uses the split {names[0]}" if names else "there is no evaluation"
            by_use.setdefault(use, []).append(run)
    for use, (first, *rest) in by_use.items():
        more = f" and {counted(len(rest), 'other run')}" if rest else ""
        print(f"tokamake: run {first}{more}: no test split: {use}", file=sys.stderr)
