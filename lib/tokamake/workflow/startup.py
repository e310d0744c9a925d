"""Start of the workflow: checks the config and makes the functions that its rules call."""

import atexit
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokamake.config.data_set import RUN
from tokamake.data.corpus.plan_file import write_plan
from tokamake.data.urls.url_list import is_url_list, num_urls
from tokamake.errors import UserError, naming_overrides
from tokamake.preflight.initial_models import InitialModel
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.planned_changes import check_replaced, write_decisions, write_settings
from tokamake.remote.addresses import RemoteFile, cache_folder, is_offline
from tokamake.remote.download import is_cached
from tokamake.runtime.console import counted
from tokamake.runtime.folder_lock import locked
from tokamake.status.jobs import write_jobs
from tokamake.units import in_bytes
from tokamake.workflow.checkpoints import CheckpointRules
from tokamake.workflow.config import check_workflow_config, read_workflow_config, shown_files
from tokamake.workflow.data import DataRules
from tokamake.workflow.detoxify import DetoxifyRules
from tokamake.workflow.doctor import DoctorRules
from tokamake.workflow.exit import exit_on_user_error, exit_with
from tokamake.workflow.finetune import FinetuneRules
from tokamake.workflow.options import RunSettings
from tokamake.workflow.paths import check_room, check_writable
from tokamake.workflow.planned_data import read_previous
from tokamake.workflow.preflight import Preflight, num_ranks
from tokamake.workflow.report import ReportRules
from tokamake.workflow.retrieval import RetrievalRules
from tokamake.workflow.retro import RetroRules
from tokamake.workflow.samples import SampleRules
from tokamake.workflow.segments import SegmentRules
from tokamake.workflow.snakemake_internals import Snakemake
from tokamake.workflow.targets import Targets
from tokamake.workflow.tasks import TaskRules

_DATA_RULES = {
    *("train_tokenizer", "extend_tokenizer", "fetch", "hash_documents", "find_duplicates"),
    *("sign_documents", "find_near_duplicates", "hash_passages", "find_repeats"),
    *("generate_texts", "score_texts", "select_texts"),
    *("tokenize", "merge", "describe", "search_bm25"),
    *("chunk_documents", "embed_chunks"),
}
"""Rules that write files of the data folder that all its runs read."""
_MAX_ADDRESSES = 3
"""Addresses of downloads that a message names."""


class RuleFunctions:
    """The checked config, and the functions for `input` and `params` of rules."""

    def __init__(
        self,
        config: WorkflowConfig,
        snakemake: Snakemake,
        *,
        planned_segments: Callable[[str], str],
        models: Mapping[str, InitialModel] | None = None,
    ) -> None:
        is_main = snakemake.is_main_process
        force_job = snakemake.force_job if is_main else None
        self.config = config
        self.models = models or {}
        self.run_settings = RunSettings(config)
        self.data = DataRules(config, force_job)
        self.samples = SampleRules(config)
        self.checkpoints = CheckpointRules(config)
        self.segments = SegmentRules(
            config,
            planned_segments if is_main else None,
            force_job=force_job,
            checkpoints=self.checkpoints,
        )
        self.tasks = TaskRules(config, self.segments)
        self.finetune = FinetuneRules(config)
        self.detoxify = DetoxifyRules(config, self.checkpoints, force_job=force_job)
        self.retrieval = RetrievalRules(config, is_main_process=is_main)
        self.retro = RetroRules(config)
        self.doctor = DoctorRules(snakemake)
        self.preflight = Preflight(config, snakemake, retrieval=self.retrieval, retro=self.retro)
        self.report = ReportRules(
            config, segments=self.segments, tasks=self.tasks, retrieval=self.retrieval
        )


def shell_prefix(snakemake: Snakemake) -> str:
    """Start of each shell command, which puts the commands of this Python's environment on PATH.

    Jobs then find them whether the environment is activated or not. With `--sdm conda`, Snakemake
    has activated an environment of its own. Snakemake omits its strict mode where a prefix is set.
    """
    folder = shlex.quote(str(Path(sys.executable).parent))
    path = "" if snakemake.uses_conda else f'PATH={folder}:"$PATH"; '
    return f"set -euo pipefail; {path}"


