"""A user's mistakes: the dry run fails with one line that states the remedy."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.workflows import CONFIG, CORPORA, MINE, jobs, make_workspace, snakemake

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
        "corpora.tsv:3: files: none/*.jsonl: no file matches; fix the column, whose paths start",
    ),
    "missing architecture": (
        {"model": {"architecture": "none.yaml"}},
        CORPORA,
        "my.yaml: model.architecture: none.yaml: no such file; fix the path, or choose",
    ),
    "sequences too long": (
        {"train": {"sequence_length": 128}},
        CORPORA,
        "my.yaml: train.sequence_length: 128: more than the 64 max_position_embeddings",
    ),
    "missing tokenizer": (
        {"tokenizer": {"path": "none"}},
        CORPORA,
        "my.yaml: tokenizer.path: none: no such file or folder; fix the path",
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
    "braces in a path": (
        {"model": {"architecture": "{x}.yaml"}},
        CORPORA,
        "my.yaml: model.architecture: {x}.yaml: braces in a path are wildcards of Snakemake; "
        "rename the file or folder, or give a link to it",
    ),
    "sets without one to validate on": (
        {},
        "corpus\tfiles\tweight\tsets\ncode\tresults/raw/code/*\t2\ttrain=0:0.9 test=0.9:1\n",
        "my.yaml: train: split: '80,10,10': nothing to validate on (all corpora have sets of "
        "their own); name a validation split in the column sets",
    ),
    "heads that ranks cannot share": (
        {"train": {**CONFIG["train"], "parallel": {"tensor_parallel_size": 3}}},
        CORPORA,
        "my.yaml: train.parallel.tensor_parallel_size: 3: does not divide 4 (attention heads)",
    ),
    "too few ranks": (
        {"train": {**CONFIG["train"], "parallel": {"tensor_parallel_size": 4}}},
        CORPORA,
        "run smoke: train.parallel: tensor 4 × context 1 × pipeline 1 needs 4 ranks or a multiple, "
        "this run has 2; change the number of ranks or these sizes (ranks: the resource tasks of",
    ),
    "a batch that ranks cannot share": (
        {"train": {**CONFIG["train"], "micro_batch_size": 16}},
        CORPORA,
        "run smoke: global_batch_size: 16 samples cannot be shared by 2 data-parallel ranks",
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
    assert result.returncode == 2
    (message,) = errors(result)
    assert message.startswith(f"tokamake: {expected}")
    assert not (tmp_path / "results").exists()


def test_spare_nodes_on_one_machine_fail_the_dry_run(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    spare = ("--set-resources", "train:tasks=2", "train:spare_nodes=1")
    result = snakemake(tmp_path, "-n", *spare, *MINE, "train")
    assert result.returncode == 2
    (message,) = errors(result)
    expected = (
        "resources of the rule train: spare_nodes: 1: profiles/local/launch.sh has one machine"
    )
    assert message.startswith(f"tokamake: {expected}; leave it out")


def test_a_corpus_without_text_fails_the_dry_run_with_its_line(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "corpora.tsv").write_text(f"{CORPORA}web\tnone.jsonl\ttext\t1\n")
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode == 2
    (message,) = errors(result)
    assert message.startswith('tokamake: corpora.tsv:4: corpus "web" is empty: none.jsonl holds no')


DEFAULT_TABLE = (
    "my.yaml: corpora: missing, and with the default table, config/corpora.tsv:10: files: "
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: two\n", "my.yaml:{last}: run: is in line "),
        ("corpora: null\n", "my.yaml:{last}: corpora: is in line "),
    ],
)
def test_a_key_that_is_twice_in_the_config_fails_with_its_lines(
    tmp_path: Path, text: str, expected: str
) -> None:
    config = make_workspace(tmp_path) / "my.yaml"
    config.write_text(config.read_text() + text)
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode == 2
    (message,) = errors(result)
    last = len(config.read_text().splitlines())
    assert message.startswith(f"tokamake: {expected.format(last=last)}")


def test_a_config_without_a_table_of_corpora_says_that_the_default_one_is_used(
    tmp_path: Path,
) -> None:
    sections = {key: CONFIG[key] for key in CONFIG if key not in ("corpora", "sample_corpus")}
    (make_workspace(tmp_path) / "my.yaml").write_text(yaml.safe_dump(sections))
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode == 2
    (message,) = errors(result)
    assert message.startswith(f"tokamake: {DEFAULT_TABLE}")
    assert message.endswith("add corpora with the path of your table")


def test_a_tab_in_the_default_config_is_reported_with_its_line(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    (tmp_path / "config").unlink()
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("train:\n\ttrain_steps: 1\n")
    result = snakemake(tmp_path, "-n", "all")
    assert result.returncode == 2
    (message,) = errors(result)
    assert message.startswith("tokamake: config/config.yaml:2: indented with a tab; YAML needs")


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
    assert result.returncode == 2
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


def test_a_folder_and_special_tokens_may_have_braces(tmp_path: Path) -> None:
    folder = tmp_path / "{folder}"
    folder.mkdir()
    make_workspace(folder)
    tokenizer = {"vocab_size": 500, "special_tokens": ["<{x}>"]}
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "tokenizer": tokenizer}))
    assert jobs(snakemake(folder, "-n", *MINE, "all"))["report"] == 1


@pytest.mark.parametrize(
    ("split", "sets", "use"),
    [
        ("95,5,0", "", "evaluation uses the split valid"),
        ("98,1,1", "train=0:0.9 hard=0.9:1", "evaluation uses the split hard"),
        ("98,1,1", "train=0:0.8 hard=0.8:0.9 valid=0.9:1", "evaluation uses the split valid"),
        ("100,0,0", "", "there is no evaluation"),
    ],
)
def test_a_run_without_a_test_split_says_what_it_is_evaluated_on(
    tmp_path: Path, split: str, sets: str, use: str
) -> None:
    make_workspace(tmp_path)
    steps = int(split != "100,0,0")
    settings = {**CONFIG["train"], "split": split, "evaluation_steps": steps}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "train": settings}))
    table = "corpus\tfiles\tweight\tsets\n" + "".join(
        f"{name}\tresults/raw/{name}/*\t1\t{sets}\n" for name in ("code", "docs")
    )
    (tmp_path / "corpora.tsv").write_text(table)
    result = snakemake(tmp_path, "-n", *MINE, "evaluate")
    assert jobs(result)["evaluate"] == 1
    assert f"tokamake: run smoke: no test split: {use}\n" in result.stderr
    assert ("smoke.weights.hard.txt" in result.stdout + result.stderr) == bool(sets)
