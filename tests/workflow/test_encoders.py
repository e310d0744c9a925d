"""From raw text to a pretrained BERT or T5 that transformers reads, with one command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.support.workflow_configs import train
from tests.support.workflows import ARCHITECTURE, CONFIG, MINE, jobs, make_workspace, snakemake

SECTIONS: dict[str, Any] = {
    "tokenizer": {"kind": "wordpiece", "vocab_size": 500},
    "tokenize": {"split_sentences": True, "append_eod": False},
}
TRAIN = {"sequence_length": 64, "train_steps": 12, "evaluation_interval": 6}
KINDS: dict[str, dict[str, Any]] = {
    "bert": {**SECTIONS, "train": train(objective="masked", **TRAIN)},
    "t5": {
        **SECTIONS,
        "tokenizer": {**SECTIONS["tokenizer"], "sentinels": 20},
        "train": train(objective="span_corruption", **TRAIN),
    },
}
"""Sections of the config by family."""


def make_encoder_workspace(folder: Path, family: str = "bert") -> Path:
    make_workspace(folder)
    architecture = {**ARCHITECTURE, "family": family, "num_key_value_heads": 4}
    (folder / "architecture.yaml").write_text(yaml.safe_dump(architecture))
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, **KINDS[family]}))
    return folder


def test_the_dry_run_refuses_what_needs_the_next_token(tmp_path: Path) -> None:
    folder = make_encoder_workspace(tmp_path)
    for target in ("evaluate", "generate"):
        refused = snakemake(folder, "-n", *MINE, target)
        assert refused.returncode == 2
        assert "tokamake: run smoke: train.objective: masked: evaluate, " in refused.stderr
    planned = jobs(snakemake(folder, "-n", *MINE, "train", "report"))
    assert {name: planned.get(name) for name in ("evaluate", "report")} == {
        "evaluate": None, "report": 1
    }  # fmt: skip


def test_the_dry_run_refuses_stages_of_a_t5(tmp_path: Path) -> None:
    folder = make_encoder_workspace(tmp_path, "t5")
    config = yaml.safe_load((folder / "my.yaml").read_text())
    config["train"]["parallel"] = {"pipeline_parallel_size": 2}
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    refused = snakemake(folder, "-n", *MINE, "train")
    assert refused.returncode == 2
    assert "pipeline_parallel_size: 2: a pipeline passes the states of one stack" in refused.stderr


def trained(folder: Path, key: str) -> Path:
    """The exported folder of a run whose loss has fallen."""
    result = snakemake(folder, *MINE, "train", "export_hf", "report")
    assert result.returncode == 0, result.stdout + result.stderr
    metrics = (folder / "results/smoke/training/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in metrics]
    losses = [record[key] for record in records if key in record]
    assert losses[-1] < losses[0] - 0.1
    validations = [record for record in records if "validation_loss" in record]
    assert all(0 <= record["validation_token_accuracy"] <= 1 for record in validations)
    assert len(validations) > 1
    assert "accuracy" in (folder / "results/report.html").read_text()
    return folder / "results/smoke/export"


@pytest.mark.grid
@pytest.mark.slow
def test_raw_text_becomes_a_bert(tmp_path: Path) -> None:
    export = trained(make_encoder_workspace(tmp_path), "token_loss")
    model = transformers.MegatronBertForPreTraining.from_pretrained(export).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    inputs = tokenizer("The list of words.", "It returns a value.", return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    assert output.prediction_logits.isfinite().all()
    assert output.seq_relationship_logits.shape == (1, 2)


@pytest.mark.grid
@pytest.mark.slow
def test_raw_text_becomes_a_t5(tmp_path: Path) -> None:
    export = trained(make_encoder_workspace(tmp_path, "t5"), "loss")
    model = transformers.BlenderbotForConditionalGeneration.from_pretrained(export).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    start, end = tokenizer.convert_tokens_to_ids(["[BOS]", "[EOS]"])
    assert model.config.decoder_start_token_id == model.generation_config.bos_token_id == start
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end
    text = "The list of <extra_id_0>. It returns a <extra_id_1>."
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    written = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert written[0, 0] == start
    assert written.shape[1] > 1