def rule_functions(
    snakemake: Snakemake, config: dict[str, Any], *, planned_segments: Callable[[str], str]
) -> RuleFunctions:
    """Check the config and make the functions of the rules; exit with one line if it is wrong.

    Args:
        config: Snakemake's global `config`.
        planned_segments: from a run to the file that `plan_segments` writes for it, which makes
            Snakemake run the rule first.
    """
    is_main = snakemake.is_main_process
    # workflow/envs/tokamake.post-deploy.sh installs it; Snakemake runs a copy of the script.
    os.environ["TOKAMAKE_REPOSITORY"] = str(snakemake.repository)
    snakemake.resolve_launch()
    snakemake.keep_records_beside_outputs()
    files = snakemake.config_files or ["config/config.yaml"]
    with exit_on_user_error(), naming_overrides(shown_files(files), snakemake.overrides):
        checked = read_workflow_config(
            config,
            files,
            is_main_process=is_main,
            num_ranks=num_ranks(snakemake, "train") or 1,
        )
        models = check_workflow_config(checked, is_main_process=is_main)
        if is_main:
            check_room(next(path for path in (Path(".snakemake"), Path()) if path.is_dir()))
            check_replaced(checked)
            folders = [RUN.format(run=run) for run in checked.all_runs]
            check_writable([checked.data_set.folder, "logs", *folders])
        functions = RuleFunctions(
            checked, snakemake, planned_segments=planned_segments, models=models
        )
        if is_main:
            report_downloads([*raw_downloads(checked), *functions.checkpoints.missing_weights])
            functions.tasks.check()
            functions.retrieval.check()
            functions.retro.check()
        return functions


def raw_downloads(config: WorkflowConfig) -> list[RemoteFile]:
    """Raw files behind addresses of batches that are not tokenized yet, and that have no link."""
    if not config.downloads:
        return []
    needed = {
        path
        for batch, shards in config.tokenize_batches.items()
        if not Path(config.data_set.batch_file("tokenize", batch)).exists()
        for shard in shards
        for path in config.shards[shard].files
    }
    paths = sorted(needed & config.downloads.keys())
    return [config.downloads[path].file for path in paths if not Path(path).exists()]


def report_downloads(files: Iterable[RemoteFile]) -> None:
    """Name files that jobs will download; with HF_HUB_OFFLINE, files that are not in the cache."""
    missing = [file for file in files if not (is_offline() and is_cached(file))]
    lists = [file for file in missing if is_url_list(file.url)]
    if lists:
        text = f"{sum(map(num_urls, lists)):,} URLs in {counted(len(lists), 'WARC file')}"
        print(f"tokamake: {text}, to be fetched to {cache_folder()}", file=sys.stderr)
    missing = [file for file in missing if not is_url_list(file.url)]
    if not missing:
        return
    size = in_bytes(sum(file.size for file in missing))
    text = f"tokamake: {counted(len(missing), 'file')} behind addresses, {size}, "
    if is_offline():
        num_more = len(missing) - _MAX_ADDRESSES
        more = f" and {num_more:,} more" if num_more > 0 else ""
        text += (
            f"not in {cache_folder()}, and HF_HUB_OFFLINE is set: "
            f"{', '.join(file.url for file in missing[:_MAX_ADDRESSES])}{more}; start once on a "
            "node with a network, without HF_HUB_OFFLINE"
        )
    else:
        text += f"to be downloaded to {cache_folder()}"
    print(text, file=sys.stderr)


def add_hooks(snakemake: Snakemake, functions: RuleFunctions) -> None:
    """Write the plan before the first job; after a failure, print the saved training steps."""
    if not snakemake.is_main_process:
        return
    # Written by no job: all jobs follow one plan. A dry run writes nothing.
    snakemake.on_start(lambda: _start(snakemake, functions))
    snakemake.on_new_jobs(lambda: _write_new_jobs(snakemake, functions.config))
    saved = functions.segments.saved_since_start
    snakemake.on_error(lambda: print(*saved(), sep="\n", file=sys.stderr))
    atexit.register(_print_estimate, snakemake, functions)


