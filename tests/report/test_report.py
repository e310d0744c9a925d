"""The page about made-up runs: numbers, escaped texts, and files that are missing or damaged."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.support.finished_run import make_results, metric, scores
from tests.support.html_page import Page
from tests.support.programs import torch_python
from tests.support.report_pages import after, edit, shown
from tokamake.errors import UserError
from tokamake.report.describe_run import best_checkpoint
from tokamake.report.page.contents import PageContents
from tokamake.report.report import report
from tokamake.status.jobs import DagJob, write_jobs


def test_the_page_opens_with_the_run_and_its_numbers(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = shown(results)
    assert capsys.readouterr().out.startswith(f"{results}/report.html: 1 run, ")
    assert page.texts[0] == page.texts[2] == "Run trial"
    overview = page.sections["overview"]
    assert (
        "A llama model with 36.7 k parameters, trained from random weights on code, a&b."
        in (overview[1])
    )
    assert after(overview, "validation loss", 2) == [
        *("3.2500", "nats per token, validation split, step 50")
    ]
    assert after(overview, "perplexity", 2) == ["2.50", "held-out documents of the test split"]
    assert after(overview, "tokens trained", 1) == ["12.8 k"]
    assert after(overview, "training time", 2) == ["1 min 05 s", "196 tokens/s"]
    assert after(overview, "training loss", 1) == [
        "3.1234 nats per token at the last logged step, 6.9000 at the first"
    ]
    assert after(overview, "serve the best", 1) == ["tokamake serve training/global_step50"]


def test_small_test_sets_are_warned_about_and_scores_stand_over_checkpoints(results: Path) -> None:
    for step, loss in ((20, 4.0), (40, 3.0)):
        one = scores(loss)
        value = {"corpora": {"code": one}, "overall": one}
        (results / f"trial/evaluate.{step}.json").write_text(json.dumps(value))
    (results / "trial/tasks").mkdir()
    for name, accuracy in (("lambada.20", 0.25), ("lambada", 0.5)):
        value = {"task": "lambada", "scores": {"accuracy": accuracy}}
        (results / f"trial/tasks/{name}.json").write_text(json.dumps(value))
    texts = shown(results).sections["evaluation"]
    assert (
        "Too few held-out documents to compare models by: code (3 documents, 1,234 tokens)"
        in (texts[2])
    )
    assert after(texts, "bits per byte", 21) == [
        *("code", "3", "1,234", "4,936", "2.5000", "2.50", "2.5000"),
        *("a&b", "3", "1,234", "4,936", "–", "–", "–"),
        *("overall", "3", "1,234", "4,936", "2.5000", "2.50", "2.5000"),
    ]
    assert "Held-out documents over checkpoints" in texts
    assert after(texts, "step 50", 5) == ["lambada", "accuracy", "trial", "0.2500", "0.5000"]
    assert "Tasks over checkpoints" in texts


def test_large_test_sets_have_no_warning(results: Path) -> None:
    value = scores(2.5) | {"documents": 100, "tokens": 50_000}
    edit(results / "trial/evaluate.json", corpora={}, overall=value)
    assert "Too few" not in str(shown(results).sections["evaluation"])


def test_runs_are_compared_by_settings_that_differ(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", ["low", "middle", "high"])
    page = shown(results)
    texts = page.sections["comparison"]
    assert after(texts, "Settings that differ, and results", 7) == [
        *("high", "low", "middle", "train.optimizer.learning_rate", "0.003", "0.001", "0.002"),
    ]
    assert "Sweep over train.optimizer.learning_rate" in texts
    assert after(texts, "last train.optimizer.learning_rate", 2) == ["runs", "3"]
    assert page.texts[0] == "3 runs: high, low, middle"
    # Of two folders of runs, the page has these two alone.
    texts = shown(results / "low", results / "high").sections["comparison"]
    assert after(texts, "Settings that differ, and results", 2) == ["high", "low"]


def test_many_runs_are_rows(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", [f"run{number}" for number in range(7)])
    texts = shown(results).sections["comparison"]
    assert after(texts, "Settings that differ, and results", 9)[-2:] == ["run0", "0.001"]


def test_runs_of_one_data_folder_are_chosen(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", ["one", "two"])
    run = yaml.safe_load((results / "two/run.yaml").read_text())
    (results / "two/run.yaml").write_text(yaml.safe_dump({**run, "data_root": "results/data/v2"}))
    assert shown(results, data_set="default").texts[0] == "Run one"
    assert shown(results, data_set="v2").texts[0] == "Run two on data v2"


def test_runs_of_one_name_are_not_dropped_in_silence(tmp_path: Path) -> None:
    folders = [make_results(tmp_path / name / "results") / "trial" for name in "ab"]
    contents = PageContents(folders)
    assert [*contents.folders] == ["trial"]
    (fault,) = contents.faults
    assert all(str(folder) in fault for folder in folders)


def test_a_run_is_named_by_its_folder(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(results / "trial")
    report(Path())
    assert Page(results / "report.html").texts[0] == "Run trial"


def test_costs_have_the_jobs_of_the_runs_and_of_their_data(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", ["one", "two"])
    run = yaml.safe_load((results / "two/run.yaml").read_text())
    (results / "two/run.yaml").write_text(yaml.safe_dump({**run, "data_root": "results/data/v2"}))
    names = ("one/train", "two/train", "tokenize/a", "data/v2/tokenize/b", "data/v3/tokenize/c")
    for name in (*names, "fetch_weights/w"):
        path = results / f"benchmarks/{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("s\tmax_rss\n3600\t1\n")
    costs = PageContents([results], data_set="v2").costs["job"]
    assert {*costs} == {"two/train.tsv", "data/v2/tokenize/b.tsv", "fetch_weights/w.tsv"}
    assert len(PageContents([results]).costs) == 5


def test_no_run_is_the_best_of_runs_on_different_data(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", ["one", "two"])
    assert after(shown(results).sections["overview"], "The best run is ", 1) == ["one"]
    run = yaml.safe_load((results / "two/run.yaml").read_text())
    (results / "two/run.yaml").write_text(yaml.safe_dump({**run, "data_root": "results/data/v2"}))
    overview = shown(results).sections["overview"]
    assert "The runs differ in objective, tokenizer or data" in overview[1]
    assert "two" in overview


def test_metrics_of_other_data_folders_are_not_read(results: Path) -> None:
    (results / "trial/training/metrics.jsonl").write_text("[\n")
    assert not PageContents([results], data_set="v2").faults


def test_a_finished_run_without_metrics_has_an_overview(results: Path) -> None:
    (results / "trial/training/metrics.jsonl").unlink()
    overview = shown(results).sections["overview"]
    assert after(overview, "serve the best", 1) == ["tokamake serve training/global_step50"]


def test_a_results_folder_may_have_another_name(results: Path) -> None:
    metadata = json.loads((results / "data/metadata.json").read_text())
    metadata[0]["sha256"] = {"bin": "0123"}
    (results / "data/metadata.json").write_text(json.dumps(metadata))
    moved = results.rename(results.with_name("kept"))
    assert "0123" in shown(moved).sections["provenance"]


def test_a_run_that_trains_has_a_page(results: Path) -> None:
    for name in ("train.json", "evaluate.json", "samples.json"):
        (results / "trial" / name).unlink()
    lines = [metric(5, 3.0), metric(10, 2.5), {"step": 10, "validation_loss": 2.75}]
    metrics = "".join(json.dumps(line) + "\n" for line in lines)
    (results / "trial/training/metrics.jsonl").write_text(metrics + '{"step": 15, "lo')
    overview = shown(results).sections["overview"]
    assert "Step 10 of 50." in overview[1]
    assert after(overview, "validation loss", 1) == ["2.7500"]
    assert after(overview, "not finished", 1)[0].startswith("not saved yet; the same command")
    (results / "trial/training/latest").write_text("global_step10")
    lines = [{"step": 0, "validation_loss": 6.9}, metric(5, 3.0)]
    path = results / "trial/training/metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = shown(results)
    assert after(page.sections["overview"], "not finished", 1) == [
        "saved at step 10; the same command as before continues there, or on one rank: "
        f"tokamake train --config {results}/trial/run.yaml"
    ]
    assert "nats per token, validation split, before training" in page.sections["overview"]
    assert any("each corpus has had about 10% of its" in text for text in page.sections["mixture"])


def test_a_folder_without_runs_has_a_page(tmp_path: Path) -> None:
    assert "No run has begun" in shown(tmp_path).sections["overview"][1]
    with pytest.raises(UserError, match="nowhere: no such folder"):
        report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trial/run.yaml", "run.yaml"),
        ("trial/training/metrics.jsonl", "metrics.jsonl:1: not a JSON object with a step"),
        ("trial/evaluate.json", "evaluate.json"),
        ("trial/samples.json", "samples.json"),
        ("data/metadata.json", "metadata.json"),
        ("trial/jobs.json", "jobs.json"),
    ],
)
def test_a_damaged_file_costs_its_part_of_the_page(results: Path, name: str, message: str) -> None:
    (results / name).write_text("[\n")
    page = shown(results)
    assert any(message in text for text in page.texts)
    assert "overview" in page.sections


def test_a_section_that_fails_says_why(results: Path) -> None:
    (results / "trial/environment.json").write_text("[1]")
    report(results)
    page = Page(results / "report.html")
    assert any("cannot be shown: AttributeError" in text for text in page.texts)
    assert "samples" in page.sections


def test_texts_from_outside_are_escaped(results: Path) -> None:
    hostile = "<script>alert(1)</script><!--<script>"
    samples = [{"prompt": hostile, "text": hostile, "num_new_tokens": 7, "stopped": hostile}]
    (results / "trial/samples.json").write_text(json.dumps(samples))
    metadata = json.loads((results / "data/metadata.json").read_text())
    metadata[2]["corpus"] = hostile
    (results / "data/metadata.json").write_text(json.dumps(metadata))
    page = shown(results)
    assert page.sections["samples"].count(hostile) == 3
    scripts = [values for tag, values in page.attributes if tag == "script"]
    assert all(not values or "data-figure" in values for values in scripts)
    html = (results / "report.html").read_text()
    assert hostile not in html
    assert "<!--<script" not in html  # in a script, it hides the end of the script


def test_the_page_loads_nothing(results: Path) -> None:
    page = shown(results)
    links = [
        values[name]
        for _, values in page.attributes
        for name in ("src", "href")
        if values.get(name)
    ]
    assert all(link.startswith(("#", "data:")) for link in links if link)


def test_figures_and_tables_have_labels_for_screen_readers(results: Path) -> None:
    page = shown(results)
    figures = [values for _, values in page.attributes if values.get("role") == "img"]
    assert len(figures) == page.tags["figcaption"] > 5
    assert all(values["aria-label"] for values in figures)
    headers = [values for tag, values in page.attributes if tag == "th"]
    assert all(values.get("scope") in ("row", "col") for values in headers)
    targets = {values["href"] for tag, values in page.attributes if tag == "a"}
    assert targets >= {f"#{name}" for name in page.sections if name}


def test_the_workflow_is_drawn_with_states(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamake.config.data_set import DataSet

    monkeypatch.chdir(results.parent)
    outputs = {"index": "index/index.json", "train": "train.json", "evaluate": "later.json"}
    jobs, made = [], []
    for rule, output in outputs.items():
        jobs.append(DagJob(rule, "trial", [f"results/trial/{output}"], made, f"logs/{rule}.log"))
        made = jobs[-1].outputs
    write_jobs(jobs, DataSet(), rules=())
    page = shown(Path("results"))
    texts = page.sections["workflow"]
    assert texts[1] == "3 jobs: 1 waiting, 2 done."
    assert [text for text in texts if text[:2] in ("✓ ", "… ")] == [
        "✓ index", "✓ train", "… evaluate",
    ]  # fmt: skip
    assert page.tags["path"] == 2


def test_commands_and_versions_are_listed(results: Path) -> None:
    record = results / "trial/.made_from/train.json.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"rule": "train", "shellcmd": "tokamake train & wait"}))
    environment = {"commit": "abc123", "changed_files": ["a.py"], "packages": {"torch": "2.13"}}
    (results / "trial/environment.json").write_text(json.dumps(environment))
    texts = shown(results).sections["provenance"]
    assert after(texts, "commit", 1) == ["abc123, with changes in a.py"]
    environment |= {"commit": None, "tokamake": {"commit": "def456", "changed_files": []}}
    (results / "trial/environment.json").write_text(json.dumps(environment))
    texts = shown(results).sections["provenance"]
    assert after(texts, "commit of tokamake", 1) == ["def456"]
    assert "commit" not in texts
    assert after(texts, "versions", 1) == ["tokamake 9.9.9, torch 2.0"]
    assert after(texts, "Packages: 1", 2) == ["torch", "2.13"]
    assert "tokamake train & wait" in after(texts, "train: 1 file", 1)[0]


@pytest.mark.parametrize(
    ("losses", "kept", "best"),
    [
        ({2: 3.0, 4: 1.0, 6: 2.0}, (2, 4, 6), 4),
        ({2: 3.0, 4: 1.0, 6: 2.0}, (2, 6), 6),
        ({2: 1.0, 4: 2.0, 6: 1.0}, (2, 4, 6), 6),
        ({2: 1.0}, (4, 6), 6),
        ({}, (4, 6), 6),
    ],
    ids=["lowest", "lowest of the kept", "later of equals", "none validated", "no validation"],
)
def test_the_best_checkpoint_has_the_lowest_loss(
    tmp_path: Path, losses: dict[int, float], kept: tuple[int, ...], best: int
) -> None:
    for step in kept:
        (tmp_path / f"global_step{step}").mkdir()
    history = pd.DataFrame({"step": losses.keys(), "validation_loss": losses.values()})
    chosen = best_checkpoint(history, tmp_path / "global_step6")
    assert chosen == tmp_path / f"global_step{best}"


def test_the_same_files_give_the_same_page(results: Path) -> None:
    """In another process, sets have another order."""
    script = "import sys, tokamake.report.report as it; it.report(it.Path(sys.argv[1]))"
    pages = []
    for python in (torch_python(), sys.executable):
        subprocess.run([python, "-c", script, str(results)], check=True, capture_output=True)
        pages.append((results / "report.html").read_bytes())
    assert pages[0] == pages[1]
