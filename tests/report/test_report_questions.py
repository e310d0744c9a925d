"""Questions that a person asks about a finished run: each answer stands on the page as text."""

import json
import re
from pathlib import Path

import pytest

from tests.support.finished_run import make_results
from tests.support.report_pages import shown
from tokamake.config.data_set import DataSet
from tokamake.status.jobs import DagJob, write_jobs

ANSWERS = {
    "What was built?": (
        r"A llama model with 36\.7 k parameters, trained from random weights on code, a&b\. "
        r"Trained, 50 steps\."
    ),
    "With which recipe?": r"recipe 50 steps of 4 × 64 tokens, adamw, cosine schedule",
    "With which data?": r"code 2 20 6,000 24\.0 kB .* a&b 1 10 2,000 8\.0 kB",
    "How often was each corpus seen?": r"code 4,800 75\.0% – 25\.0% 0\.67 a&b 1,600 .* 6\.00",
    "How good is it?": (
        r"validation loss 3\.2500 nats per token, validation split, step 50 "
        r"perplexity 2\.50 held-out documents of the test split"
    ),
    "How was that measured?": r"Held-out documents .*corpus documents tokens .*overall 3 1,234",
    "How long did it train, and how fast?": r"training time 1 min 05 s 196 tokens/s",
    "What did it cost?": r"node-hours 0\.5 0\.5 of them training",
    "Did it spike?": r"trial 20 spike: loss 9 is high \(journal\)",
    "What does it write?": r"<b> x < y",
    "Which command makes it again, and which serves it?": (
        r"serve the best tokamake serve training/global_step50 .*"
        r"# .*trial/train\.json tokamake train --config run\.yaml"
    ),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All words of the page of a finished run, with one space between them."""
    folder = tmp_path_factory.mktemp("questions")
    results = make_results(folder / "results")
    event = {"step": 20, "case": "spike", "reason": "loss 9 is high", "action": "journal"}
    (results / "trial/training/events.jsonl").write_text(json.dumps(event) + "\n")
    files = {
        "benchmarks/trial/train.tsv": "s\tmax_rss\n1800\t1\n",
        "trial/.made_from/train.json.json": json.dumps(
            {"rule": "train", "shellcmd": "tokamake train --config run.yaml"}
        ),
    }
    for name, content in files.items():
        path = results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        train = DagJob("train", "trial", ["results/trial/train.json"], [], "logs/train.log")
        write_jobs([train], DataSet(), rules=())
        return " ".join(" ".join(shown(Path("results")).texts).split())


@pytest.mark.parametrize("question", ANSWERS)
def test_the_page_answers(text: str, question: str) -> None:
    assert re.search(ANSWERS[question], text), text
