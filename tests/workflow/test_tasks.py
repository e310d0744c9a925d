"""Tasks of a run: jobs of the workflow after each segment, and tables of the report."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.support.workflow_configs import read_config
from tests.support.workflows import CONFIG, MINE, jobs, make_workspace, snakemake
from tokamake.errors import UserError

PASSAGES = ["The function returns the value", "He reads a list of words"]
TASKS = {
    "lambada": {"data": ["passages.jsonl"]},
    "books": {"name": "text", "data": ["passages.jsonl"], "max_tokens": 50},
    "wiki": {"name": "wikitext", "data": ["wiki.tokens"], "stride": 4},
}


def add_tasks(folder: Path, **config: object) -> None:
    """Files of the tasks, and a config with them: other.yaml."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PASSAGES)
    for name in ("passages.jsonl", "{a}.jsonl"):
        (folder / name).write_text(lines)
    (folder / "wiki.tokens").write_text(" = Title = \n\n A guest @-@ star , he said . \n")
    (folder / "other.yaml").write_text(yaml.safe_dump({**CONFIG, **config}))


OTHER = ("--configfile", "other.yaml", "--")


@pytest.mark.slow
def test_the_models_of_a_finished_run_are_scored(built: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "copy", symlinks=True))
    add_tasks(folder, evaluate={**CONFIG["evaluate"], "tasks": TASKS})
    result = snakemake(folder, *OTHER, "report")
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs(result) == {"evaluate_task": 3, "report": 1}
    scores = {
        name: json.loads((folder / f"results/smoke/tasks/{name}.json").read_text())["scores"]
        for name in TASKS
    }
    assert scores["lambada"]["passages"] == 2
    assert scores["books"]["bits_per_byte"] > 0
    assert scores["wiki"]["words"] == 12
    page = (folder / "results/report.html").read_text()
    assert [f">{name}</th>" in page for name in TASKS] == [True] * 3
    assert f"{scores['wiki']['adjusted_perplexity']:,.4f}" in page
    again = {**CONFIG["evaluate"], "tasks": {**TASKS, "books": {**TASKS["books"], "max_tokens": 9}}}
    add_tasks(folder, evaluate=again)
    planned = jobs(snakemake(folder, "-n", *OTHER, "report"))
    assert planned == {"evaluate_task": 1, "report": 1}
    # Other data are other scores, of the tasks that read them.
    add_tasks(folder, evaluate={**CONFIG["evaluate"], "tasks": TASKS})
    (folder / "wiki.tokens").write_text(" = Title = \n\n Another guest . \n")
    planned = jobs(snakemake(folder, "-n", *OTHER, "results/smoke/tasks/wiki.json"))
    assert planned == {"evaluate_task": 1}


def test_each_segment_is_scored(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path)
    train = {**CONFIG["train"], "train_steps": 40, "segment_steps": 20}
    add_tasks(folder, train=train, evaluate={"tasks": TASKS})
    assert jobs(snakemake(folder, "-n", *OTHER, "report"))["evaluate_task"] == 6
    assert jobs(snakemake(folder, "-n", *OTHER, "evaluate_task"))["evaluate_task"] == 3
    assert "evaluate_task" not in jobs(snakemake(folder, "-n", *MINE, "report"))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"lambada": {"data": ["none.jsonl"]}}, "evaluate.tasks.lambada: none.jsonl: no such file"),
        (
            {"books": {"name": "text", "data": ["{a}.jsonl"]}},
            "evaluate.tasks.books: {a}.jsonl: braces",
        ),
        ({"h": {"name": "lm_eval"}}, "evaluate.tasks.h: tasks: name at least one task of lm-eval"),
    ],
)
def test_mistakes_fail_the_dry_run_with_one_line(
    tmp_path: Path, tasks: dict[str, object], message: str
) -> None:
    folder = make_workspace(tmp_path)
    add_tasks(folder, evaluate={"tasks": tasks})
    result = snakemake(folder, "-n", *OTHER, "report")
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("tokamake: ")]
    assert len(lines) == 1, result.stderr
    assert message in lines[0]


@pytest.mark.usefixtures("workspace_here")
@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"nope": {"data": ["a"]}}, "evaluate.tasks.nope.name: 'nope': unknown name; choose one"),
        ({"lambada": {}}, "data: empty; name the files of lambada"),
        ({"lambada": {"data": ["a"], "stride": 1}}, "stride: 1: lambada does not use it, only"),
        ({"a.b": {"name": "text", "data": ["a"]}}, "evaluate.tasks.a.b"),
    ],
)
def test_mistakes_in_the_config_are_one_line(tasks: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(evaluate={"tasks": tasks})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_login_node_fetches_data_behind_addresses(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path)
    tasks = {"far": {"name": "text", "data": ["https://host/far.jsonl"]}, **TASKS}
    add_tasks(folder, evaluate={"tasks": tasks})
    planned = snakemake(folder, "-n", "-p", *OTHER, "report")
    assert jobs(planned) | {"fetch_task": 1, "evaluate_task": 4} == jobs(planned)
    text = planned.stdout + planned.stderr
    assert "tokamake fetch-task text" in text
    assert "--fetched=results/smoke/tasks/far.fetched" in text
    assert text.count("--fetched=") == 1
    assert jobs(snakemake(folder, "-n", *OTHER, "fetch_task"))["fetch_task"] == 1


@pytest.mark.extra("lm-eval", "lm_eval")
def test_the_login_node_fetches_data_of_lm_eval(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path)
    tasks = {"harness": {"name": "lm_eval", "tasks": ["hellaswag"]}, "lambada": TASKS["lambada"]}
    add_tasks(folder, evaluate={"tasks": tasks})
    assert jobs(snakemake(folder, "-n", *OTHER, "report"))["fetch_task"] == 1
    assert jobs(snakemake(folder, "-n", *OTHER, "fetch_task"))["fetch_task"] == 1
