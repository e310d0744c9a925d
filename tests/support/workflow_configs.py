"""Checked configs of the workflow, read without Snakemake, and wildcards of its jobs."""

import json
from pathlib import Path
from typing import Any

import pytest
from snakemake.iocontainers import Wildcards

from tests.support.workflows import CONFIG, CORPORA
from tokamake.errors import UserError
from tokamake.preflight.planned import WorkflowConfig
from tokamake.workflow.config import check_workflow_config, read_workflow_config


def read_config(
    *, table: str = CORPORA, is_main_process: bool = False, **sections: Any
) -> WorkflowConfig:
    """Check the config of the workspace in the current folder, with some sections replaced."""
    Path("corpora.tsv").write_text(table)
    values = {**CONFIG, **sections}
    config = read_workflow_config(values, ["my.yaml"], is_main_process=is_main_process)
    check_workflow_config(config, is_main_process=is_main_process)
    return config


def refused(**config: Any) -> str:
    """The message about a config with a mistake."""
    with pytest.raises(UserError) as caught:
        read_config(**config)
    return str(caught.value)


def train(**changes: Any) -> dict[str, Any]:
    """The section `train` with some settings replaced."""
    return {**dict(CONFIG["train"]), **changes}  # type: ignore[call-overload]


def wildcards(**values: str) -> Any:
    """Wildcards of a job."""
    return Wildcards(fromdict=values)


def write_runs(*lines: str) -> str:
    """Write a table of runs with one cell per word; return its path."""
    Path("runs.tsv").write_text("".join("\t".join(line.split()) + "\n" for line in lines))
    return "runs.tsv"


RAW_TABLE = "corpus\tfiles\tweight\nweb\traw/*.jsonl\t1\n"
"""A table with raw files of the user."""


def add_raw(name: str, *, documents: int = 100) -> None:
    """Write a raw file of the corpus of RAW_TABLE."""
    Path("raw").mkdir(exist_ok=True)
    Path("raw", name).write_text('{"text": "a document"}\n' * documents)


def make_tokenizer(folder: str, *words: str) -> str:
    """Write a tokenizer.json of a few words, the last one the end of a document."""
    from tokenizers import Tokenizer, models

    Path(folder).mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate([*words, "<eod>"])}
    Tokenizer(models.WordLevel(vocabulary, "<eod>")).save(str(Path(folder, "tokenizer.json")))
    Path(folder, "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eod>"}))
    return folder
