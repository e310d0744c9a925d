"""Products and logs of stages: those that the rules of the workflow declare."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.support.finetune_workspaces import make_finetune_workspace
from tests.support.web_server import Server
from tests.support.workflow_configs import write_runs
from tests.support.workflows import CONFIG, CORPORA, MINE, make_workspace, snakemake
from tests.test_house import rules
from tokamake.config.data_set import DataSet
from tokamake.data.corpus.plan_file import write_plan
from tokamake.status.stages import stages
from tokamake.workflow.config import read_workflow_config
from tokamake.workflow.finetune import RULES as FINETUNE_RULES

EPOCHS = "corpus\tfiles\tepochs\ndocs\tresults/raw/docs/*\t2\n"


class JobState(NamedTuple):
    """A job of a dry run."""

    rule: str
    outputs: list[str]
    log: str


@pytest.fixture(params=["default", "other"])
def planned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    server: Server,
) -> list[JobState]:
    """All jobs of a workflow that uses every rule, in the current folder, where nothing exists.

    A model by address brings its tokenizer, so that none would be trained: `fetch_weights` is left
    out, and `import_checkpoint`; `tests/workflow/test_checkpoints_fetched.py` has them. So is
    `fetch_task`, which needs lm-eval; `tests/workflow/test_tasks.py` has it.
    """
    data_set = DataSet(request.param)
    monkeypatch.chdir(make_workspace(tmp_path))
    runs = write_runs(
        "run corpora train.train_steps train.segment_steps export.push",
        "chain corpora.tsv 40 20 hf://org/a",
        "epochs epochs.tsv null 20 hf://org/b",
    )
    server.files["/far.jsonl"] = b'{"text": "far"}\n'
    for name, table in (("corpora.tsv", CORPORA), ("epochs.tsv", EPOCHS)):
        cells = {"corpus": "far", "files": f"{server.url}/far.jsonl"}
        columns = table.partition("\n")[0].split("\t")
        row = "\t".join(cells.get(c, "text" if c == "text_key" else "1") for c in columns)
        Path(name).write_text(f"{table}{row}\n")
    config = {**CONFIG, "runs": runs, "convert": ["hf-bf16"], "tokenize": {"deduplicate": True}}
    config["data_set"] = data_set.name
    config["tokenizer"] = {**dict(CONFIG["tokenizer"]), "sentinels": 2}
    config["evaluate"] = {"tasks": {"own": {"name": "text", "data": ["corpora.tsv"]}}}
    Path("my.yaml").write_text(yaml.safe_dump(config))
    result = snakemake(tmp_path, "-n", "--set-resources", "doctor:nodes=1", *MINE, "all")
    assert result.returncode == 0, result.stdout + result.stderr
    write_plan(
        Path(data_set.plan), read_workflow_config(config, ["my.yaml"], is_main_process=False).plan
    )
    # `status` knows the data set of a run from its weighting file until there is a run.yaml.
    for run in ("chain", "epochs"):
        Path(data_set.weights.format(run=run)).touch()
    return read_jobs(result.stdout + result.stderr)


def read_jobs(text: str) -> list[JobState]:
    """Jobs that a dry run lists; jobs without a log are left out."""
    parts = re.split(r"^(?:local)?(?:rule|checkpoint) (\w+):\n", text, flags=re.M)
    jobs = []
    for rule, block in zip(parts[1::2], parts[2::2], strict=True):
        fields = dict(re.findall(r"^ {4}(output|log): (.*)$", block, re.M))
        if "log" in fields:
            outputs = re.sub(r" \([^)]*\)", "", fields["output"])
            jobs.append(JobState(rule, outputs.split(", "), fields["log"]))
    return jobs


def test_stages_have_the_products_and_logs_of_the_rules(planned: list[JobState]) -> None:
    others = {"all", "data", "fetch_task", "fetch_weights", "import_checkpoint", "plot_encoder"}
    others |= {*FINETUNE_RULES}
    assert {job.rule for job in planned} == rules().keys() - others
    for job in planned:
        Path(job.log).parent.mkdir(parents=True, exist_ok=True)
        Path(job.log).touch()
    groups = stages(Path())
    by_log = {stage.log: stage for group in groups.values() for stage in group}
    for job in planned:
        stage = by_log[job.log]
        assert stage.name == job.rule
        assert is_product(stage.product, job.outputs), (stage, job)
    # The dry run knows the run `epochs` up to its plan of segments only.
    complete = [stage for title in groups if title != "run epochs" for stage in groups[title]]
    assert {stage.log for stage in complete if stage.always} <= {job.log for job in planned}


def test_stages_of_finetuned_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_finetune_workspace(tmp_path))
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode == 0, result.stdout + result.stderr
    jobs = read_jobs(result.stdout + result.stderr)
    planned = [job for job in jobs if job.rule in FINETUNE_RULES]
    (of_encoder,) = (job for job in jobs if job.rule == "plot_encoder")
    for job in jobs:
        Path(job.log).parent.mkdir(parents=True, exist_ok=True)
        Path(job.log).touch()
    *others, last = stages(Path())[f"run {Path(of_encoder.log).parent.name}"]
    assert (last.name, last.log) == ("plot_encoder", of_encoder.log)
    assert last.product in of_encoder.outputs
    assert not {"evaluate", "generate"} & {stage.name for stage in others}
    of_run = {stage.name: stage for stage in stages(Path())["run order"]}
    assert {*of_run} == {job.rule for job in planned} == {*FINETUNE_RULES}
    for job in planned:
        assert of_run[job.rule].log == job.log
        assert is_product(of_run[job.rule].product, job.outputs), job


def is_product(path: str, outputs: list[str]) -> bool:
    """Whether a path is one of the outputs of a job, or a folder with all of them."""
    return path in outputs or all(Path(path) in Path(output).parents for output in outputs)
