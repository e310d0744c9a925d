"""A user's mistakes: the dry run fails with one line that states the remedy."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.workflows import CONFIG, CORPORA, MINE, jobs, make_workspace, snakemake

MISTAKES = {
    "unknown key": ({"trian": {}}, CORPORA, "my.yaml: trian: unknown key; did you mean train?"),
    "missing evaluation set": (
        {"tokenize": {"filters": [{"decontaminate": {"files": {"set": "gone.jsonl"}}}]}},
        CORPORA,
        "corpus code: filters: decontaminate: gone.jsonl: no such file; fix the list of files",
    ),
    "no evaluation task": (
        {"tokenize": {"filters": ["decontaminate"]}},
        CORPORA,
        "corpus code: decontaminate: evaluate.tasks is empty; name evaluation sets in files",
    ),
    "missing file": (
        {},
        CORPORA.replace("results/raw/docs/*", "none/*.jsonl"),
        "corpora.tsv:3: files: none/*.jsonl: no file matches; fix the column, whose paths start",
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


def test_a_key_that_is_twice_in_the_config_fails_with_its_lines(tmp_path: Path) -> None:
    config = make_workspace(tmp_path) / "my.yaml"
    config.write_text(config.read_text() + "run: two\n")
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode == 2
    (message,) = errors(result)
    last = len(config.read_text().splitlines())
    assert message.startswith(f"tokamake: my.yaml:{last}: run: is in line ")


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


def test_an_unknown_target_fails_with_one_line(tmp_path: Path) -> None:
    result = snakemake(make_workspace(tmp_path), "-n", *MINE, "tarin")
    assert result.returncode == 2
    (message,) = errors(result)
    expected = "no rule has this name or writes this file; did you mean train?"
    assert message == f"tokamake: tarin: {expected}"


def test_a_folder_that_cannot_be_written_fails_the_dry_run_with_one_line(tmp_path: Path) -> None:
    (make_workspace(tmp_path) / "results").symlink_to("scratch")
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode == 2
    (message,) = errors(result)
    assert message.startswith("tokamake: results: a link to scratch, which does not exist; make")


def test_a_folder_and_special_tokens_may_have_braces(tmp_path: Path) -> None:
    folder = tmp_path / "{folder}"
    folder.mkdir()
    make_workspace(folder)
    tokenizer = {"vocab_size": 500, "special_tokens": ["<{x}>"]}
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "tokenizer": tokenizer}))
    assert jobs(snakemake(folder, "-n", *MINE, "all"))["report"] == 1


def test_a_run_without_a_test_split_says_what_it_is_evaluated_on(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    settings = {**CONFIG["train"], "split": "98,1,1", "evaluation_steps": 1}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "train": settings}))
    table = "corpus\tfiles\tweight\tsets\n" + "".join(
        f"{name}\tresults/raw/{name}/*\t1\ttrain=0:0.9 hard=0.9:1\n" for name in ("code", "docs")
    )
    (tmp_path / "corpora.tsv").write_text(table)
    result = snakemake(tmp_path, "-n", *MINE, "evaluate")
    assert jobs(result)["evaluate"] == 1
    line = "tokamake: run smoke: no test split: evaluation uses the split hard\n"
    assert line in result.stderr
    assert "smoke.weights.hard.txt" in result.stdout + result.stderr
