"""The dry run refuses objectives that do not fit data, tokenizer or model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.support.workflow_configs import make_tokenizer, read_config, train, wildcards
from tests.support.workflows import CONFIG, MINE, jobs, make_workspace, snakemake
from tokamake.data.samples.index import index
from tokamake.data.samples.loader import open_samples
from tokamake.errors import UserError
from tokamake.preflight import model
from tokamake.workflow.preflight import Preflight
from tokamake.workflow.samples import SampleRules

SMOKE = wildcards(run="smoke")
SENTENCES = {"split_sentences": True, "append_eod": False}
WORDPIECE = {"kind": "wordpiece", "vocab_size": 500}


@pytest.fixture
def _encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family learns every objective."""
    every = ("causal", "ict", "masked", "span_corruption")
    monkeypatch.setattr(model, "objectives", lambda _: every)


def check(**sections: Any) -> None:
    config = read_config(**sections)
    snakemake: Any = SimpleNamespace(
        rule_resources=lambda _: {},
        default_resource=lambda _: None,
        launch="",
        is_main_process=True,
        uses_conda=False,
    )
    assert Preflight(config, snakemake).index(SMOKE, []) == []


@pytest.mark.usefixtures("workspace_here", "_encoders")
@pytest.mark.parametrize(
    ("objective", "tokenize", "tokenizer", "message"),
    [
        ("causal", SENTENCES, WORDPIECE, "tokenize.split_sentences: true: objective causal would"),
        ("masked", {}, WORDPIECE, "train.objective: masked: needs sentences; set tokenize.split_"),
        (
            "masked",
            {"split_sentences": True},
            WORDPIECE,
            "tokenize.append_eod: true: samples of objective masked have separators of their own",
        ),
        ("masked", SENTENCES, {}, "tokenizer.kind: bpe: objective masked masks whole words, which"),
        (
            "span_corruption",
            SENTENCES,
            WORDPIECE,
            "tokenizer.sentinels: 0: objective span_corruption replaces spans by sentinels; set it",
        ),
        (
            "ict",
            SENTENCES,
            WORDPIECE,
            "tokenize.empty_documents: skip: objective ict pairs each document with its",
        ),
        (
            "ict",
            {**SENTENCES, "empty_documents": "keep"},
            WORDPIECE,
            "corpora.tsv:2: text_key: text: has no titles, which objective ict puts before each",
        ),
        ("masked", SENTENCES, WORDPIECE, ""),
        ("span_corruption", SENTENCES, {**WORDPIECE, "sentinels": 100}, ""),
        ("causal", {}, {}, ""),
    ],
)
def test_objectives_are_checked_before_any_job(
    objective: str,
    tokenize: dict[str, Any],
    tokenizer: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sections = {
        "train": train(objective=objective),
        "tokenize": tokenize,
        "tokenizer": {**dict(CONFIG["tokenizer"]), **tokenizer},  # type: ignore[call-overload]
    }
    if not message:
        check(**sections)
        return
    with pytest.raises(SystemExit):
        check(**sections)
    assert capsys.readouterr().err.startswith(f"tokamake: run smoke: {message}")


PAIRED = {**SENTENCES, "empty_documents": "keep"}
INDEXED = "corpus\tfiles\tformat\ttext_key\tweight\nold\told\tindexed\t{}\t1\n"


@pytest.mark.usefixtures("workspace_here", "_encoders")
def test_texts_and_titles_are_paired_before_any_job(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(table: str, *, titles: str, text: str = "text") -> str:
        section = {"titles": titles, "text": text}
        with pytest.raises(SystemExit):
            check(
                table=table,
                train=train(objective="ict", ict=section),
                tokenize=PAIRED,
                tokenizer={"path": "tokenizer"},
            )
        return capsys.readouterr().err.removeprefix("tokamake: run smoke: ")

    make_tokenizer("tokenizer")
    Path("raw.jsonl").write_text('{"text": "A. B. C.", "src": "a"}\n' * 3)
    table = "corpus\tfiles\ttext_key\tweight\nold\traw.jsonl\ttext,src\t1\n"
    assert refused(table, titles="text", text="src").startswith(
        "raw.jsonl: text is longer than src in the first documents: set train.ict.text to the key"
    )
    Path("old").mkdir()
    for name, number in (("text_sentence", 3), ("title_document", 2)):
        write_documents(Path(f"old/wiki_{name}"), number)
    assert refused(INDEXED.format("text,title"), titles="title").startswith(
        "old/wiki_title_document: 2 documents, but old/wiki_text_sentence has 3: titles do not"
    )
    assert refused(INDEXED.format(""), titles="title").startswith(
        "corpora.tsv:2: text_key: text: has no titles, which objective ict puts before each block"
    )
    write_documents(Path("old/wiki_title_document"), 3)
    check(
        table=INDEXED.format("text,title"),
        train=train(objective="ict"),
        tokenize=PAIRED,
        tokenizer={"path": "tokenizer"},
    )


def write_documents(prefix: Path, number: int) -> None:
    """A dataset of documents of two sentences, as megatron-core writes it."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(number):
        builder.add_document(torch.tensor([7, 8, 9]), [2, 1])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.usefixtures("workspace_here")
def test_a_family_learns_its_own_objectives() -> None:
    with pytest.raises(UserError) as caught:
        check(train=train(objective="masked"), tokenize=SENTENCES)
    assert str(caught.value).startswith(
        "my.yaml: train.objective: masked: family llama learns causal; set it to causal"
    )


@pytest.mark.usefixtures("workspace_here", "_encoders")
def test_index_gets_the_objective_and_the_tokenizer_of_runs() -> None:
    causal = SampleRules(read_config())
    assert causal.objective_options(SMOKE) == []
    assert causal.objective_tokenizer(SMOKE) == []
    masking = {"probability": 0.2}
    sections = {"train": train(objective="masked", masking=masking), "tokenize": SENTENCES}
    config = read_config(**sections, tokenizer={**WORDPIECE, "sentinels": 3})
    rules = SampleRules(config)
    objective, stated, tokenizer = rules.objective_options(SMOKE)
    assert objective == "--objective=masked"
    assert json.loads(stated.removeprefix("--masking="))["probability"] == 0.2
    assert tokenizer == "--tokenizer=results/extended_tokenizer/tokenizer.json"
    assert rules.objective_tokenizer(SMOKE) == config.run_tokenizer_files
    # Data are tokenized without sentinels.
    assert config.tokenizer_files[0] == "results/tokenizer/tokenizer.json"


def test_sentences_are_refused_for_a_run_but_not_for_its_data(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path)
    sections = {"tokenize": SENTENCES, "tokenizer": {"kind": "wordpiece", "vocab_size": 500}}
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, **sections}))
    for target in ("train", "all"):
        refused = snakemake(folder, "-n", *MINE, target)
        assert refused.returncode == 2
        lines = [line for line in refused.stderr.splitlines() if line.startswith("tokamake: ")]
        assert lines == [
            "tokamake: run smoke: tokenize.split_sentences: true: objective causal would be "
            "trained on shuffled sentences; set train.objective to ict, masked or span_corruption, "
            "or split_sentences to false"
        ]
    assert jobs(snakemake(folder, "-n", *MINE, "data"))["tokenize"] > 1


@pytest.mark.grid
@pytest.mark.slow
def test_the_workflow_extends_the_tokenizer_and_indexes_samples(tmp_path: Path) -> None:
    """The dry run would refuse the family of the test's model, so the jobs are asked for alone."""
    folder = make_workspace(tmp_path)
    sections = {
        "tokenize": SENTENCES,
        "tokenizer": {**WORDPIECE, "sentinels": 100},
        "train": train(),
    }
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, **sections}))
    extended = "results/extended_tokenizer/tokenizer.json"
    result = snakemake(folder, *MINE, extended, "data")
    assert result.returncode == 0, result.stdout + result.stderr
    vocabulary = json.loads((folder / extended).read_text())["added_tokens"]
    assert vocabulary[-1]["content"] == "<extra_id_99>"
    output = folder / "index"
    index(
        weights=folder / "results/data/smoke.weights.txt",
        data_root=folder / "results/data",
        sequence_length=64,
        train_samples=100,
        valid_samples=0,
        split="90,10,0",
        objective="span_corruption",
        tokenizer=folder / extended,
        seed=1,
        output=output,
    )
    samples = open_samples(output, split="train", data_root=folder / "results/data")
    assert len(samples) >= 100
    assert samples[0]["labels"].max() >= 502
