"""Texts of the models on the page: over training, side by side, and by name of the run."""

import json
from pathlib import Path

from tests.support.finished_run import make_results
from tests.support.report_pages import after, shown


def write_samples(run: Path, steps: list[int]) -> None:
    lines = [
        {"step": step, "corpus": corpus, "prompt": prompt, "text": f" <{corpus}> {step}"}
        for step in steps
        for corpus, prompt in (("code", "def"), ("arabic", "كان يا"), ("", "My own"))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "training/samples.jsonl").write_text(text)


def test_prompts_stand_side_by_side_over_steps(results: Path) -> None:
    write_samples(results / "trial", [10, 20, 30, 40, 50])
    page = shown(results)
    texts = page.sections["samples"]
    assert after(texts, "Prompt from code", 6) == [
        *("def", " <code> 10", "step 10", "def", " <code> 20", "step 20")
    ]
    steps = [text for text in texts if text.startswith("step ")]
    assert steps == ["step 10", "step 20", "step 40", "step 50"] * 3
    assert "Prompt: My own" in texts
    directions = {values.get("dir") for _, values in page.attributes if "sample" in str(values)}
    assert directions >= {"auto"}


def test_samples_of_a_finished_run_stand_below(results: Path) -> None:
    texts = shown(results).sections["samples"]
    assert "While the model trained" not in texts
    assert after(texts, "After the training", 2) == ["Prompt ", "<b>"]


def test_runs_are_named(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", ["one", "two"])
    for run in ("one", "two"):
        write_samples(results / run, [50])
    texts = shown(results).sections["samples"]
    assert after(texts, "Prompt from code", 6)[2::3] == ["one step 50", "two step 50"]
