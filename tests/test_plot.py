"""Figures and tables of a made-up run: whole, reproducible, escaped, and true to the numbers."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes

from tokamake.config import read_run
from tokamake.data.pairs.statistics import histogram
from tokamake.data.samples.folder import VERSION
from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.plot import figures, style, tables
from tokamake.plot.history import read_history, smooth
from tokamake.plot.lengths import lengths
from tokamake.plot.mixture import Component, largest, read_mixture, total
from tokamake.plot.plot import plot

PAGES = {"corpora.html", "evaluation.html", "samples.html", "summary.html"}
FIGURES = {"loss.svg", "learning_rate.svg", "throughput.svg", "mixture.svg", "lengths.svg"}
RUN = {
    "run": "trial",
    "seed": 1,
    "checkpoint": "init",
    "index": "index",
    "data_root": "data",
    "output": "training",
    "architecture": {
        "vocab_size": 1000,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "train": {
        "train_steps": 50,
        "global_batch_size": 4,
        "sequence_length": 64,
        "split": "80,10,10",
    },
}
TRAINED = {
    "step": 50,
    "first_loss": 6.9,
    "last_loss": 3.1234,
    "validation_losses": [{"step": 50, "validation_loss": 3.25}],
    "consumed_tokens": 12800,
    "seconds": 65.4,
    "tokens_per_second": 195.7,
    "checkpoint": "training/global_step50",
    "world_size": 2,
    "versions": {"tokamake": "9.9.9", "torch": "2.0"},
}


def pair(prefix: str, corpus: str, num_tokens: int) -> dict:
    # Nine documents of one size and a tenth with the rest.
    lengths = np.array([num_tokens // 16] * 9 + [num_tokens - 9 * (num_tokens // 16)])
    return {
        "data_prefix": prefix,
        "corpus": corpus,
        "total_num_docs": 10,
        "total_num_tokens": num_tokens,
        "text_bytes": 4 * num_tokens,
        "documents_in": 1013,
        "empty_documents": 1,
        "duplicate_documents": 1000,
        "quarantined_documents": 2,
        "lengths": histogram([lengths]),
    }


def scores(loss: float | None) -> dict:
    keys = {"documents": 3, "tokens": 1234, "bytes": 4936}
    return keys | dict.fromkeys(("loss", "perplexity", "bits_per_byte"), loss)


def metric(step: int, loss: float) -> dict:
    return {
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3 / step,
        "grad_norm": 1.0,
        "tokens_per_second": 100.0 + step,
        "consumed_tokens": step * 256,
    }


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    lines = [metric(step, 3 + 4 / step) for step in range(5, 51, 5)]
    lines += [{"step": 25, "validation_loss": 3.5}, {"step": 50, "validation_loss": 3.25}]
    content = {
        "metadata": json.dumps(
            [
                pair("merged/code-0000", "code", 4000),
                pair("merged/code-0001", "code", 2000),
                pair("merged/a&b-0000", "a&b", 2000),
            ]
        ),
        "metrics": "".join(json.dumps(line) + "\n" for line in lines),
        "train": json.dumps(TRAINED),
        "evaluation": json.dumps(
            {"overall": scores(2.5), "corpora": {"code": scores(2.5), "a&b": scores(None)}}
        ),
        "samples": json.dumps(
            [
                {
                    "prompt": "<b>",
                    "text": "x < y\n  & z</div>",
                    "num_new_tokens": 7,
                    "stopped": "eod",
                }
            ]
        ),
        "config": yaml.safe_dump(RUN),
    }
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    write_index(
        tmp_path / "index",
        {
            "merged/code-0000": ("code", 3200, 34),
            "merged/code-0001": ("code", 1600, 17),
            "merged/a&b-0000": ("a&b", 1600, 153),
        },
    )
    return {name: tmp_path / name for name in [*content, "index"]}


def write_index(folder: Path, files: dict[str, tuple[str, int, int]]) -> None:
    """Describe an index that draws samples from files of some tokens each."""
    keys = ("corpus", "tokens", "drawn_samples")
    described = [
        {"prefix": prefix, **dict(zip(keys, file, strict=True))} for prefix, file in files.items()
    ]
    value = {"version": VERSION, "splits": {"train": {"files": described}}}
    folder.mkdir(exist_ok=True)
    whole = {**value, "digest": digest(value)}
    (folder / "index.json").write_text(json.dumps(whole))


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


def rows(page: Page, width: int, section: str = "") -> list[list[str]]:
    """Cells of the table behind title and heading, or of the one behind a section's title."""
    texts = page.texts[2:]
    second = texts.index("Documents") if "Documents" in texts else len(texts)
    cells = texts[second + 1 :] if section else texts[:second]
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


