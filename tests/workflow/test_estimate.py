"""`tokamake estimate`, and the end of a dry run, against a workflow that is built."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.allocated_memory import peak
from tests.support.ranks import spawn
from tests.support.workflows import (
    ARCHITECTURE,
    CONFIG,
    MINE,
    make_workspace,
    snakemake,
    snakemake_alone,
)
from tokamake.config.resolved_run import read_run
from tokamake.errors import UserError
from tokamake.estimate.parameters import stage_sizes
from tokamake.train.memory import estimate as estimate_memory
from tokamake.train.numerics import with_precision
from tokamake.workflow.estimate import estimate

GPU = ("train.precision=bf16", "train.parallel.tensor_parallel_size=2")


def estimated(capsys: pytest.CaptureFixture[str], *settings: str, **options: Any) -> Any:
    """The estimate of my.yaml as JSON."""
    capsys.readouterr()
    estimate(Path("my.yaml"), *settings, as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def size(folder: Path, pattern: str = "**/*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


def test_an_estimate_is_close_to_what_is_built(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)
    results = finished / "results"
    metadata = json.loads((results / "data/metadata.json").read_text())
    truth = {
        corpus: sum(each["total_num_tokens"] for each in metadata if each["corpus"] == corpus)
        for corpus in ("code", "docs")
    }
    sizes = {name: size(results / "data" / name) for name in ("shards", "merged")}
    checkpoints = size(results / "smoke/training", "global_step*/*.distcp")
    built = estimated(capsys)
    assert {each["source"] for each in built["data"]["corpora"]} == {"built"}
    assert built["needed_bytes"] < 0.05 * checkpoints  # a training again replaces them
    for path in ("data", "smoke"):  # raw files and the tokenizer stay
        shutil.rmtree(results / path)
    before = estimated(capsys)
    for corpus in before["data"]["corpora"]:
        assert corpus["source"] == "counted"
        assert corpus["tokens"] == truth[corpus["corpus"]]
    data, run = before["data"], before["runs"][0]
    built_bytes = sum(sizes.values())
    assert before["needed_bytes"] == pytest.approx(built_bytes + checkpoints, rel=0.05)
    assert data["shards_bytes"] == pytest.approx(sizes["shards"], rel=0.05)
    assert data["merged_bytes"] == pytest.approx(sizes["merged"], rel=0.05)
    assert run["checkpoints"] * run["checkpoint_bytes"] == pytest.approx(checkpoints, rel=0.05)
    assert (data["shards"], data["tokenize_jobs"], data["merged"], data["merge_jobs"]) == (
        6,
        6,
        4,
        4,
    )
    assert run["steps"] == 40
    assert run["tokens"] == 40 * 16 * 32
    for corpus, share in (("code", 2 / 3), ("docs", 1 / 3)):
        assert run["epochs"][corpus] == pytest.approx(
            share * run["tokens"] / (0.8 * truth[corpus]), rel=0.01
        )
    log = (finished / "logs/smoke/train.log").read_text()
    stated = f"at most about {run['memory']['total'] / 1e6:.1f} MB a rank"
    assert stated in log  # the trainer counts parameters on modules
    sampled = estimated(capsys, sample_megabytes=0)
    assert {each["source"] for each in sampled["data"]["corpora"]} == {"assumed"}


def test_the_text_has_a_line_for_each_fact(
    workspace_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("my.yaml")
    estimate(path, *GPU, device="a100-80gb", price_per_node_hour=20, mfu=0.5)
    printed = capsys.readouterr().out
    assert workspace_here == Path.cwd()
    titles = ("data", "disk", "model", "training", "epochs", "checkpoints", "memory", "compute")
    lines = {line.split()[0]: line for line in printed.splitlines() if line}
    assert {*titles, "time", "price"} <= lines.keys()
    assert "6 shards in 6 jobs, 4 merged files in 4 jobs" in lines["data"]
    assert "assumed from file sizes" in lines["code"]
    assert lines["code"].split()[2:4] == ["?", "?"]  # sample_corpus makes the files
    assert "2 ranks of a100-80gb, if training reaches 50%" in lines["time"]
    assert "at 20 a node-hour" in lines["price"]
    estimate(path)
    assert "1 node, 2 ranks: give --device for the time" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"train: not a setting; write SECTION\.KEY=VALUE"):
        estimate(path, "train")
    with pytest.raises(UserError, match="--suggest: the profile states no device"):
        estimate(path, suggest=True)
    estimate(path, *GPU, device="h100-80gb", nodes=4, suggest=True)
    assert "8 ranks of h100-80gb on 4 nodes" in capsys.readouterr().out
    found = estimated(capsys, *GPU, device="h100-80gb", nodes=4, suggest=True)
    assert found["smoke"][0]["settings"]["micro_batch_size"] >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mfu": 0}, "--mfu 0: give a share of the peak"),
        ({"nodes": 0}, "--nodes 0: give at least 1 node"),
        ({"nodes": -1}, "--nodes -1: give at least 1 node"),
        ({"sample_megabytes": -1}, "--sample-megabytes -1: give at least 0"),
        ({"price_per_node_hour": -2.0}, "--price-per-node-hour -2: give a price"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        estimate(Path("my.yaml"), **options)


def test_layouts_need_no_data(workspace_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace_here / "corpora.tsv").write_text("corpus\tfiles\ntext\tnot/here/*.jsonl\n")
    config = {name: value for name, value in CONFIG.items() if name != "sample_corpus"}
    (workspace_here / "my.yaml").write_text(yaml.safe_dump({**config, "corpora": "corpora.tsv"}))
    found = estimated(capsys, *GPU, device="h100-80gb", suggest=True)
    assert found["smoke"][0]["settings"]["micro_batch_size"] >= 1


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (["train.train_steps=5000"], "epochs: code 1"),
        (["train.global_batch_size=6", "train.micro_batch_size=2"], "cannot be shared by 2 data"),
        (["model.architecture=config/models/llama2-70b.yaml"], "disk of"),
        (["model.architecture=config/models/llama2-70b.yaml"], "and a100-80gb has 80 GB"),
        (["model.architecture=config/models/llama2-70b.yaml"], "it would end before it saves"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_warnings(
    workspace_here: Path,
    settings: list[str],
    warning: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert workspace_here.is_dir()
    steps = ["train.sequence_length=64", "train.save_interval=100000", "train.precision=bf16"]
    if not any(each.startswith("train.train_steps") for each in settings):
        steps.append("train.train_steps=100000")
    found = estimated(capsys, *settings, *steps, device="a100-80gb")
    assert any(warning in text for text in found["warnings"]), found["warnings"]


def test_epochs_of_the_table_and_splits_without_documents(
    workspace_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = workspace_here / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": f"{n} 5 7 9"}) + "\n" for n in range(20)))
    table = "corpus\tfiles\ttext_key\tepochs\nnumbers\traw.jsonl\ttext\t2\n"
    (workspace_here / "corpora.tsv").write_text(table)
    train = {**CONFIG["train"], "split": "98,1,1", "train_steps": 40}
    config = {
        **CONFIG,
        "sample_corpus": {},
        "train": train,
        "tokenizer": {"kind": "ids", "vocab_size": 500},
    }
    del config["generate"]
    (workspace_here / "my.yaml").write_text(yaml.safe_dump(config))
    found = estimated(capsys)
    assert found["data"]["corpora"][0]["tokens"] == 80
    stated = [text for text in found["warnings"] if "the table states 2" in text]
    assert len(stated) == 1
    assert sum("would have no document" in text for text in found["warnings"]) == 2
    planned = snakemake(workspace_here, "-n", *MINE, "data")
    assert "count_ids" in planned.stdout, planned.stdout + planned.stderr
    assert "train_tokenizer" not in planned.stdout


def test_a_dry_run_ends_with_the_estimate(workspace_here: Path, built: Path) -> None:
    result = snakemake(workspace_here, "-n", *MINE, "train")
    assert result.returncode == 0
    lines = (result.stdout + result.stderr).splitlines()
    last = [line for line in lines if line.startswith("estimate: ")]
    assert lines[-len(last) :] == last
    assert last[0].startswith("estimate: run smoke: 50.6 k parameters, 40 steps, 20.5 k tokens (")
    assert "a rank" in last[0]
    assert last[1].startswith("estimate: disk: about ")
    done = snakemake(built, "-n", *MINE, "train")
    assert "estimate: " not in done.stdout + done.stderr  # nothing is to be trained


REAL = {
    "llama": (
        {"vocab_size": 2000},
        {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6},
        {},
    ),
    "gpt": (
        {"vocab_size": 1000},
        {"family": "gpt", "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 256},
        {"recompute_granularity": "full"},
    ),
    "qwen3": (
        {"vocab_size": 4000},
        {"family": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
        {"optimizer": {"name": "lion", "learning_rate": 1e-3}},
    ),
}
"""Name → settings of tokenizer, architecture and training that differ from the test's workspace."""


