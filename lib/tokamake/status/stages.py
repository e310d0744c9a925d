"""What each stage of the workflow leaves, and how far a folder has come with them.

The rules say the same to Snakemake, which is not asked here: it may run on another machine.
"""

import time
from base64 import urlsafe_b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake.data.corpus.plan_file import read_plan

State = Literal["done", "running", "failed", "waiting"]
PLAN = "results/data/plan.json"


class Stage(NamedTuple):
    """A rule, or what it makes of one batch."""

    name: str
    """Name of the rule."""
    product: str
    """File or folder that is there when all is done."""
    log: str
    """File that its job writes."""
    usual: bool = True
    """Whether every workflow has it; another is told of only once it has begun."""


class Job(NamedTuple):
    """How far one job is."""

    stage: Stage
    """What it makes."""
    state: State
    """Failed: there is a log, no product, and Snakemake counts it among those that run no more."""
    silent_seconds: float | None
    """Time since it last wrote to its log; None: it never did."""


_BEFORE = (
    Stage("sample_corpus", "results/raw", "logs/sample_corpus.log", usual=False),
    Stage("train_tokenizer", "results/tokenizer/tokenizer.json", "logs/train_tokenizer.log", False),
)
_DESCRIBE = Stage("describe", "results/data/metadata.json", "logs/describe.log")
_OF_A_RUN = (
    Stage("weigh", "results/data/{run}.weights.txt", "logs/{run}/weigh.log"),
    Stage("index", "results/{run}/index/index.json", "logs/{run}/index.log"),
    Stage("init_model", "results/{run}/init/config.json", "logs/{run}/init_model.log", False),
    Stage("resolve", "results/{run}/run.yaml", "logs/{run}/resolve.log"),
    Stage("plan_segments", "results/{run}/segments.json", "logs/{run}/plan_segments.log", False),
    Stage("train", "results/{run}/train.json", "logs/{run}/train.log"),
    Stage("export_hf", "results/{run}/export", "logs/{run}/export_hf.log"),
    Stage("evaluate", "results/{run}/evaluate.json", "logs/{run}/evaluate.log"),
    Stage("generate", "results/{run}/samples.json", "logs/{run}/generate.log"),
    Stage("plot", "results/{run}/plots/summary.html", "logs/{run}/plot.log"),
)
_AFTER = (
    Stage("compare", "results/compare/runs.html", "logs/compare.log", usual=False),
    Stage("report", "results/report.html", "logs/report.log"),
)


def runs(folder: Path) -> list[str]:
    """Names of the runs that have begun, by the files that they have."""
    logs = ("weigh", "index", "init_model", "resolve", "train")
    found = {path.parent.name for name in logs for path in folder.glob(f"logs/*/{name}.log")}
    found |= {path.parent.name for path in folder.glob("results/*/run.yaml")}
    return sorted(found)


def stages(folder: Path) -> dict[str, list[Stage]]:
    """Stages in the order of the data's way: the data's, each run's by its name, the report's."""
    data = [
        *_BEFORE,
        *_begun(folder, "doctor", "logs/doctor", "results/doctor/{}.json"),
        *_begun(folder, "hash_documents", "logs/hash_documents", "results/data/hashes/{}.rows"),
        *_begun(
            folder, "find_duplicates", "logs/find_duplicates", "results/data/duplicates/{}.rows"
        ),
        *_planned(folder, "tokenize"),
        *_planned(folder, "merge"),
        _DESCRIBE,
    ]
    found = {"data": data}
    imports = _begun(folder, "import_checkpoint", "logs/import_checkpoint", "results/import/{}")
    if imports:
        found["starts"] = imports
    for run in runs(folder):
        of_run = [each for stage in _OF_A_RUN for each in _of_run(folder, run, stage)]
        forms = _begun(folder, "convert", f"logs/{run}/convert", f"results/{run}/convert/{{}}")
        found[f"run {run}"] = of_run + forms
    return {**found, "report": [*_AFTER]}


def _of_run(folder: Path, run: str, stage: Stage) -> list[Stage]:
    """A stage of a run: the jobs of its segments that have begun, then the last one, or its one."""
    product, log = stage.product.format(run=run), stage.log.format(run=run)
    logs = {path.suffixes[0][1:]: path for path in folder.glob(f"logs/{run}/{stage.name}.*.log")}
    segments = [
        Stage(stage.name, f"results/{run}/{logs[step].stem}.json", f"logs/{run}/{logs[step].name}")
        for step in sorted(filter(str.isdecimal, logs), key=int)
    ]
    return [*segments, stage._replace(product=product, log=log)]


def _begun(folder: Path, name: str, logs: str, product: str) -> list[Stage]:
    """Jobs of a rule that have a log, which names what each makes."""
    return [
        Stage(name, product.format(log.stem), f"{logs}/{log.name}", usual=False)
        for log in sorted((folder / logs).glob("*.log"))
    ]


def _planned(folder: Path, stage: str) -> list[Stage]:
    """Jobs of a stage, batch by batch, as far as the plan tells."""
    products = f"results/data/batches/{stage}"
    if not (folder / PLAN).exists():
        return [Stage(stage, products, f"logs/{stage}")]
    plan = read_plan(folder / PLAN)
    batches = plan.tokenize_batches if stage == "tokenize" else plan.merge_batches
    return [
        Stage(stage, f"{products}/{batch.name}.json", f"logs/{stage}/{batch.name}.log")
        for batch in batches
    ]


def jobs(folder: Path, wanted: Iterable[Stage]) -> list[Job]:
    """State of each stage; unusual ones that have not begun are left out."""
    running, found = _running(folder), []
    for stage in wanted:
        log, product = folder / stage.log, folder / stage.product
        silent = time.time() - log.stat().st_mtime if log.is_file() else None
        if any(f"{one}/".startswith(f"{stage.product}/") for one in running):
            state: State = "running"
        elif product.is_file() or any(path.is_file() for path in product.rglob("*")):
            state = "done"
        else:
            state = "waiting" if silent is None else "failed"
        if stage.usual or state != "waiting":
            found.append(Job(stage, state, silent))
    return found


def _running(folder: Path) -> set[str]:
    """Products on which Snakemake has jobs at work, or had when it was killed."""
    found = set()
    marks = folder / ".snakemake/incomplete"
    for path in marks.rglob("*"):
        name = "".join(part.removeprefix("@") for part in path.relative_to(marks).parts)
        try:
            found.add(urlsafe_b64decode(name).decode())
        except ValueError:
            continue
    return found