def test_tables_tell_the_numbers(inputs: dict[str, Path], tmp_path: Path) -> None:
    plot(**inputs, output=tmp_path / "plots")
    # Of 12,800 tokens drawn, code gives a quarter, from 0.8 of its 6,000 tokens.
    corpora = Page(tmp_path / "plots/corpora.html")
    assert rows(corpora, 7)[1:] == [
        ["code", "2", "20", "6,000", "24.0 kB", "25.0%", "0.67"],
        ["a&b", "1", "10", "2,000", "8.0 kB", "75.0%", "6.00"],
        ["all", "3", "30", "8,000", "32.0 kB", "100.0%", "2.00"],
    ]
    assert rows(corpora, 8, "Documents")[1:] == [
        ["code", "2,026", "2", "2,000", "4", "4.00", "300", "128–255"],
        ["a&b", "1,013", "1", "1,000", "2", "4.00", "200", "64–127"],
        ["all", "3,039", "3", "3,000", "6", "4.00", "267", "64–127"],
    ]
    assert rows(Page(tmp_path / "plots/evaluation.html"), 7)[1:] == [
        ["code", "3", "1,234", "4,936", "2.5000", "2.50", "2.5000"],
        ["a&b", "3", "1,234", "4,936", "–", "–", "–"],
        ["overall", "3", "1,234", "4,936", "2.5000", "2.50", "2.5000"],
    ]
    values = dict(rows(Page(tmp_path / "plots/summary.html"), 2))
    # Embedding and output, then layers of 2 × 16² + 2 × 16 × 8 + 3 × 16 × 32 + 2 × 16, then a norm.
    assert values["parameters"] == f"{32_000 + 2 * (512 + 256 + 1536 + 32) + 16:,}"
    assert values["time"] == "1 min 05 s on 2 ranks"
    assert values["training loss"] == "3.1234 nats per token, at first 6.9000"
    assert values["validation loss"] == "3.2500 nats per token"
    assert values["versions"] == "tokamake 9.9.9, torch 2.0"


def test_samples_are_escaped_and_keep_their_lines(inputs: dict[str, Path], tmp_path: Path) -> None:
    plot(**inputs, output=tmp_path / "plots")
    page = Page(tmp_path / "plots/samples.html")
    assert page.texts[2:] == ["<b>", "x < y\n  & z</div>", "7 tokens; ended the document"]


def test_a_mixture_follows_prefixes_and_keeps_unused_corpora(inputs: dict[str, Path]) -> None:
    write_index(
        inputs["index"],
        {"merged/code-0000": ("code", 3000, 30), "merged/code-0001": ("old", 1000, 10)},
    )
    found = read_mixture(
        metadata=inputs["metadata"], index=inputs["index"], run=read_run(inputs["config"])
    )
    shares = {row.name: (row.tokens, row.share_of_tokens, row.share_of_samples) for row in found}
    assert shares == {
        "code": (4000, 0.75, 0.75),
        "old": (2000, 0.25, 0.25),
        "a&b": (2000, 0.0, 0.0),
    }


def lines_of(axes: object) -> dict[str, tuple[list, list]]:
    return {line.get_color(): line.get_data() for line in axes.lines}


def test_loss_figure_shows_training_validation_and_uniform_guess(inputs: dict[str, Path]) -> None:
    history = read_history(inputs["metrics"])
    with style.styled():
        axes = figures.loss(history, 1000).axes[0]
    drawn = lines_of(axes)
    np.testing.assert_array_equal(drawn[style.PALE_BLUE][1], history.training["loss"])
    np.testing.assert_array_equal(drawn[style.ORANGE], [[25, 50], [3.5, 3.25]])
    assert drawn[style.MUTED][1] == pytest.approx([np.log(1000)] * 2)
    texts = [text.get_text() for text in axes.texts]
    assert "validation 3.250" in texts
    assert "uniform guess\nln 1,000 = 6.91" in texts
    low, high = axes.get_ylim()
    assert low < 3 < np.log(1000) < high


def test_end_labels_keep_their_order_and_room() -> None:
    with style.styled():
        figure, axes = style.over_steps("t")
        axes.set_ylim(0, 1)
        labels = [
            style.Label(y, text, "k") for y, text in [(0.99, "c\nc"), (0.98, "b"), (0.5, "a")]
        ]
        style.label_ends(axes, labels)
        figure.canvas.draw()
        boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c\nc"]
    assert boxes[0].y0 < boxes[0].y1 < boxes[1].y0 < boxes[1].y1 < boxes[2].y0
    assert axes.texts[0].xy[1] == 0.5
    assert boxes[2].y1 <= axes.get_window_extent().y1


def test_a_run_of_one_step_can_be_drawn(inputs: dict[str, Path], tmp_path: Path) -> None:
    inputs["metrics"].write_text(json.dumps(metric(1, 6.9)) + "\n")
    inputs["train"].write_text(json.dumps({**TRAINED, "validation_losses": []}))
    plot(**inputs, output=tmp_path / "plots")
    assert "validation loss" not in Page(tmp_path / "plots/summary.html").texts


def test_very_many_corpora_share_a_bar() -> None:
    many = [Component(f"c{n:03d}", 1, 1, 10, 40, 0.01, 0.01, 1.0, 8) for n in range(100)]
    with style.styled():
        axes = figures.mixture(many).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) == 30
    assert names[-1] == "71 others"
    assert axes.containers[0][-1].get_width() == pytest.approx(0.71)
    assert total(many).epochs == pytest.approx(1.0)