@pytest.mark.grid
@pytest.mark.parametrize("name", REAL)
def test_estimates_hold_for_real_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tokens of a sample within 2 %, disk within 5 %, memory within 10 % of the measured peak."""
    tokenizer, shape, train = REAL[name]
    folder = make_workspace(tmp_path)
    sample = {"code": {"num_files": 4, "file_bytes": 600_000}}
    sizes = {"sequence_length": 64, "micro_batch_size": 16, "global_batch_size": 16}
    sizes |= {"train_steps": 6, "save_interval": 3, "evaluation_interval": 6}
    config = {
        **CONFIG,
        "sample_corpus": sample | {"docs": {"num_files": 2, "file_bytes": 400_000}},
        "tokenizer": tokenizer,
        "plan": {"shard_bytes": 400_000, "merged_bytes": 600_000},
        "train": {**CONFIG["train"], **sizes, **train},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    (folder / "architecture.yaml").write_text(yaml.safe_dump({**ARCHITECTURE, **shape}))
    monkeypatch.chdir(folder)
    assert snakemake(folder, *MINE, "results/tokenizer/tokenizer.json").returncode == 0
    found = estimated(capsys, sample_megabytes=1, nodes=1)
    assert snakemake_alone(folder, *MINE, "train").returncode == 0
    metadata = json.loads((folder / "results/data/metadata.json").read_text())
    tokens = sum(each["total_num_tokens"] for each in metadata)
    data = found["data"]
    assert any(each["source"] == "sampled" for each in data["corpora"])
    assert sum(each["tokens"] for each in data["corpora"]) == pytest.approx(tokens, rel=0.02)
    results = folder / "results"
    assert data["shards_bytes"] == pytest.approx(size(results / "data/shards"), rel=0.05)
    assert data["merged_bytes"] == pytest.approx(size(results / "data/merged"), rel=0.05)
    resolved = with_precision(read_run(results / "smoke/run.yaml"), torch.device("cpu"))
    alone = estimate_memory(resolved, 1, "cpu", stages=stage_sizes).total
    assert alone == pytest.approx(spawn(peak, 1, resolved, tmp_path)[0], rel=0.1)
