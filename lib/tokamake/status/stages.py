"""Products and logs of the stages, and the state of their jobs in a folder.

The paths repeat those of the rules, because Snakemake may run on another machine.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake.config.data_set import DEFAULT, DataSet
from tokamake.config.objective import objective_data
from tokamake.config.resolved_run import read_run
from tokamake.data.corpus.plan_file import read_plan
from tokamake.errors import UserError
from tokamake.status.run_origin import data_set_of
from tokamake.status.snakemake_internals import running_outputs, started

_TAIL_BYTES, _TAIL_LINES = 4_000, 6
"""The last line of a log may be that of a launcher."""
_MAX_SILENT_SECONDS = 600
"""A job of a batch system may outlive Snakemake; it is taken for dead after this time."""

StageState = Literal["done", "running", "stopped", "failed", "waiting"]


class StageJob(NamedTuple):
    """A rule, or the part of it that one job does."""

    name: str
    product: str
    """File or folder that exists when the job is done."""
    log: str
    always: bool = True
    """Whether every workflow has it. Other stages appear only after they have begun."""


class JobState(NamedTuple):
    """The state of a job."""

    stage: StageJob
    state: StageState
    """running: Snakemake lists the job, and holds its lock or the log was written recently.
    stopped: a training that was asked to stop has saved, and ended.
    failed: there is a log but no product, and the job is not running. A failure before the present
    start of Snakemake counts as waiting: Snakemake runs the job again."""
    silent_seconds: float | None
    """Seconds since the last write to its log; None: no log."""


_SAMPLE = StageJob("sample_corpus", "results/raw", "logs/sample_corpus.log", always=False)
_RUN_STAGES = (
    StageJob("index", "results/{run}/index/index.json", "logs/{run}/index.log"),
    StageJob("resolve", "results/{run}/run.yaml", "logs/{run}/resolve.log"),
    StageJob("plan_segments", "results/{run}/segments.json", "logs/{run}/plan_segments.log", False),
    StageJob("train", "results/{run}/train.json", "logs/{run}/train.log"),
    StageJob("model_card", "results/{run}/model_card.md", "logs/{run}/model_card.log", False),
    StageJob("export_hf", "results/{run}/export", "logs/{run}/export_hf.log"),
    StageJob("evaluate", "results/{run}/evaluate.json", "logs/{run}/evaluate.log"),
    StageJob("generate", "results/{run}/samples.json", "logs/{run}/generate.log"),
    StageJob("push", "results/{run}/push.json", "logs/{run}/push.log", False),
    StageJob("plot", "results/{run}/plots/summary.html", "logs/{run}/plot.log"),
)
_ENCODER_STAGES = (
    # The target all has no export of an encoder, which is there to be finetuned.
    *(
        stage._replace(always=stage.always and stage.name != "export_hf")
        for stage in _RUN_STAGES
        if stage.name not in ("evaluate", "generate", "plot")
    ),
    StageJob("plot_encoder", "results/{run}/plots/summary.html", "logs/{run}/plot_encoder.log"),
)
_FINETUNE_STAGES = (
    StageJob("prepare_finetune", "results/{run}/run.yaml", "logs/{run}/prepare_finetune.log"),
    StageJob("finetune", "results/{run}/finetune.json", "logs/{run}/finetune.log"),
    StageJob("export_finetuned", "results/{run}/export", "logs/{run}/export_finetuned.log"),
    StageJob(
        "evaluate_finetuned",
        "results/{run}/evaluate_finetuned.json",
        "logs/{run}/evaluate_finetuned.log",
    ),
    StageJob("plot_finetuned", "results/{run}/plots/scores.svg", "logs/{run}/plot_finetuned.log"),
)
_BEGUN_STAGES = (
    ("fetch_task", "tasks/{}.fetched"),
    ("tasks", "tasks/{}.json"),
    ("convert", "convert/{}"),
)
"""Rules of a run whose jobs appear once they have begun: folder of their logs, and products."""


def runs(folder: Path) -> list[str]:
    """Names of the runs that have begun, from their files."""
    logs = ("weigh", "index", "resolve", "train", "prepare_finetune")
    names = {path.parent.name for name in logs for path in folder.glob(f"logs/*/{name}.log")}
    names |= {path.parent.name for path in folder.glob("results/*/run.yaml")}
    return sorted(names)


def stages(folder: Path) -> dict[str, list[StageJob]]:
    """Return group → stages, in the order of the data flow: data sets, runs, their reports."""
    data_sets = _data_sets(folder)
    groups = {_title("data", each): _data_stages(folder, each) for each in data_sets}
    checks = _begun(folder, "logs/doctor", product="results/doctor/{}.json")
    first = next(iter(groups))
    groups[first] = [_SAMPLE, *checks, *groups[first]]
    imports = _begun(folder, "logs/import_checkpoint", product="results/import/{}")
    if starts := [*_weight_fetches(folder), *imports]:
        groups["starts"] = starts
    for run in runs(folder):
        if (folder / f"logs/{run}/prepare_finetune.log").exists():
            groups[f"run {run}"] = [_of_run(stage, run) for stage in _FINETUNE_STAGES]
            continue
        weights = data_set_of(folder, run).weights.format(run=run)
        run_stages = [StageJob("weigh", weights, f"logs/{run}/weigh.log")]
        own_stages = _ENCODER_STAGES if _is_encoder(folder, run) else _RUN_STAGES
        run_stages += [job for stage in own_stages for job in _segments(folder, run, stage)]
        for logs, product in _BEGUN_STAGES:
            run_stages += _begun(folder, f"logs/{run}/{logs}", product=f"results/{run}/{product}")
        groups[f"run {run}"] = run_stages
    return groups | {_title("report", each): _report_stages(each) for each in data_sets}


def _is_encoder(folder: Path, run: str) -> bool:
    """Whether a run trains an encoder, which no stage evaluates."""
    with suppress(UserError):  # there is no run.yaml yet
        objective = read_run(folder / f"results/{run}/run.yaml").train.objective
        return not objective_data(objective).generates
    return (folder / f"logs/{run}/plot_encoder.log").exists()


def _title(group: str, data_set: DataSet) -> str:
    return group if data_set.name == DEFAULT else f"{group} {data_set.name}"


def _data_sets(folder: Path) -> list[DataSet]:
    """Return the data sets that have a plan; the default one if there is none yet."""
    plans = [folder / DataSet().plan, *sorted(folder.glob(f"{DataSet().folder}/*/plan.json"))]
    names = [DEFAULT, *(path.parent.name for path in plans[1:])]
    planned = [DataSet(name) for name, path in zip(names, plans, strict=True) if path.is_file()]
    return planned or [DataSet()]


def _data_stages(folder: Path, data_set: DataSet) -> list[StageJob]:
    """Return the jobs that make a data set."""
    data, logs = data_set.folder, data_set.logs
    tokenizers = {
        "train_tokenizer": data_set.tokenizer,
        "extend_tokenizer": data_set.extended_tokenizer,
    }
    return [
        *(
            StageJob(name, f"{path}/tokenizer.json", f"{logs}/{name}.log", always=False)
            for name, path in tokenizers.items()
        ),
        *_fetches(folder, data_set),
        *_begun(folder, f"{logs}/hash_documents", product=f"{data}/hashes/{{}}.rows"),
        *_begun(folder, f"{logs}/find_duplicates", product=f"{data}/duplicates/{{}}.rows"),
        *_planned(folder, data_set, "tokenize"),
        *_planned(folder, data_set, "merge"),
        StageJob("describe", data_set.metadata, f"{logs}/describe.log"),
    ]


def _fetches(folder: Path, data_set: DataSet) -> list[StageJob]:
    """Return the downloads that have begun. Their lists are temporary: later, what is made of them.

    The name of a log is the stage that needs the files, a hyphen, and its job batch.
    """
    stages = []
    for log in sorted((folder / data_set.logs / "fetch").glob("*.log")):
        stage, _, batch = log.stem.partition("-")
        stage_product = {
            "tokenize": data_set.batch_file("tokenize", batch),
            "hash_documents": f"{data_set.folder}/hashes/{batch}.rows",
            "train_tokenizer": f"{data_set.tokenizer}/tokenizer.json",
        }[stage]
        listed = data_set.batch_file(f"fetch/{stage}", batch)
        product = stage_product if (folder / stage_product).exists() else listed
        stages.append(StageJob("fetch", product, f"{data_set.logs}/fetch/{log.name}", always=False))
    return stages


def _weight_fetches(folder: Path) -> list[StageJob]:
    """Return the downloads of weights that have begun. The path of a log is that of its file.

    The weights of a model that was converted may be gone.
    """
    logs, jobs = Path("logs/fetch_weights"), []
    for log in sorted((folder / logs).rglob("*.log")):
        product = log.relative_to(folder / logs).with_suffix("")
        is_imported = any((folder / "results/import").glob(f"{product.parent.name}-*"))
        if (folder / product).exists() or not is_imported:
            log = log.relative_to(folder)
            jobs.append(StageJob("fetch_weights", str(product), str(log), always=False))
    return jobs


def _report_stages(data_set: DataSet) -> list[StageJob]:
    page = f"{data_set.shared}/compare/runs.html"
    return [
        StageJob("compare", page, f"{data_set.logs}/compare.log", always=False),
        StageJob("report", f"{data_set.shared}/report.html", f"{data_set.logs}/report.log"),
    ]


def _segments(folder: Path, run: str, stage: StageJob) -> list[StageJob]:
    """Return the jobs of a stage: those of segments that have begun, then the last one."""
    logs = {path.suffixes[0][1:]: path for path in folder.glob(f"logs/{run}/{stage.name}.*.log")}
    segments = [
        StageJob(
            stage.name, f"results/{run}/{logs[step].stem}.json", f"logs/{run}/{logs[step].name}"
        )
        for step in sorted(filter(str.isdecimal, logs), key=int)
    ]
    return [*segments, _of_run(stage, run)]


def _of_run(stage: StageJob, run: str) -> StageJob:
    return stage._replace(product=stage.product.format(run=run), log=stage.log.format(run=run))


def _begun(folder: Path, logs: str, *, product: str) -> list[StageJob]:
    """Return the jobs of a rule that have a log. The name of a log is the name of its product."""
    name = logs.rpartition("/")[2].replace("tasks", "evaluate_task")
    return [
        StageJob(name, product.format(log.stem), f"{logs}/{log.name}", always=False)
        for log in sorted((folder / logs).glob("*.log"))
    ]


def _planned(folder: Path, data_set: DataSet, stage: str) -> list[StageJob]:
    """Return a job per job batch of the plan, or the stage alone before there is a plan."""
    path, logs = folder / data_set.plan, f"{data_set.logs}/{stage}"
    if not path.exists():
        return [StageJob(stage, f"{data_set.folder}/batches/{stage}", logs)]
    plan = read_plan(path)
    batches = plan.tokenize_batches if stage == "tokenize" else plan.merge_batches
    products = {batch.name: data_set.batch_file(stage, batch.name) for batch in batches}
    if stage == "tokenize" and not plan.keep_shards:
        # Its batch files are temporary. Later, those of `merge` show that they were made.
        merges = {merged: batch.name for batch in plan.merge_batches for merged in batch.members}
        made: dict[str, set[str]] = {}
        for merge in plan.merged:
            for shard in merge.shards:
                made.setdefault(shard, set()).add(data_set.batch_file("merge", merges[merge.name]))
        for batch in batches:
            merged_files = sorted({path for shard in batch.members for path in made[shard]})
            if not (folder / products[batch.name]).exists() and all(
                (folder / path).exists() for path in merged_files
            ):
                products[batch.name] = merged_files[0]
    return [StageJob(stage, products[batch.name], f"{logs}/{batch.name}.log") for batch in batches]


def jobs(folder: Path, stages: Iterable[StageJob]) -> list[JobState]:
    """Return the state of each stage. Optional stages that have not begun are left out."""
    running, jobs = running_outputs(folder), []
    start = started(folder)
    for stage in stages:
        log, product = folder / stage.log, folder / stage.product
        silent = time.time() - log.stat().st_mtime if log.is_file() else None
        is_listed = any(f"{path}/".startswith(f"{stage.product}/") for path in running)
        is_alive = start is not None or (silent or 0) < _MAX_SILENT_SECONDS
        is_old = silent is not None and start is not None and log.stat().st_mtime < start
        if is_listed and is_alive:
            state: StageState = "running"
        elif product.is_file() or any(path.is_file() for path in product.rglob("*")):
            state = "done"
        else:
            trains = stage.name in ("train", "finetune")
            stopped = trains and silent is not None and _has_stopped(log)
            state = "waiting" if silent is None or is_old else "stopped" if stopped else "failed"
        if stage.always or state != "waiting":
            jobs.append(JobState(stage, state, silent))
    return jobs


def _has_stopped(log: Path) -> bool:
    """Whether a training log ends as that of a training that was asked to stop."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = stream.read().splitlines()[-_TAIL_LINES:]
    return any(line.startswith(b"stopped ") and b": saved at step " in line for line in lines)
