"""Neighbors of objective retro: jobs of the workflow, which other objectives do not have."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.neighbors import RetroData
from tests.support.workflow_configs import read_config, train, wildcards
from tests.support.workflows import ARCHITECTURE, CONFIG, jobs, make_workspace, snakemake_alone
from tokamake.errors import UserError
from tokamake.preflight.planned import WorkflowConfig
from tokamake.retrieval.chunk_tables import write_table
from tokamake.workflow.retro import RULES, RetroRules

SECTION = {"embedder": "bert", "chunk_length": 16, "num_found": 30, "num_kept": 4}
SHAPE = {
    **ARCHITECTURE,
    "family": "retro",
    "decoder": "llama",
    "chunk_length": 16,
    "num_hidden_layers": 2,
    "first_retrieval_layer": 1,
}
TRAIN: dict[str, Any] = {"objective": "retro", "retro": SECTION, "train_steps": 8}
MINE = ("--configfile", "my.yaml", "--")


@pytest.fixture
def embedder(workspace_here: Path, retro_data: RetroData) -> Path:
    """A folder with an architecture of Retro and a BERT, which is the current one."""
    shutil.copytree(retro_data.bert, "bert")
    Path("architecture.yaml").write_text(yaml.safe_dump(SHAPE))
    return workspace_here


def read(**retro: Any) -> WorkflowConfig:
    return read_config(train=train(**TRAIN | {"retro": {**SECTION, **retro}}))


def test_files_of_a_run(embedder: Path) -> None:
    config = read(factory="IVF8,Flat", nprobe=4, neighbors=3)
    rules, of_run = RetroRules(config), wildcards(run="smoke")
    rules.check()
    assert (rules.names, rules.chunk_lengths) == (["smoke"], ["16"])
    assert rules.splits == ["train", "valid"]
    (name,) = rules.embedders
    folder = "results/data/chunks/16"
    assert rules.table_folder(of_run) == folder
    assert rules.vector_folder(of_run) == f"{folder}/{name}"
    assert rules.tables(of_run) == [f"{folder}/{each}.json" for each in config.merged]
    assert rules.embedded(of_run) == [f"{folder}/{name}/{each}.done" for each in config.merged]
    assert rules.neighbors(of_run) == [
        f"results/smoke/neighbors/{split}/{each}.json"
        for split in ("train", "valid")
        for each in config.merged
    ]
    assert rules.index_options(of_run) == [
        *("--num-found=30", "--factory=IVF8,Flat", "--train-vectors=0", "--seed=1234"),
    ]
    assert rules.search_options(of_run) == [
        *("--num-found=30", "--num-kept=4", "--nprobe=4", "--ef-search=0"),
    ]
    of_dataset = wildcards(chunk_length="16", embedder=name, dataset="docs-0000_text_document")
    assert rules.prefix(of_dataset) == "results/data/merged/docs-0000_text_document"
    assert rules.vectors(of_dataset) == f"{folder}/{name}/docs-0000_text_document"
    assert Path("bert/config.json") in map(Path, rules.embedder_files(of_dataset))
    assert rules.embedder_options(of_dataset) == ["--checkpoint=bert"]
    assert rules.batch_size(of_dataset, None) == 64
    outputs = rules.outputs_for_all_runs(["results/{run}/neighbors/{split}/{dataset}.json"])
    assert {*outputs} == {*rules.neighbors(of_run)}


def test_a_run_without_validation_has_neighbors_of_training_samples_alone(embedder: Path) -> None:
    config = read_config(train=train(**TRAIN, evaluation_steps=0))
    assert RetroRules(config).splits == ["train"]


def test_other_objectives_have_no_neighbors(workspace_here: Path) -> None:
    rules = RetroRules(read_config())
    rules.check()
    assert not rules.names
    assert not rules.neighbors(wildcards(run="smoke"))


@pytest.mark.parametrize(
    ("embedder", "message"),
    [
        (None, r"my.yaml: train.retro.embedder: empty; name a BERT or a biencoder, in any format"),
        ("nowhere", r"my.yaml: train.retro.embedder: .*nowhere"),
    ],
)
def test_a_missing_embedder_is_refused(
    workspace_here: Path, embedder: str | None, message: str
) -> None:
    Path("architecture.yaml").write_text(yaml.safe_dump(SHAPE))
    with pytest.raises(UserError, match=message):
        RetroRules(read(embedder=embedder)).check()


def test_a_tokenizer_that_does_not_fit_the_embedder_is_refused(
    embedder: Path, retro_data: RetroData
) -> None:
    for path, message in (
        ("nowhere", r"tokenizer nowhere: no such file or folder"),
        (retro_data.tokenizer, r"no WordPiece tokenizer"),
    ):
        with pytest.raises(UserError, match=rf"train.retro.embedder_tokenizer: .*{message}"):
            RetroRules(read(embedder_tokenizer=str(path))).check()
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        Path("bert", name).unlink(missing_ok=True)
    message = r"train.retro.embedder_tokenizer: bert: has no tokenizer; name one with this setting$"
    with pytest.raises(UserError, match=message):
        RetroRules(read()).check()


@pytest.mark.parametrize(
    ("retro", "message"),
    [
        ({"chunk_length": 12}, r"sequence_length: 32: not a multiple of retro.chunk_length 12"),
        ({"chunk_length": 8}, r"train.retro.chunk_length: 8: the model has chunks of 16 tokens"),
        ({"neighbors": 5}, r"retro.neighbors: 5: more than retro.num_kept 4"),
        ({"num_kept": 31}, r"retro.num_kept: 31: more than retro.num_found 30"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    embedder: Path, retro: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_config(train=train(**TRAIN | {"retro": SECTION | retro}), is_main_process=True)


@pytest.mark.extra("retrieval", "faiss")
@pytest.mark.parametrize(
    ("retro", "message"),
    [
        ({"factory": "Flatt"}, r"my.yaml: train.retro.factory: 'Flatt': not an index of FAISS"),
        ({"factory": "PQ5"}, r"train.retro.factory: 'PQ5': .* for vectors of dimension 32"),
        ({"nprobe": 4}, r"train.retro.nprobe: an index Flat has no nprobe; leave"),
        (
            {"factory": "IVF8,Flat", "train_vectors": 7},
            r"train.retro.train_vectors: 7: fewer than the 8 centroids of IVF8,Flat; raise it",
        ),
        ({"factory": "IVF8,Flat", "nprobe": 4}, ""),
    ],
)
def test_an_index_that_faiss_does_not_know_is_refused(
    embedder: Path, retro: dict[str, Any], message: str
) -> None:
    rules = RetroRules(read(**retro))
    if not message:
        rules.check_index("smoke")
        return
    with pytest.raises(UserError, match=message):
        rules.check_index("smoke")


@pytest.mark.extra("retrieval", "faiss")
def test_too_few_chunks_on_disk_are_reported(
    embedder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = RetroRules(read(num_found=30))
    tables = [Path(path) for path in rules.tables(wildcards(run="smoke"))]
    tables[0].parent.mkdir(parents=True)
    for number, path in enumerate(tables):
        assert not capsys.readouterr().err
        facts = {"dataset": {}, "chunk_length": 16, "eod": 0, "request": ""}
        write_table(path, np.array([0, 3 + number]), facts=facts)
        rules.check_index("smoke")
    assert capsys.readouterr().err == (
        "tokamake: run smoke: train.retro.num_found: 30: needs 30 chunks, 18 exist so far; change "
        "it, or add documents\n"
    )


@pytest.fixture
def workspace(tmp_path: Path, sampled: Path, retro_data: RetroData) -> Path:
    folder = make_workspace(tmp_path)
    shutil.copytree(retro_data.bert, folder / "bert")
    shutil.copytree(sampled / "raw", folder / "results/raw")
    (folder / "architecture.yaml").write_text(yaml.safe_dump(SHAPE))
    shutil.copytree(retro_data.tokenizer, folder / "tokenizer")
    config = {**CONFIG, "tokenizer": {"path": "tokenizer"}, "train": train(**TRAIN)}
    del config["sample_corpus"]
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.slow
@pytest.mark.extra("retrieval", "faiss")
def test_from_raw_text_to_a_report_and_a_changed_corpus(workspace: Path) -> None:
    planned = jobs(snakemake_alone(workspace, "-n", *MINE, "train"))
    assert {name: planned[name] for name in RULES} == {
        "chunk_documents": 4,
        "embed_chunks": 4,
        "embed_samples": 8,
        "index_chunks": 1,
        "find_neighbors": 8,
    }
    built = snakemake_alone(workspace, *MINE, "report")
    assert built.returncode == 0, built.stderr
    run = workspace / "results/smoke"
    evaluation = json.loads((run / "evaluate.json").read_text())
    assert evaluation["overall"]["loss"] < 6.5  # ln 400 = 6, for random guesses
    for name in ("evaluate", "generate"):
        assert "without neighbors" not in (workspace / f"logs/smoke/{name}.log").read_text()
    assert json.loads((run / "samples.json").read_text())
    assert "--chunks neighbors/chunks.json" in (run / "export/README.md").read_text()
    assert "Held-out documents" in (workspace / "results/report.html").read_text()
    folder = run / "neighbors"
    assert np.load(folder / "train/docs-0000_text_document.npy").shape[1:] == (2, 4)

    # Evaluation and generation depend on how neighbors are found, also where nothing is trained.
    alone = ("-n", "--allowed-rules", "evaluate", "generate", *MINE, "evaluate", "generate")
    assert jobs(snakemake_alone(workspace, *alone)) == {}
    config = yaml.safe_load((workspace / "my.yaml").read_text())
    config["train"]["on_change"] = "restart"
    config["train"]["retro"]["neighbors"] = 1
    (workspace / "my.yaml").write_text(yaml.safe_dump(config))
    assert jobs(snakemake_alone(workspace, *alone)) == {"evaluate": 1, "generate": 1}

    # A changed corpus: chunks and vectors of the other one stay.
    raw = workspace / "results/raw/docs/docs-00.jsonl"
    raw.write_text("".join(raw.read_text().splitlines(keepends=True)[:-3]))
    replaced = ("--config", "replace_data=true")
    again = snakemake_alone(workspace, "-n", *replaced, *MINE, "find_neighbors")
    planned = jobs(again)
    assert {name: planned[name] for name in RULES} == {
        "chunk_documents": 1,
        "embed_chunks": 1,
        "embed_samples": 8,
        "index_chunks": 1,
        "find_neighbors": 8,
    }
    assert "chunks/16/docs-0000_text_document.json" in again.stdout + again.stderr
