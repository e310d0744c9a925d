"""Pages and figures of a made-up run: complete, reproducible, escaped, with the right numbers."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import yaml

from tests.support.finished_run import TRAINED, make_inputs, metric, scores
from tokamake.data.indexed.manifest_counts import filter_name
from tokamake.errors import UserError
from tokamake.report.plot import best_checkpoint, plot


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """Arguments of `plot`."""
    return make_inputs(tmp_path)


PAGES = {"corpora.html", "evaluation.html", "samples.html", "summary.html"}
FIGURES = {"loss.svg", "learning_rate.svg", "throughput.svg", "mixture.svg", "lengths.svg"}


class Page(HTMLParser):
    """Collects a page's text by cell, and checks that every tag is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:  # noqa: ARG002
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.texts.append(data)


def table(page: Path, title: str) -> list[list[str]]:
    """Cells of the table below a title, without its header."""
    section = page.read_text().partition(f"<h2>{title}</h2>")[2].partition("</table>")[0]
    lines = section.split("<tr>")[2:]
    return [[unescape(cell) for cell in re.findall(">([^<]+)</t[hd]>", line)] for line in lines]


def rows(page: Page, width: int) -> list[list[str]]:
    """Cells of the table after the heading."""
    texts = page.texts[2:]
    title = "From raw records to documents"
    cells = texts[: texts.index(title)] if title in texts else texts
    assert len(cells) % width == 0
    return [cells[start : start + width] for start in range(0, len(cells), width)]


def test_same_inputs_give_the_same_bytes(inputs: dict[str, Path], tmp_path: Path) -> None:
    plot(**inputs, output=tmp_path / "first")
    plot(**inputs, output=tmp_path / "second")
    plot(**inputs, output=tmp_path / "second")
    for folder in ("first", "second"):
        assert {path.name for path in (tmp_path / folder).iterdir()} == PAGES | FIGURES
    for name in PAGES | FIGURES:
        first, second = (tmp_path / folder / name for folder in ("first", "second"))
        assert first.read_bytes() == second.read_bytes(), name
    for name in FIGURES:
        assert ElementTree.parse(tmp_path / "first" / name).getroot().tag.endswith("svg")


