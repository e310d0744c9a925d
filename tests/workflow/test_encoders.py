"""From raw text to a pretrained BERT that transformers reads, with one command."""

import json
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from tests.support.workflow_configs import train
from tests.support.workflows import ARCHITECTURE, CONFIG, MINE, make_workspace, snakemake

SECTIONS = {
    "tokenizer": {"kind": "wordpiece", "vocab_size": 500},
    "tokenize": {"split_sentences": True, "append_eod": False},
    "train": train(objective="masked", sequence_length=64, train_steps=12, evaluation_interval=6),
}


def make_encoder_workspace(folder: Path) -> Path:
    make_workspace(folder)
    architecture = {**ARCHITECTURE, "family": "bert", "num_key_value_heads": 4}
    (folder / "architecture.yaml").write_text(yaml.safe_dump(architecture))
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, **SECTIONS}))
    return folder


def test_the_dry_run_refuses_what_needs_the_next_token(tmp_path: Path) -> None:
    folder = make_encoder_workspace(tmp_path)
    for target in ("evaluate", "generate", "report"):
        refused = snakemake(folder, "-n", *MINE, target)
        assert refused.returncode == 2
        assert "tokamake: run smoke: train.objective: masked: evaluate, " in refused.stderr
    assert snakemake(folder, "-n", *MINE, "train").returncode == 0


@pytest.mark.grid
@pytest.mark.slow
def test_raw_text_becomes_a_bert(tmp_path: Path) -> None:
    folder = make_encoder_workspace(tmp_path)
    result = snakemake(folder, *MINE, "train", "export_hf")
    assert result.returncode == 0, result.stdout + result.stderr
    metrics = (folder / "results/smoke/training/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in metrics]
    losses = [record["token_loss"] for record in records if "token_loss" in record]
    assert losses[-1] < losses[0] - 0.1
    assert any("validation_loss" in record for record in records)

    export = folder / "results/smoke/export"
    model = transformers.MegatronBertForPreTraining.from_pretrained(export).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    inputs = tokenizer("The list of words.", "It returns a value.", return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    assert output.prediction_logits.isfinite().all()
    assert output.seq_relationship_logits.shape == (1, 2)
