"""Documents of bad steps on the page: corpus, file and line, beginning; a form for other steps."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.report_pages import after, shown
from tokamake.data.tokenize.tokenize import tokenize

TEXTS = ["First <text>.", "A second one.", "كان يا ما كان"]


@pytest.fixture
def spiked(results: Path, sampled: Path) -> Path:
    """A results folder whose run had a spike at step 20, with documents of a dataset."""
    raw = results.parent / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prefix = results / "data/merged/code-0000"
    prefix.parent.mkdir()
    tokenize((str(raw),), output=prefix, tokenizer=sampled / "tokenizer")
    run = yaml.safe_load((results / "trial/run.yaml").read_text())
    changed = {**run, "tokenizer": str(sampled / "tokenizer"), "data_root": str(results / "data")}
    (results / "trial/run.yaml").write_text(yaml.safe_dump(changed))
    documents = {"merged/code-0000": [0, 2], "merged/gone": [7]}
    event = {"step": 20, "case": "spike", "reason": "loss 9 is high", "action": "journal"}
    lines = [{**event, "documents": documents, "grad_norm": 4.0}, {**event, "step": 30}]
    path = results / "trial/training/events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return results


def test_a_bad_step_has_its_documents(spiked: Path) -> None:
    texts = shown(spiked).sections["curves"]
    raw = spiked.parent / "raw.jsonl"
    title = "trial, step 20: 3 documents; loss 9 is high"
    assert after(texts, title, 9)[3:] == [
        *("code", f"{raw}: line 1", "First <text>.<|endoftext|>"),
        *("code", f"{raw}: line 3", "كان يا ما كان<|endoftext|>"),
    ]
    assert after(texts, title, 11)[9:] == ["gone", "document 7 of merged/gone"]
    assert not any("step 30:" in text for text in texts)  # its documents are not known


def test_any_step_has_a_command(results: Path) -> None:
    page = shown(results)
    assert "Documents of a step" in page.sections["curves"]
    (form,) = [values for tag, values in page.attributes if tag == "form"]
    assert form["class"] == "trace"
    values = [values["value"] for tag, values in page.attributes if tag == "option"]
    assert values == [str(results / "trial/run.yaml")]
