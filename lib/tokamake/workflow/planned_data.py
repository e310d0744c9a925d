"""The plan of a config: shards, merged datasets and job batches, decided before any job runs."""

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import files
from tokamake.config.data_set import DataSet
from tokamake.config.root import Config
from tokamake.config.runs import NamedRun
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import Plan, PlannedShard, read_plan
from tokamake.data.indexed.index_reader import read_layout
from tokamake.data.indexed.manifest import raw_inputs, read_manifest
from tokamake.data.indexed.paths import idx_path
from tokamake.data.tokenize.verify import find_faults
from tokamake.errors import UserError
from tokamake.preflight.planned import changed_shards
from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from snakemake_executor_plugin_pbs.base.records import Records


@contextmanager
def explaining_default_table(run: Config, where: str) -> Iterator[None]:
    """Say that an error is about the default table of corpora, because the config names none."""
    try:
        yield
    except UserError as error:
        if "corpora" in run.model_fields_set or run.weights:
            raise
        fault = str(error).partition(";")[0]  # without the remedy: the table is not the user's
        raise UserError(
            f"{where}: corpora: missing, and with the default table, {fault}; add corpora with "
            "the path of your table"
        ) from None


def read_previous(data_set: DataSet) -> Plan | None:
    """The plan on disk; None: there is none yet."""
    path = Path(data_set.plan)
    return read_plan(path) if path.exists() else None


def extended_plan(
    runs: Mapping[str, NamedRun],
    corpora: Mapping[str, Corpus],
    *,
    declared: dict[str, int],
    previous: Plan | None,
) -> Plan:
    """Extend the plan on disk by new raw files, and check that each corpus has some.

    Args:
        declared: path to size of raw files that do not exist yet.
    """
    first = next(iter(runs.values()))
    shared = first.config
    with explaining_default_table(*first):
        plan = make_plan(
            corpora.values(),
            shared.plan,
            declared=declared,
            previous=previous,
            tokenize=shared.tokenize,
            fetch_urls=shared.fetch_urls,
        )
    if previous:
        merged = Path(DataSet(shared.data_set).folder, "merged")
        plan = _keep_same_bytes(previous, plan, merged=merged)
        plan = _keep_while_training(previous, plan, runs=runs)
    return plan


def check_empty(corpora: Mapping[str, Corpus], plan: Plan) -> None:
    """Check that each corpus has an indexed dataset, or a raw file that is not empty."""
    filled = {shard.corpus for shard in plan.shards if shard.bytes}
    filled |= {merge.corpus for merge in plan.merged if merge.dataset}
    for name, corpus in corpora.items():
        if name not in filled:
            raise UserError(
                f'{corpus.where}: corpus "{name}" is empty: {corpus.files} holds no byte; fix the '
                "files, or remove the row"
            )


def check_indexes(corpora: Mapping[str, Corpus], plan: Plan, *, previous: Plan | None) -> None:
    """Read the header of each existing index that is new or has changed since an earlier plan."""
    checked = {merge.dataset: merge.stamp for merge in previous.merged} if previous else {}
    for merge in plan.merged:
        if merge.dataset and checked.get(merge.dataset) != merge.stamp:
            try:
                read_layout(idx_path(Path(merge.dataset)))
            except UserError as error:
                raise UserError(f"{corpora[merge.corpus].where}: {error}") from None


def check_repeated(tables: Iterable[Iterable[Corpus]], plan: Plan) -> None:
    """Check that a run trains on each existing dataset once, also by way of links."""
    datasets: dict[str, list[str]] = {}
    for merge in plan.merged:
        if merge.dataset:
            datasets.setdefault(merge.corpus, []).append(merge.dataset)
    for table in tables if datasets else ():
        owners: dict[str, Corpus] = {}
        for corpus in (corpus for corpus in table if corpus.trains):
            for dataset in datasets.get(corpus.corpus, ()):
                owner = owners.setdefault(os.path.realpath(f"{dataset}.bin"), corpus)
                if owner.corpus != corpus.corpus:
                    raise UserError(
                        f'{corpus.where}: corpus "{corpus.corpus}": {dataset} is in corpus '
                        f'"{owner.corpus}" ({owner.where}), too, and a run would draw from it '
                        "twice; leave it out of one"
                    )


