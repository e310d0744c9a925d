"""Figures of a made-up run, and the numbers behind them."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from tests.support.biencoders import biencoder
from tests.support.finished_run import make_inputs, metric, write_index
from tokamake.config.resolved_run import read_run
from tokamake.data.indexed.length_histogram import histogram
from tokamake.report import style, training_curves
from tokamake.report.length_figure import lengths
from tokamake.report.training_curves import measured, read_history, smooth
from tokamake.results.corpora import MIXTURE, largest, read_mixture, total
from tokamake.results.frames import frame


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """Arguments of `plot`."""
    return make_inputs(tmp_path)


def corpora(shares: dict[str, float], **values: object) -> pd.DataFrame:
    """Corpora with these shares of tokens and samples; each is read once."""
    known = {"datasets": 1, "documents": 1, "tokens": 10, "text_bytes": 40}
    known |= {"lengths": (), "filters": (), "trained_tokens": 8, "epochs": 1.0, **values}
    rows = [
        {"corpus": name, "share_of_tokens": share, "share_of_samples": share, **known}
        for name, share in shares.items()
    ]
    return frame(rows, MIXTURE)


def test_a_mixture_follows_prefixes_and_keeps_unused_corpora(inputs: dict[str, Path]) -> None:
    write_index(
        inputs["index"],
        {"merged/code-0000": ("code", 3000, 30), "merged/code-0001": ("old", 1000, 10)},
    )
    mixture = read_mixture(
        metadata=inputs["metadata"], index=inputs["index"], run=read_run(inputs["config"])
    )
    columns = ["corpus", "tokens", "share_of_tokens", "share_of_samples"]
    shares = mixture[columns].itertuples(index=False)
    assert {name: tuple(values) for name, *values in shares} == {
        "code": (4000, 0.75, 0.75),
        "old": (2000, 0.25, 0.25),
        "a&b": (2000, 0.0, 0.0),
    }


def lines_of(axes: object) -> dict[str, tuple[list, list]]:
    return {line.get_color(): line.get_data() for line in axes.lines}


def test_loss_figure_shows_training_validation_and_uniform_guess(inputs: dict[str, Path]) -> None:
    history = read_history(inputs["metrics"])
    with style.styled():
        axes = training_curves.loss(history, 1000).axes[0]
    drawn = lines_of(axes)
    np.testing.assert_array_equal(drawn[style.PALE_BLUE][1], history["loss"].dropna())
    np.testing.assert_array_equal(drawn[style.ORANGE], [[25, 50], [3.5, 3.25]])
    assert drawn[style.MUTED][1] == pytest.approx([np.log(1000)] * 2)
    texts = [text.get_text() for text in axes.texts]
    assert "validation 3.250" in texts
    assert "uniform guess\nln 1,000 = 6.91" in texts
    low, high = axes.get_ylim()
    assert low < 3 < np.log(1000) < high


def test_a_query_guesses_among_the_blocks_of_a_global_batch(inputs: dict[str, Path]) -> None:
    run = read_run(inputs["config"])
    towers = run.model_copy(update={"architecture": biencoder()})
    history = read_history(inputs["metrics"])
    with style.styled():
        axes = training_curves.loss_of_run(history, towers).axes[0]
    number = run.train.global_batch_size
    assert f"uniform guess\nln {number} = {np.log(number):.2f}" in [
        t.get_text() for t in axes.texts
    ]
    assert axes.get_ylabel() == "nats per query"


def test_accuracy_figure_names_the_best_k() -> None:
    shares = {f"validation_accuracy_at_{k}": [k / 10, k / 8] for k in (1, 5)}
    with style.styled():
        axes = training_curves.accuracy(pd.DataFrame({"step": [0, 10], **shares})).axes[0]
    texts = {text.get_text() for text in axes.texts}
    assert {"in the top 1 12.5%", "in the top 5 62.5%"} <= texts


def test_accuracy_figure_names_predictions_and_splits() -> None:
    history = pd.DataFrame(
        {
            "step": [50],
            "validation_token_accuracy": [0.25],
            "validation_sample_accuracy/hard": [0.625],
        }
    )
    with style.styled():
        axes = training_curves.accuracy(history).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["tokens 25.0%", "order of sentences (hard) 62.5%"]
    assert axes.get_ylim()[1] == pytest.approx(1.25 * 0.625)


def test_loss_figure_shows_the_corpora_with_the_most_lines(inputs: dict[str, Path]) -> None:
    lines = inputs["metrics"].read_text().splitlines()
    recorded = []
    for number, line in enumerate(map(json.loads, lines)):
        if "loss" in line:
            corpora = range(10) if number % 2 else range(6)
            line |= {f"loss/c{corpus}": 3.0 + corpus / 10 for corpus in corpora}
        recorded.append(json.dumps(line))
    inputs["metrics"].write_text("\n".join(recorded) + "\n")
    history = read_history(inputs["metrics"])
    assert {*measured(history, "loss")} == {"", *(f"c{corpus}" for corpus in range(10))}
    with style.styled():
        axes = training_curves.loss(history, 1000).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if text.startswith("c")] == [
        f"c{corpus} {3.0 + corpus / 10:.3f}" for corpus in range(6)
    ]
    assert sum(line.get_color() == style.GREY for line in axes.lines) == 6


def test_end_labels_keep_their_order_and_do_not_overlap() -> None:
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


def test_very_many_corpora_share_a_bar() -> None:
    many = corpora({f"c{n:03d}": 0.01 for n in range(100)})
    with style.styled():
        axes = training_curves.mixture(many).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) == 30
    assert names[-1] == "71 other corpora"
    assert axes.containers[0][-1].get_width() == pytest.approx(0.71)
    assert total(many)["epochs"].tolist() == pytest.approx([1.0])


def test_the_largest_corpora_stay_and_the_others_are_summed() -> None:
    many = corpora({"a": 0.1, "b": 0.4, "c": 0.1, "d": 0.4}).assign(share_of_tokens=0.25)
    many["epochs"] = many["share_of_samples"] / 0.25
    assert largest(many, 4) is many
    *kept, others = largest(many, 3).itertuples()
    assert [row.corpus for row in kept] == ["b", "d"]
    assert (others.corpus, others.tokens, others.share_of_tokens) == ("2 other corpora", 20, 0.5)
    assert (others.share_of_samples, others.epochs) == pytest.approx((0.2, 0.4))


def bars(axes: Axes, name: str) -> dict[float, float]:
    """Left edge of the bin and height of the bars with a legend entry."""
    container = next(bars for bars in axes.containers if bars.get_label() == name)
    return {np.floor(bar.get_x()): bar.get_height() for bar in container}


def test_lengths_figure_counts_documents_and_tokens(inputs: dict[str, Path]) -> None:
    run = read_run(inputs["config"])
    mixture = read_mixture(metadata=inputs["metadata"], index=inputs["index"], run=run)
    with style.styled():
        code, other = lengths(mixture, 64).axes
    # Documents: 9 of 125 tokens, 9 of 250, 1 of 875 and 1 of 1,750.
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


def test_lengths_figure_accepts_empty_and_very_many_corpora() -> None:
    short = tuple(histogram([np.array([0, 1, 5])]))
    names = {f"c{n:03d}": 0.01 for n in range(100)}
    many = corpora({**names, "none": 0.0}, documents=3, tokens=6, lengths=short)
    many.at[100, "lengths"] = ()
    with style.styled():
        panels = lengths(many, 2048).axes
        assert lengths(corpora({}), 2048).axes == []
    assert len(panels) == 12
    assert panels[-1].get_title(loc="left") == "89 other corpora"
    assert panels[-1].get_title(loc="right").startswith("267 documents")
    assert bars(panels[-1], "share of documents") == pytest.approx(
        {-1: 1 / 3, 0: 1 / 3, 1: 0, 2: 1 / 3}
    )
    low, high = panels[0].get_xlim()
    assert low < -1
    assert high > 11
    assert panels[-1].get_xticklabels()[0].get_text() == "0"


def test_smoothing_keeps_lines_straight_and_damps_noise() -> None:
    line = np.linspace(5.0, 3.0, 400)
    smoothed = smooth(line)
    np.testing.assert_allclose(smoothed[:-10], line[:-10])
    noise = np.random.default_rng(0).normal(size=400)
    assert smooth(noise)[20:].std() < 0.35 * noise.std()
    assert smooth(np.array([2.0])).tolist() == [2.0]


def test_a_repeated_step_counts_once(inputs: dict[str, Path]) -> None:
    lines = [metric(1, 9.0), metric(2, 8.0), metric(1, 7.0)]
    inputs["metrics"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = read_history(inputs["metrics"])
    assert history["step"].tolist() == [1, 2]
    assert history["loss"].tolist() == [7.0, 8.0]