def _print_estimate(snakemake: Snakemake, functions: RuleFunctions) -> None:
    """At the end of a dry run that would train, print what `tokamake estimate` says, in short."""
    if not snakemake.is_dry_run or "train" not in snakemake.planned_rules():
        return
    from tokamake.estimate import text
    from tokamake.estimate.run import allocation_of
    from tokamake.estimate.workflow import estimate_workflow

    with suppress(UserError, OSError, ValueError):  # it is a note: the dry run has succeeded
        found = estimate_workflow(
            functions.config,
            functions.models,
            allocation=allocation_of(snakemake.rule_resources("train")),
            sample_bytes=0,
        )
        print(*(f"estimate: {line}" for line in text.short(found)), sep="\n", file=sys.stderr)


@exit_on_user_error()
def _start(snakemake: Snakemake, functions: RuleFunctions) -> None:
    config = functions.config
    if config.previous_plan:
        _lock_data(snakemake, config)
    snakemake.resolve_precommand()
    write_decisions(functions.config)
    write_settings(config)
    write_plan(Path(config.data_set.plan), config.plan)
    _write_jobs(snakemake, config)


def _write_new_jobs(snakemake: Snakemake, config: WorkflowConfig) -> None:
    with suppress(OSError):  # `tokamake status` lacks these jobs, and the workflow continues
        _write_jobs(snakemake, config)


def _write_jobs(snakemake: Snakemake, config: WorkflowConfig) -> None:
    """Write the jobs of the DAG, which `tokamake status` shows."""
    rules = {snakemake.original_name(rule) for rule in snakemake.rule_names()}
    write_jobs(snakemake.jobs(), config.data_set, rules=rules)


@exit_on_user_error()
def _lock_data(snakemake: Snakemake, config: WorkflowConfig) -> None:
    """Lock the data folder until this process ends, if the plan or a job changes it.

    Processes that write nothing there, such as trainings on finished data, run side by side.
    """
    if config.plan == config.previous_plan and snakemake.planned_rules().isdisjoint(_DATA_RULES):
        return
    folder = Path(config.data_set.folder)
    lock = locked(folder, doing="makes data")
    lock.__enter__()
    atexit.register(lock.__exit__, None, None, None)
    if read_previous(config.data_set) != config.previous_plan:
        raise UserError(
            f"{config.data_set.plan}: written by another process since this one has read it; run "
            "the same command again"
        )


def finish(snakemake: Snakemake, functions: RuleFunctions) -> None:
    """Expand the targets of a user, and check personal values, after all rules are declared."""
    targets = Targets(
        functions.config,
        snakemake,
        checkpoints=functions.checkpoints,
        segments=functions.segments,
        tasks=functions.tasks,
        detoxify=functions.detoxify,
        retrieval=functions.retrieval,
        retro=functions.retro,
        doctor=functions.doctor,
    )
    snakemake.expand_targets(partial(_expand_targets, snakemake, targets))
    if snakemake.is_main_process:
        _check_personal_values(snakemake)


@exit_on_user_error()
def _expand_targets(snakemake: Snakemake, targets: Targets, asked: Iterable[str]) -> set[str]:
    """Expand targets, and write the first plan of a folder, which the DAG has as a file.

    A plan that exists is extended once all checks have passed, in `_start`.
    """
    expanded, config = targets.expand(asked), targets.config
    is_first = snakemake.is_main_process and config.previous_plan is None
    if is_first and snakemake.executes_jobs:
        _lock_data(snakemake, config)
        write_plan(Path(config.data_set.plan), config.plan)
    return expanded


def _check_personal_values(snakemake: Snakemake) -> None:
    """Exit with one line if account, queue and the like are missing.

    In a dry run, there is no executor that could check them. The executors are packages of their
    own; if they are missing, Snakemake says so.
    """
    if find_spec("snakemake_executor_plugin_pbs") is None:
        return
    from snakemake_executor_plugin_pbs.base.errors import UserError as ExecutorError
    from snakemake_executor_plugin_pbs.base.user_file import missing_in_workflow

    try:
        message = missing_in_workflow(snakemake.declared_resources())
    except ExecutorError as error:  # the user's file is wrong
        message = str(error)
    if message:
        exit_with(message)