def _keep_same_bytes(previous: Plan, plan: Plan, *, merged: Path) -> Plan:
    """Keep the stamps of shards whose raw files have new times but the bytes that were tokenized.

    Jobs compare the disk with the stamps of single files, which are the new ones.
    """
    changed = changed_shards(plan, previous)
    earlier = {shard.name: shard for shard in previous.shards if shard.name in changed}
    renewed = {
        shard.name: paths
        for shard in plan.shards
        if shard.name in changed
        and (paths := _renewed_files(earlier[shard.name], shard)) is not None
    }
    if not renewed:
        return plan
    paths = set().union(*renewed.values())
    merges = [merge for merge in plan.merged if not renewed.keys().isdisjoint(merge.shards)]
    recorded = chain.from_iterable(_recorded_inputs(merged / merge.name) for merge in merges)
    # The datasets of several text keys state the same raw files.
    inputs = {files.digest(raw): raw for raw in recorded if raw["path"] in paths}.values()
    faulty = {raw["path"] for raw, fault in zip(inputs, find_faults(inputs), strict=True) if fault}
    if same := {raw["path"] for raw in inputs} - faulty:
        print(
            f"tokamake: {counted(len(same), 'raw file')} (first {min(same)}): new time, same "
            "bytes: nothing is tokenized again",
            file=sys.stderr,
        )
    kept = {name: earlier[name].stamp for name, paths in renewed.items() if paths <= same}
    return plan._replace(
        shards=tuple(
            shard._replace(stamp=kept[shard.name]) if shard.name in kept else shard
            for shard in plan.shards
        )
    )


def _renewed_files(old: PlannedShard, new: PlannedShard) -> set[str] | None:
    """Files of a shard that have new times; None: sizes or names have changed, too."""
    sizes = [[stamp.partition(":")[0] for stamp in shard.stamps] for shard in (old, new)]
    if (old.files, old.byte_range, sizes[0]) != (new.files, new.byte_range, sizes[1]):
        return None
    times = zip(new.files, old.stamps, new.stamps, strict=True)
    return {path for path, before, now in times if before != now}


def _recorded_inputs(prefix: Path) -> list[dict[str, Any]]:
    with suppress(UserError):  # not merged yet, or damaged
        return raw_inputs(read_manifest(prefix))
    return []


def _keep_while_training(previous: Plan, plan: Plan, *, runs: Iterable[str]) -> Plan:
    """The previous plan if only raw files changed and a batch system still trains a run.

    With the new plan, the training would have other inputs, so the executor would delete its job.
    """
    training = runs_in_training(list(runs))
    previous = previous._replace(keep_shards=plan.keep_shards)
    if not training or previous == plan or _datasets(previous) != _datasets(plan):
        return plan
    print(
        f"tokamake: {', '.join(training)}: training jobs of an earlier start still run; new and "
        "changed raw files are used after these jobs end",
        file=sys.stderr,
    )
    return previous


def _datasets(plan: Plan) -> tuple[dict[str, Any], set[tuple[str, str]]]:
    """Settings of a plan, and its corpora with their text keys; raw files do not change them."""
    names = {(m.corpus, m.name.removeprefix(m.corpus).partition("_")[2]) for m in plan.merged}
    return plan.settings, names


def runs_in_training(runs: Collection[str]) -> list[str]:
    """Runs whose training an earlier controller submitted, and whose end no controller has seen."""
    if find_spec("snakemake_executor_plugin_pbs") is None:
        return []  # a package of its own; without it, there are no jobs
    from snakemake_executor_plugin_pbs.base.records import Records

    training: set[str] = set()
    for folder in (Path(".snakemake/pbs"), Path(".snakemake/slurm")):
        if folder.is_dir():  # a dry run must not make it
            training |= _trained_by(Records(folder))
    return [run for run in runs if run in training]


def _trained_by(records: "Records") -> set[str]:
    try:
        submitted = list(records.load())
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{records.folder}: a record.json is damaged ({error}); delete it"
        ) from None
    running = (
        record
        for record in submitted
        if not record.cancelled and records.exit_status(record) is None
    )
    return {_run_of(Path(path)) for record in running for path in record.outputs}


def _run_of(output: Path) -> str:
    """Name of the run that a job with this output trains, or an empty string."""
    is_training = re.fullmatch(r"train(\.\d+)?\.json", output.name)
    return output.parent.name if is_training and output.parent.parent.name == "results" else ""