def test_an_encoder_has_accuracies_in_place_of_scores_and_samples(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    run = yaml.safe_load(inputs["config"].read_text())
    run["train"]["objective"] = "masked"
    inputs["config"].write_text(yaml.safe_dump(run))
    shares = {"validation_token_accuracy": 0.25, "validation_sample_accuracy": 0.625}
    measured = {"step": 50, "validation_loss": 3.25, **shares}
    with inputs["metrics"].open("a") as metrics:
        metrics.write(json.dumps(measured) + "\n")
    trained = json.loads(inputs["train"].read_text()) | {"validation_losses": [measured]}
    inputs["train"].write_text(json.dumps(trained))
    del inputs["evaluation"], inputs["samples"]
    plot(**inputs, output=tmp_path / "plots")
    written = {path.name for path in (tmp_path / "plots").iterdir()}
    assert written == {"corpora.html", "summary.html", "accuracy.svg"} | FIGURES
    summary = Page(tmp_path / "plots/summary.html").texts
    assert summary[summary.index("validation token accuracy") + 1] == "25.0%"
    assert summary[summary.index("validation sample accuracy") + 1] == "62.5%"


def test_tables_show_the_numbers(inputs: dict[str, Path], tmp_path: Path) -> None:
    plot(**inputs, output=tmp_path / "plots")
    # Of 12,800 tokens drawn, code gives a quarter, from 0.8 of its 6,000 tokens.
    page = tmp_path / "plots/corpora.html"
    corpora = Page(page)
    assert rows(corpora, 7)[1:] == [
        ["code", "2", "20", "6,000", "24.0 kB", "25.0%", "0.67"],
        ["a&b", "1", "10", "2,000", "8.0 kB", "75.0%", "6.00"],
        ["all", "3", "30", "8,000", "32.0 kB", "100.0%", "2.00"],
    ]
    assert table(page, "From raw records to documents") == [
        ["code", "2,033", "7", "1,940", "60", "4", "0", "2", "20"],
        ["a&b", "1,013", "0", "1,000", "0", "2", "0", "1", "10"],
        ["all", "3,046", "7", "2,940", "60", "6", "0", "3", "30"],
    ]
    assert table(page, "Skipped records") == [
        ["code", "responses with HTTP status 404 (Not Found)", "4"],
        ["code", "redirects", "3"],
    ]
    assert table(page, "Lengths") == [
        ["code", "4.00", "300", "128–255"],
        ["a&b", "4.00", "200", "64–127"],
        ["all", "4.00", "267", "64–127"],
    ]
    assert "Filters" not in corpora.texts
    assert rows(Page(tmp_path / "plots/evaluation.html"), 7)[1:] == [
        ["code", "3", "1,234", "4,936", "2.5000", "2.50", "2.5000"],
        ["a&b", "3", "1,234", "4,936", "–", "–", "–"],
        ["overall", "3", "1,234", "4,936", "2.5000", "2.50", "2.5000"],
    ]
    values = dict(rows(Page(tmp_path / "plots/summary.html"), 2))
    # Embedding and output, then layers of 2 × 16² + 2 × 16 × 8 + 3 × 16 × 32 + 2 × 16, then a norm.
    assert values["parameters"] == f"{32_000 + 2 * (512 + 256 + 1536 + 32) + 16:,}"
    assert values["time"] == "1 min 05 s on 2 ranks"
    assert values["training loss"] == (
        "3.1234 nats per token at the last logged step, 6.9000 at the first"
    )
    assert values["validation loss"] == "3.2500 nats per token"
    assert values["versions"] == "tokamake 9.9.9, torch 2.0"


def test_a_table_shows_the_verdicts_of_filters(inputs: dict[str, Path], tmp_path: Path) -> None:
    metadata = json.loads(inputs["metadata"].read_text())
    dropped = {"too few words": {"documents": 4, "characters": 1200, "value": 10}}
    counts = {"documents": 40, "changed": {}, "dropped": dropped, "metrics": {}}
    for dataset in metadata:
        if dataset["corpus"] == "code":
            dataset["filters"] = [{"filter": "length", "options": {"min_words": 3}, **counts}]
    inputs["metadata"].write_text(json.dumps(metadata))
    plot(**inputs, output=tmp_path / "plots")
    page = tmp_path / "plots/corpora.html"
    # The sums of two datasets.
    assert table(page, "Filters") == [["code", "length (min_words: 3)", "80", "8", "0", "72"]]
    cells = ["code", "length (min_words: 3)", "too few words", "8", "10.00%", "-2,400", "2.5"]
    assert table(page, "Verdicts of filters") == [cells]


def test_long_options_of_filters_are_cut() -> None:
    sets = {f"set{n}": {"path": [f"data/{n}.jsonl"], "fields": ["q"]} for n in range(3)}
    entry = {"filter": "decontaminate", "options": {"files": sets}}
    assert filter_name(entry) == "decontaminate (files: [set0, set1, set2])"
    long = {"filter": "regex", "options": {"drop": "x" * 100}}
    assert filter_name(long) == f'regex (drop: "{"x" * 53}…)'


def test_samples_of_filters_are_folded(inputs: dict[str, Path], tmp_path: Path) -> None:
    metadata = json.loads(inputs["metadata"].read_text())
    sample = {"hash": "01", "place": "a.jsonl:7"}
    samples = [
        {**sample, "verdict": "kept", "text": "all"},
        {**sample, "verdict": "changed", "text": "one <two> three", "after": "one three"},
        {**sample, "verdict": "dropped", "reason": "too few", "value": 2, "text": "x & y"},
    ]
    counts = {"documents": 40, "changed": {}, "dropped": {}, "metrics": {}, "samples": samples}
    metadata[0]["filters"] = [{"filter": "mine.py", "options": {}, **counts}]
    inputs["metadata"].write_text(json.dumps(metadata))
    plot(**inputs, output=tmp_path / "plots")
    page = tmp_path / "plots/corpora.html"
    texts = Page(page).texts
    assert texts[texts.index("Samples of filters") + 1 :] == [
        *("code", "mine.py", "x & y", "dropped: too few, 2 · a.jsonl:7"),
        *("one ", "<two> ", "three", "changed · a.jsonl:7", "all", "kept · a.jsonl:7"),
    ]
    html = page.read_text()
    assert "one <del>&lt;two&gt; </del>three" in html
    assert html.count("<details>") == 2


def test_scores_of_checkpoints_stand_side_by_side(inputs: dict[str, Path], tmp_path: Path) -> None:
    earlier = []
    for step, loss in ((20, 4.0), (40, 3.0)):
        earlier.append(tmp_path / f"evaluate.{step}.json")
        one = scores(loss)
        earlier[-1].write_text(json.dumps({"corpora": {"code": one}, "overall": one}))
    tasks = []
    for name, values in (("lambada.20", 0.25), ("lambada", 0.5), ("other", 1.5)):
        tasks.append(tmp_path / f"{name}.json")
        task = name.partition(".")[0]
        tasks[-1].write_text(json.dumps({"task": task, "scores": {"accuracy": values}}))
    plot(**inputs, earlier=earlier, tasks=tasks, output=tmp_path / "plots")
    texts = Page(tmp_path / "plots/evaluation.html").texts
    segments = texts[texts.index("After each segment") + 1 : texts.index("Task lambada")]
    assert [segments[place : place + 4] for place in range(0, len(segments), 4)] == [
        ["step", "loss", "perplexity", "bits per byte"],
        ["20", "4.0000", "4.00", "4.0000"],
        ["40", "3.0000", "3.00", "3.0000"],
        ["last", "2.5000", "2.50", "2.5000"],
    ]
    assert texts[texts.index("Task lambada") + 1 :] == [
        *("step", "20", "last"),
        *("accuracy", "0.2500", "0.5000"),
        *("Task other", "score", "accuracy", "1.5000"),
    ]


def test_the_report_names_the_command_that_serves_the_best_checkpoint(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (25, 50):
        Path(f"a run/global_step{step}").mkdir(parents=True)
    losses = [{"step": 25, "validation_loss": 3.1}, {"step": 50, "validation_loss": 3.2}]
    lines = [metric(5, 3), *losses]
    inputs["metrics"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    trained = {**TRAINED, "validation_losses": losses, "checkpoint": "a run/global_step50"}
    inputs["train"].write_text(json.dumps(trained))
    plot(**inputs, output=tmp_path / "plots")
    values = dict(rows(Page(tmp_path / "plots/summary.html"), 2))
    assert values["serve the best"] == "tokamake serve 'a run/global_step25'"


def test_samples_are_escaped_and_keep_their_lines(inputs: dict[str, Path], tmp_path: Path) -> None:
    plot(**inputs, output=tmp_path / "plots")
    page = Page(tmp_path / "plots/samples.html")
    assert page.texts[2:] == ["<b>", "x < y\n  & z</div>", "7 tokens; ended the document"]


def test_a_run_of_one_step_can_be_drawn(inputs: dict[str, Path], tmp_path: Path) -> None:
    inputs["metrics"].write_text(json.dumps(metric(1, 6.9)) + "\n")
    inputs["train"].write_text(json.dumps({**TRAINED, "validation_losses": []}))
    plot(**inputs, output=tmp_path / "plots")
    assert "validation loss" not in Page(tmp_path / "plots/summary.html").texts


def test_old_metadata_is_explained(inputs: dict[str, Path], tmp_path: Path) -> None:
    pairs = json.loads(inputs["metadata"].read_text())
    del pairs[1]["lengths"]
    inputs["metadata"].write_text(json.dumps(pairs))
    with pytest.raises(UserError, match="metadata: has no lengths; rerun"):
        plot(**inputs, output=tmp_path / "plots")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no training step"),
        ('{"step": 1, "lo', "metrics:1: not a JSON object with a step; remove the line"),
        ('{"loss": 1.0}', "metrics:1: not a JSON object with a step; remove the line"),
        ('{"step": 1, "loss": "low"}', "metrics:1: loss is 'low', not a number"),
        ('{"step": 1, "loss": null}', "no training step"),
    ],
)
def test_broken_metrics_are_explained(
    inputs: dict[str, Path], tmp_path: Path, text: str, message: str
) -> None:
    inputs["metrics"].write_text(text)
    with pytest.raises(UserError, match=message):
        plot(**inputs, output=tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("name", ["metadata", "metrics", "train", "evaluation", "samples"])
def test_a_missing_file_is_named(inputs: dict[str, Path], tmp_path: Path, name: str) -> None:
    inputs[name].unlink()
    with pytest.raises(UserError, match=re.escape(str(inputs[name]))):
        plot(**inputs, output=tmp_path / "plots")


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