def test_the_largest_corpora_stay_and_the_others_are_summed() -> None:
    shares = {"a": 0.1, "b": 0.4, "c": 0.1, "d": 0.4}
    corpora = [
        Component(name, 1, 1, 10, 40, 0.25, share, share / 0.25, 8)
        for name, share in shares.items()
    ]
    assert largest(corpora, 4) == corpora
    *kept, others = largest(corpora, 3)
    assert [row.name for row in kept] == ["b", "d"]
    assert (others.name, others.tokens, others.share_of_tokens) == ("2 others", 20, 0.5)
    assert (others.share_of_samples, others.epochs) == pytest.approx((0.2, 0.4))


def bars(axes: Axes, name: str) -> dict[float, float]:
    """Left edge of the bin and height of the bars that a legend names."""
    container = next(one for one in axes.containers if one.get_label() == name)
    return {np.floor(bar.get_x()): bar.get_height() for bar in container}


def test_lengths_figure_counts_documents_and_tokens(inputs: dict[str, Path]) -> None:
    run = read_run(inputs["config"])
    corpora = read_mixture(metadata=inputs["metadata"], index=inputs["index"], run=run)
    with style.styled():
        code, other = lengths(corpora, 64).axes
    # Nine documents of 125 tokens, nine of 250, one of 875 and one of 1,750.
    assert bars(code, "share of documents") == {6: 0.45, 7: 0.45, 8: 0, 9: 0.05, 10: 0.05}
    assert bars(code, "share of tokens") == pytest.approx(
        {6: 1125 / 6000, 7: 2250 / 6000, 8: 0, 9: 875 / 6000, 10: 1750 / 6000}
    )
    assert code.get_title(loc="left") == "code"
    assert code.get_title(loc="right") == "20 documents, 300 tokens each on average"
    (line,) = code.lines
    assert line.get_xdata() == [6, 6]
    ticks = dict(zip(other.get_xticks(), other.get_xticklabels(), strict=True))
    assert {place: label.get_text() for place, label in ticks.items()} == {
        **{6: "64", 7: "128", 8: "256", 9: "512", 10: "1k", 11: "2k"},
    }


def test_lengths_figure_takes_empty_and_very_many_corpora() -> None:
    short = tuple(histogram([np.array([0, 1, 5])]))
    many = [Component(f"c{n:03d}", 1, 3, 6, 40, 0.01, 0.01, 1.0, 8, short) for n in range(100)]
    with style.styled():
        panels = lengths([*many, Component("none", 0, 0, 0, 0, 0.0, 0.0, 0.0, 0)], 2048).axes
        assert lengths([], 2048).axes == []
    assert len(panels) == 12
    assert panels[-1].get_title(loc="left") == "89 others"
    assert panels[-1].get_title(loc="right").startswith("267 documents")
    assert bars(panels[-1], "share of documents") == pytest.approx(
        {-1: 1 / 3, 0: 1 / 3, 1: 0, 2: 1 / 3}
    )
    low, high = panels[0].get_xlim()
    assert low < -1
    assert high > 11
    assert panels[-1].get_xticklabels()[0].get_text() == "0"


def test_old_metadata_is_explained(inputs: dict[str, Path], tmp_path: Path) -> None:
    pairs = json.loads(inputs["metadata"].read_text())
    del pairs[1]["lengths"]
    inputs["metadata"].write_text(json.dumps(pairs))
    with pytest.raises(UserError, match="metadata: has no lengths; make it again"):
        plot(**inputs, output=tmp_path / "plots")


def test_smoothing_keeps_lines_straight_and_damps_noise() -> None:
    line = np.linspace(5.0, 3.0, 400)
    smoothed = smooth(line)
    np.testing.assert_allclose(smoothed[:-10], line[:-10])
    noise = np.random.default_rng(0).normal(size=400)
    assert smooth(noise)[20:].std() < 0.35 * noise.std()
    assert smooth(np.array([2.0])).tolist() == [2.0]


def test_a_step_done_again_counts_once(inputs: dict[str, Path]) -> None:
    lines = [metric(1, 9.0), metric(2, 8.0), metric(1, 7.0)]
    inputs["metrics"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    training = read_history(inputs["metrics"]).training
    assert training["step"].tolist() == [1, 2]
    assert training["loss"].tolist() == [7.0, 8.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no training step"),
        ('{"step": 1, "lo', "metrics:1: not valid JSON"),
        ('{"loss": 1.0}', "metrics:1: no step"),
        ('{"step": 1, "loss": null}', "metrics:1: loss is None, not a number"),
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
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB")]
)
def test_sizes_read_well(size: int, text: str) -> None:
    assert tables.in_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.96, "10.0 s"), (59.9, "1 min 00 s"), (7260.0, "2 h 01 min")]
)
def test_times_read_well(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text
