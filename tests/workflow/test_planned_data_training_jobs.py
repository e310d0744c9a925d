"""A new raw file while a training job of an earlier controller runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.records import Record, Records
from tests.support.workflows import CONFIG, make_workspace
from tokamake.data.corpus.plan_file import Plan, write_plan
from tokamake.workflow.config import read_workflow_config
from tokamake.workflow.planned_data import runs_in_training

TABLE = "corpus\tfiles\tweight\nweb\traw/*.jsonl\t1\n"


def plan(values: dict) -> Plan:  # type: ignore[type-arg]
    return read_workflow_config(values, ["my.yaml"], is_main_process=True).plan


def add_file(name: str) -> None:
    Path("raw").mkdir(exist_ok=True)
    Path("raw", name).write_text('{"text": "a document"}\n' * 100)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan of a workspace with one raw file, written as at the start of a controller."""
    make_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("corpora.tsv").write_text(TABLE)
    add_file("0.jsonl")
    first = plan(CONFIG)
    write_plan(Path("results/data/plan.json"), first)
    return first


def submit(path: str) -> tuple[Records, Record]:
    """Write the record of a submitted job that writes a file."""
    records = Records(Path(".snakemake/pbs"))
    record = Record("tok", "job.tok", "key", (str(Path(path).absolute()),), "f", job_id="1.pbs")
    records.write(record)
    return records, record


@pytest.mark.parametrize("name", ["train.json", "train.20.json"])
def test_raw_files_wait_while_a_training_job_runs(
    planned: Plan, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records, record = submit(f"results/smoke/{name}")
    assert plan(CONFIG) == planned
    assert not capsys.readouterr().err
    add_file("1.jsonl")
    assert plan(CONFIG) == planned
    message = "tokamake: smoke: training jobs of an earlier start still run; new"
    assert message in capsys.readouterr().err
    records.path(record, "exit").write_text("1\n")
    assert len(plan(CONFIG).shards) == 2


def test_other_jobs_and_cancelled_trainings_do_not_keep_raw_files_waiting(planned: Plan) -> None:
    add_file("1.jsonl")
    assert len(plan(CONFIG).shards) == 2
    records, record = submit("results/smoke/evaluate.json")
    assert len(plan(CONFIG).shards) == 2
    records.write(replace(record, outputs=(str(Path("results/smoke/train.json").absolute()),)))
    assert plan(CONFIG) == planned
    assert runs_in_training(["other", "smoke"]) == ["smoke"]
    records.write(replace(record, cancelled=True))
    assert len(plan(CONFIG).shards) == 2


def test_a_changed_config_makes_a_new_plan_although_a_training_job_runs(planned: Plan) -> None:
    submit("results/smoke/train.json")
    Path("corpora.tsv").write_text(f"{TABLE}more\traw/0.jsonl\t1\n")
    assert plan(CONFIG) != planned
    assert len(plan(CONFIG).shards) == 2
