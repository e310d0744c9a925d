"""A user's mistakes: the dry run fails with one line that states the remedy."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.workflows import CONFIG, CORPORA, MINE, make_workspace, snakemake

MISTAKES = {
    "unknown key": (
        {"trian": {}},
        CORPORA,
        "my.yaml: trian: unknown key; did you mean train?",
    ),
    "unknown plug-in": (
        {"train": {"optimizer": {"name": "adamww"}}},
        CORPORA,
        "my.yaml: train.optimizer.name: 'adamww': unknown name; choose one of adafactor, ",
    ),
    "missing file": (
        {},
        CORPORA.replace("results/raw/docs/*", "none/*.jsonl"),
        'corpus "docs": no file matches none/*.jsonl; fix the files column',
    ),
    "missing architecture": (
        {"model": {"architecture": "none.yaml"}},
        CORPORA,
        "none.yaml: no such file; fix model.architecture",
    ),
    "sequences too long": (
        {"train": {"sequence_length": 128}},
        CORPORA,
        "my.yaml: train.sequence_length: 128: more than the 64 max_position_embeddings",
    ),
    "missing tokenizer": (
        {"tokenizer": {"path": "none"}},
        CORPORA,
        "tokenizer none: no such file or folder; fix the path",
    ),
    "negative weight": (
        {},
        CORPORA.replace("\t1\n", "\t-1\n"),
        "corpora.tsv:3: weight: '-1': input should be greater than 0",
    ),
    "no validation documents": (
        {"train": {**CONFIG["train"], "split": "9,0,1"}},
        CORPORA,
        "my.yaml: train: split: '9,0,1': nothing to validate on; give the second number a share",
    ),
    "no training length": (
        {"train": {**CONFIG["train"], "train_steps": None}},
        CORPORA,
        "my.yaml: train: no length of the run; set train_steps, train_samples or train_tokens, "
        "or epochs of code, docs",
    ),
    "no fill-in-the-middle tokens": (
        {"train": {**CONFIG["train"], "fim": {"rate": 0.5}}},
        CORPORA,
        "my.yaml: train.fim: <fim_prefix>, <fim_suffix>, <fim_middle>: not a token of the "
        "tokenizer that is to be trained; add it to tokenizer.special_tokens",
    ),
    "format with too many ranks": (
        {"convert": ["mds-tp3"]},
        CORPORA,
        "my.yaml: convert: mds-tp3: tp3: does not divide num_attention_heads 4; give a divisor",
    ),
    "bad range of documents": (
        {},
        "corpus\tfiles\tweight\tsets\ncode\tresults/raw/code/*\t2\ttrain=1:0\n",
        "corpora.tsv:2: sets: 'train=1:0': '1:0': give a part of the documents, START:END",
    ),
}


def errors(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines of stderr without Snakemake's line about the profile."""
    return [line for line in result.stderr.splitlines() if not line.startswith("Using profile")]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_fail_the_dry_run_with_one_line(tmp_path: Path, mistake: str) -> None:
    sections, table, expected = MISTAKES[mistake]
    make_workspace(tmp_path)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({**CONFIG, **sections}))
    (tmp_path / "corpora.tsv").write_text(table)
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode != 0
    (message,) = errors(result)
    assert message.startswith(f"tokamake: {expected}")
    assert not (tmp_path / "results").exists()


def test_a_split_without_test_documents_fails_evaluate_without_a_traceback(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    settings = {**CONFIG["train"], "split": "95,5,0"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "train": settings}))
    result = snakemake(tmp_path, "-n", *MINE, "evaluate")
    assert result.returncode != 0
    assert "tokamake: train.split: '95,5,0': nothing is held out to evaluate on" in result.stderr
    assert "Traceback" not in result.stderr
    assert snakemake(tmp_path, "-n", *MINE, "train").returncode == 0


def test_convert_without_a_format_in_the_config_fails(tmp_path: Path) -> None:
    result = snakemake(make_workspace(tmp_path), "-n", *MINE, "convert")
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith(
        "tokamake: convert: the config names no export format;"
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "results/smoke/train.40.json",
            "run smoke ends at step 40; its last job makes results/smoke/",
        ),
        (
            "results/smoke/evaluate.41.json",
            "run smoke ends at step 40; its last job makes results/smoke/",
        ),
        ("results/smok/train.json", "no run is called smok; there is smoke"),
        ("tarin", "no rule has this name or writes this file; did you mean train?"),
        (
            "results/smoke/what",
            "no rule has this name or writes this file; `snakemake --list` lists",
        ),
    ],
)
def test_an_unknown_target_fails_with_one_line(tmp_path: Path, target: str, expected: str) -> None:
    result = snakemake(make_workspace(tmp_path), "-n", *MINE, target)
    assert result.returncode != 0
    (message,) = errors(result)
    assert message.startswith(f"tokamake: {target}: {expected}")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("file", "results: a file, but the workflow writes to results/data/; rename the file"),
        ("link", "results: a link to scratch, which does not exist; make that folder, or fix"),
    ],
)
def test_a_folder_that_cannot_be_written_fails_the_dry_run_with_one_line(
    tmp_path: Path, place: str, expected: str
) -> None:
    results = make_workspace(tmp_path) / "results"
    if place == "file":
        results.touch()
    else:
        results.symlink_to("scratch")
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Using profile")]
    assert len(lines) == 1
    assert lines[0].startswith(f"tokamake: {expected}")
