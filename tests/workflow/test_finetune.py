"""Runs of the table that finetune: planned, checked before any job, and built."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.support.finetune_workspaces import TASK, make_finetune_workspace
from tests.support.finetunes import small_bert, write_vocabulary
from tests.support.random_tensors import random_tensors
from tests.support.runs import write_start
from tests.support.workflows import MINE, jobs, snakemake
from tokamake.checkpoint.convert import convert
from tokamake.workflow.finetune import RULES


def test_finetuned_runs_are_planned_after_their_parent(tmp_path: Path) -> None:
    folder = make_finetune_workspace(tmp_path)
    planned = jobs(snakemake(folder, "-n", *MINE, "finetune"))
    assert {name: planned.get(name) for name in ("train", "prepare_finetune", "finetune")} == {
        "train": 1,
        "prepare_finetune": 1,
        "finetune": 1,
    }
    planned = jobs(snakemake(folder, "-n", *MINE, "all"))
    others = ("report", "evaluate")
    assert {name: planned.get(name) for name in (*RULES, *others)} == {
        **dict.fromkeys((*RULES, "report"), 1),
        **dict.fromkeys(("evaluate",)),  # of models that predict the next token
    }


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"finetune__train_files": "lost.jsonl"}, "runs.tsv:3: finetune.train_files: lost.jsonl"),
        ({"model__checkpoint": "{run: bart}"}, "no run of this config is called bart"),
        ({"finetune__task": "glue"}, "runs.tsv:3: finetune.task"),
        ({"train__sequence_length": "128"}, "train.sequence_length: 128: more than the 64"),
        ({"train__backend": "deepspeed"}, "train.backend: deepspeed: finetuning uses the back end"),
        (
            {"train__parallel": "{tensor_parallel_size: 3}"},
            "tensor_parallel_size",
        ),
    ],
)
def test_mistakes_are_found_before_any_job(
    tmp_path: Path, cells: dict[str, str], message: str
) -> None:
    refused = snakemake(make_finetune_workspace(tmp_path, **cells), "-n", *MINE, "finetune")
    assert refused.returncode == 2
    assert message in refused.stderr, refused.stderr


def test_a_family_without_heads_is_refused(tmp_path: Path) -> None:
    sections = {
        "model": {"architecture": "config/models/tiny-llama.yaml"},
        "tokenize": {},
        "train": {"sequence_length": 64, "global_batch_size": 8},
        "tokenizer": {"vocab_size": 500},
    }
    folder = make_finetune_workspace(tmp_path, sections=sections)
    refused = snakemake(folder, "-n", *MINE, "finetune")
    assert "runs.tsv:3: finetune.task: labeled_text: family llama has no head" in refused.stderr


def test_the_ranks_of_the_profile_must_fit(tmp_path: Path) -> None:
    folder = make_finetune_workspace(tmp_path)
    refused = snakemake(folder, "-n", "--set-resources", "finetune:tasks=3", *MINE, "finetune")
    assert refused.returncode == 2
    assert "run order: global_batch_size: 8 samples cannot be shared by 3" in refused.stderr
    assert "(ranks: the resource tasks of the rule finetune)" in refused.stderr


def test_a_run_can_start_from_a_folder_without_one_that_pretrains(tmp_path: Path) -> None:
    folder = make_finetune_workspace(tmp_path)
    write_start(folder / "bert", small_bert(), random_tensors(small_bert(), 5))
    vocabulary = write_vocabulary(folder)
    convert(source=folder / "bert", target=folder / "hf", format="hf", tokenizer=vocabulary)
    files = {"train_files": "train.jsonl", "validation_files": "dev.jsonl"}
    config = {
        "run": "alone",
        "model": {"checkpoint": "hf"},
        "finetune": {"task": TASK, **files},
        "train": {"sequence_length": 32, "global_batch_size": 8},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    planned = jobs(snakemake(folder, "-n", *MINE, "all"))
    others = ("import_checkpoint", "report", "all")
    assert planned == dict.fromkeys((*RULES, *others), 1)


def test_without_such_a_run_the_target_says_so(workspace_here: Path) -> None:
    refused = snakemake(workspace_here, "-n", *MINE, "finetune")
    assert refused.returncode == 2
    assert (
        "finetune: no run of this config finetunes; give one the section finetu" in refused.stderr
    )


def accuracy_by_transformers(model: Any, folder: Path, run: Path) -> float:
    """Accuracy of an export on dev.jsonl, with its tokenizer as transformers uses it by default."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "export")
    rows = [json.loads(line) for line in (folder / "dev.jsonl").read_text().splitlines()]
    inputs = tokenizer(
        *([row[key] for row in rows] for key in ("text", "other")),
        padding=True,
        truncation=True,
        max_length=32,
        return_tensors="pt",
    )
    with torch.no_grad():
        predicted = model.eval()(**inputs).logits.argmax(-1).tolist()
    right = [
        model.config.id2label[number] == row["label"]
        for number, row in zip(predicted, rows, strict=True)
    ]
    return sum(right) / len(right)


@pytest.mark.grid
@pytest.mark.slow
def test_raw_text_becomes_a_finetuned_encoder(tmp_path: Path) -> None:
    folder = make_finetune_workspace(tmp_path)
    result = snakemake(folder, "--set-resources", "train:tasks=1", *MINE, "all")
    assert result.returncode == 0, result.stdout + result.stderr
    run = folder / "results/order"
    scores = json.loads((run / "finetune.json").read_text())
    assert [record["epoch"] for record in scores["epochs"]] == [1, 2]
    tested = json.loads((run / "evaluate_finetuned.json").read_text())["scores"]
    assert tested["dev"]["accuracy"] == pytest.approx(scores["best"]["scores"]["accuracy"])
    assert tested["other"]["rows"] == 5
    assert len((run / "predictions/other.jsonl").read_text().splitlines()) == 5
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "export")
    assert model.config.num_labels == 2
    assert accuracy_by_transformers(model, folder, run) == pytest.approx(tested["dev"]["accuracy"])
    log = (folder / "logs/order/prepare_finetune.log").read_text()
    assert "model.task_head.weight" in log
    assert "dropped" in log
    report = (folder / "results/report.html").read_text()
    assert "Scores of order" in report
    assert jobs(snakemake(folder, "-n", *MINE, "all")) == {}
    # The dry run compares settings as the job does: it allows the same ones and refuses others.
    again = snakemake(folder, "-n", "--forcerun", "finetune", *MINE, "all")
    assert jobs(again)["finetune"] == 1
    table = (folder / "runs.tsv").read_text()
    (folder / "runs.tsv").write_text(table.replace("\t2\t8\n", "\t3\t8\n"))
    refused = snakemake(folder, "-n", *MINE, "all")
    assert refused.returncode == 2
    assert (
        "run order: results/order/training: has checkpoints of another run: epochs 2 -> 3. Give"
        in (refused.stderr)
    )
    (folder / "runs.tsv").write_text(table)
    # Records as an earlier version of the rule wrote them rerun nothing.
    for path in (run / ".made_from/finetune.json.json", run / ".made_from/finetuned.json"):
        record = json.loads(path.read_text())
        assert record["params"] == []
        earlier = record["code"].replace("{input.run:q} ", "{input.run:q} {params.ranks:q} ")
        path.write_text(json.dumps({**record, "code": earlier, "params": ["[]"]}))
    assert jobs(snakemake(folder, "-n", *MINE, "all")) == {}
