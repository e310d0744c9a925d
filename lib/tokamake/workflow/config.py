"""Reads and checks the config of a workflow and everything that it names."""

import gc
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokamake.checkpoint.detect import list_files
from tokamake.config.data_set import DataSet
from tokamake.config.fields import FETCH
from tokamake.config.root import Config
from tokamake.config.runs import NamedRun, read_runs
from tokamake.config.schedule import unfinished_warmup
from tokamake.data.corpus.corpora import Corpus, check_rows, merge_tables, read_corpora
from tokamake.data.corpus.sample_corpus import sample_names
from tokamake.data.mixture.weigh import read_listed_corpora
from tokamake.data.tokenizers import tokenizer_files
from tokamake.errors import UserError
from tokamake.preflight.data import check_splits, held_out_splits
from tokamake.preflight.finetune import check_files, check_finetuned
from tokamake.preflight.initial_models import check_initial_models, naming_setting
from tokamake.preflight.model import check_planned_fim
from tokamake.preflight.planned import WorkflowConfig
from tokamake.runtime.console import counted
from tokamake.validation import read_yaml
from tokamake.workflow.planned_data import (
    check_empty,
    check_indexes,
    check_repeated,
    explaining_default_table,
    extended_plan,
    read_previous,
)
from tokamake.workflow.snakemake_internals import check_braces


def read_workflow_config(
    values: dict[str, Any],
    config_files: Iterable[str | Path],
    *,
    is_main_process: bool,
    num_ranks: int = 1,
) -> WorkflowConfig:
    """Check the config and everything that it names; decide shards and merged datasets.

    Args:
        config_files: where it comes from, for messages.
        is_main_process: whether Snakemake plans jobs here; a job only reads what was planned.
        num_ranks: of a training, for `global_batch_size: null`.
    """
    # The plan is half a million objects; a search for cycles among them takes a fifth of the time.
    gc.disable()
    try:
        return _read(values, config_files, is_main_process=is_main_process, num_ranks=num_ranks)
    finally:
        gc.freeze()
        gc.enable()


def _read(
    values: dict[str, Any],
    config_files: Iterable[str | Path],
    *,
    is_main_process: bool,
    num_ranks: int,
) -> WorkflowConfig:
    source = ", ".join(os.path.relpath(path) for path in config_files)
    context = {"num_ranks": num_ranks} | (FETCH if is_main_process else {})
    all_runs = read_runs(values, source, context=context)
    runs = {name: run for name, run in all_runs.items() if run.config.finetune is None}
    shared = next(iter(all_runs.values())).config
    for run, where in all_runs.values():
        _check_braces(run, where)
    tables = _read_tables(runs)
    corpora = merge_tables(tables.values())
    sample_files = {
        f"results/raw/{corpus}/{name}": sample.file_bytes
        for corpus, sample in shared.sample_corpus.items()
        for name in sample_names(corpus, sample.num_files)
    }
    previous = read_previous(DataSet(shared.data_set))
    if previous and not is_main_process:
        plan = previous  # a job takes it as it is, even if raw files arrived since
    else:
        plan = extended_plan(all_runs, corpora, declared=sample_files, previous=previous)
    if is_main_process:
        check_empty(corpora, plan)
        check_indexes(corpora, plan, previous=previous)
        check_repeated(tables.values(), plan)
    models = check_initial_models(runs, is_main_process=is_main_process)
    if is_main_process:
        check_finetuned(all_runs, models)
        for run, where in all_runs.values():
            if run.finetune:
                check_braces(check_files(run.finetune), f"{where}: finetune")
    for name, (run, where) in runs.items():
        check_splits(run.train, tables[name], where=where)
    if is_main_process:
        _report_lists({run.weights: tables[name] for name, (run, _) in runs.items()})
        _report_evaluation(
            {name: held_out_splits(run.train, tables[name]) for name, (run, _) in runs.items()}
        )
        for name, (run, _) in runs.items():
            if run.train.span and (note := unfinished_warmup(run.train.schedule, run.train.span)):
                print(f"tokamake: run {name}: {note}", file=sys.stderr)
    tokenizer = _find_tokenizer(all_runs)
    for corpus in corpora.values():
        if corpus.is_indexed and tokenizer is None and not shared.tokenizer.has_ids:
            raise UserError(
                f"{corpus.where}: format indexed: its tokens need the tokenizer that made them; "
                "name it in tokenizer.path, or give tokenizer.kind: ids and tokenizer.vocab_size"
            )
    for run, where in runs.values() if tokenizer is None else ():
        check_planned_fim(run, where)
    return WorkflowConfig(
        runs={name: run.config for name, run in runs.items()},
        finetuned={n: run.config for n, run in all_runs.items() if n not in runs},
        tables=tables,
        corpora=corpora,
        sample_files=sample_files,
        plan=plan,
        previous_plan=previous,
        given_tokenizer=tokenizer,
    )


def _read_tables(runs: Mapping[str, NamedRun]) -> dict[str, list[Corpus]]:
    """Corpora of each run: those of its table, then those of its weighting file."""
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
    """Say what runs without a test split are evaluated on; runs with the same split share a line.

    Args:
        splits: held-out splits of each run, see `held_out_splits`.
    """
    by_use: dict[str, list[str]] = {}
    for run, names in splits.items():
        if "test" not in names:
            use = f"evaluation uses the split {names[0]}" if names else "there is no evaluation"
            by_use.setdefault(use, []).append(run)
    for use, (first, *others) in by_use.items():
        more = f" and {counted(len(others), 'other run')}" if others else ""
        print(f"tokamake: run {first}{more}: no test split: {use}", file=sys.stderr)


def _find_tokenizer(runs: Mapping[str, NamedRun]) -> list[Path] | None:
    """Files of the tokenizer of the config, or else of the initial checkpoints."""
    by_run: dict[str, list[Path]] = {}
    for name, (run, where) in runs.items():
        if run.tokenizer.path:
            with naming_setting(where, "tokenizer.path"):
                return tokenizer_files(run.tokenizer.path)[1]
        if run.model.folder:
            by_run[name] = _checkpoint_tokenizer(run.model.folder, where)
    for name, files in by_run.items():
        first, first_files = next(iter(by_run.items()))
        if [path.read_bytes() for path in files] != [path.read_bytes() for path in first_files]:
            raise UserError(
                f"{runs[name].where}: model.checkpoint: {files[0]} is another tokenizer than "
                f"{first_files[0]} of run {first}, and runs share their data; name one that fits "
                "all in tokenizer.path, or build the runs from configs of their own, each with its "
                "data_set"
            )
    return next(iter(by_run.values()), None)


def _checkpoint_tokenizer(checkpoint: Path, where: str) -> list[Path]:
    """Files of a checkpoint's own tokenizer."""
    try:
        return tokenizer_files(checkpoint)[1]
    except UserError:
        raise UserError(
            f"{where}: tokenizer.path: missing: model.checkpoint {checkpoint} has no tokenizer "
            f"beside it; name the one that it was trained with{_trained_with(checkpoint)}"
        ) from None


def _trained_with(checkpoint: Path) -> str:
    """The tokenizer that run.yaml of a native checkpoint names, in parentheses."""
    runs = sorted(file for file in list_files(checkpoint) if file.name == "run.yaml")
    tokenizer = read_yaml(runs[0], "name another checkpoint").get("tokenizer") if runs else None
    return f" ({tokenizer})" if tokenizer else ""
