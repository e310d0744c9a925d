"""Each rule runs again when the config changes its params, also if `.snakemake` is lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.finetune_workspaces import make_finetune_workspace
from tests.support.workflows import CONFIG, MINE, make_workspace, snakemake

PRETEND = """
import atexit, json, os, sys

include: "workflow/Snakefile"


def pretend(input, output, *_):
    for path in output:
        if "." not in os.path.basename(path):  # a folder
            os.makedirs(path)
            path = f"{path}/file"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as stream:
            json.dump({"batch": "of no dataset", "members": []}, stream)


def say_changed():
    is_changed = workflow.persistence.params_changed
    changed = {job.rule.name: bool(is_changed(job)) for job in workflow.dag.jobs}
    print("changed:", json.dumps(changed), file=sys.stderr)


for each in workflow.rules:
    if each.shellcmd:
        each.run_func, each._benchmark = pretend, None
atexit.register(say_changed)
"""
"""Jobs that write files and do nothing else. At the end, it prints which rules have changed params.
"""
FOLLOW = {
    *("all", "find_duplicates", "train", "export_hf", "convert", "report"),
    *("finetune", "export_finetuned"),
}
"""Rules that have no params, or params that only inputs and names of outputs decide."""
BOOKS = {"name": "text", "data": ["passages.jsonl"]}
"""A task."""
PRETRAINED: tuple[dict[str, Any], ...] = (
    {
        "tokenizer": {**CONFIG["tokenizer"], "sentinels": 3},
        "tokenize": {"deduplicate": True},
        "convert": ["megatron"],
        "evaluate": {"tasks": {"books": {**BOOKS, "max_tokens": 50}}},
        "export": {"push": "hf://me/one"},
    },
    {
        "corpora": "other.tsv",
        "sample_corpus": {**CONFIG["sample_corpus"], "docs": {"num_files": 2, "file_bytes": 9000}},
        "tokenizer": {"vocab_size": 520, "sentinels": 4},
        "tokenize": {"append_eod": False, "deduplicate": True},
        "plan": {**CONFIG["plan"], "merged_bytes": 60_000},
        "seed": 3,
        "train": {**CONFIG["train"], "on_change": "restart", "schedule": {"warmup_steps": 3}},
        "evaluate": {"max_tokens": 1000, "tasks": {"books": {**BOOKS, "max_tokens": 9}}},
        "generate": {"max_new_tokens": 9},
        "export": {"push": "hf://me/two", "license": "mit"},
    },
)
"""Sections of a first config, and sections that change all params."""


def changed_rules(folder: Path, sections: dict[str, Any], *arguments: str) -> dict[str, bool]:
    """Run the pretended workflow, and return whether the params of each rule have changed."""
    (folder / "Snakefile").write_text(PRETEND)
    config = {**yaml.safe_load((folder / "my.yaml").read_text()), **sections}
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    done = snakemake(folder, "--snakefile", "Snakefile", *arguments, *MINE, "all")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("changed: "))
    rules: dict[str, bool] = json.loads(line.removeprefix("changed: "))
    return rules


@pytest.mark.parametrize("kind", ["pretrained", "finetuned"])
def test_changed_params_rerun_each_rule_without_the_memory_of_snakemake(
    tmp_path: Path, kind: str
) -> None:
    first, changes = PRETRAINED
    if kind == "pretrained":
        shutil.copy(make_workspace(tmp_path) / "corpora.tsv", tmp_path / "other.tsv")
        (tmp_path / "passages.jsonl").write_text('{"text": "a passage"}\n')
    else:
        config = yaml.safe_load((make_finetune_workspace(tmp_path) / "my.yaml").read_text())
        first, changes = {}, {"seed": 3, "train": {**config["train"], "micro_batch_size": 2}}
    changed_rules(tmp_path, first)
    shutil.rmtree(tmp_path / ".snakemake")
    assert not any(changed_rules(tmp_path, {}, "-n").values())
    changed = changed_rules(tmp_path, changes, "-n")
    assert ("evaluate_task" if kind == "pretrained" else "evaluate_finetuned") in changed
    data = {"sample_corpus", "train_tokenizer", "tokenize", "merge", "describe", "weigh"}
    same = FOLLOW if kind == "pretrained" else FOLLOW | data
    assert {rule for rule, is_changed in changed.items() if not is_changed} == same & changed.keys()
