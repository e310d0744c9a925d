"""The baseline by words: scores by the formula, the same each time."""

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokamake import files
from tokamake.errors import UserError
from tokamake.retrieval.evaluate_retrieval import evaluate_retrieval
from tokamake.retrieval.found import Found, read_found
from tokamake.retrieval.search_bm25 import search_bm25

BM25S = pytest.mark.extra("retrieval", "bm25s")
WORDS = ["river", "Seine", "city", "naïve", "10", "bridge", "old", "new"]
K1, B = 0.9, 0.4


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has passages in two files, and questions."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    lines = ["id\ttext\ttitle"]
    for number in range(60):
        text = " ".join(draw.choice(WORDS[:7], draw.integers(1, 12)))
        lines.append(f"{number + 500}\t{text}, and.\tTitle {number}")
    Path("a.tsv").write_text("\n".join(lines[:31]) + "\n")
    Path("b.tsv").write_text("\n".join([lines[0], *lines[31:]]) + "\n")
    asked = ["the OLD river?", "nai\u0308ve city city", "new and", "unknown words", "title 7!"]
    Path("q.tsv").write_text("".join(f"{text}\t{json.dumps(['old river'])}\n" for text in asked))


def found_by(**options: Any) -> Found:
    arguments = {
        "questions": Path("q.tsv"),
        "passages": [Path("a.tsv"), Path("b.tsv")],
        "output": Path("bm25.json"),
        "top_k": 20,
        **options,
    }
    search_bm25(**arguments)
    return read_found(arguments["output"])[0]


def plain_scores(question: list[str], documents: list[list[str]]) -> list[float]:
    """BM25 as in Lucene 8: https://doi.org/10.1007/978-3-030-45442-5_4, row "Lucene (accurate)"."""
    average = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for word in question:
            number = sum(word in each for each in documents)
            rarity = math.log(1 + (len(documents) - number + 0.5) / (number + 0.5))
            length = 1 - B + B * len(document) / average
            score += rarity * counts[word] / (counts[word] + K1 * length)
        scores.append(score)
    return scores


@BM25S
def test_scores_equal_the_formula() -> None:
    found = found_by()
    lines = [*Path("a.tsv").read_text().splitlines(), *Path("b.tsv").read_text().splitlines()]
    rows = [line.split("\t") for line in lines if not line.startswith("id")]
    documents = [
        f"{title} {text}".lower().replace(",", "").replace(".", "").split()
        for _, text, title in rows
    ]
    for row, question in enumerate([["the", "old", "river"], ["naïve", "city", "city"]]):
        scores = np.array(plain_scores(question, documents))
        order = np.argsort(-scores, kind="stable")[:20]
        np.testing.assert_allclose(found.scores[row], scores[order], rtol=1e-5)
        by_id = dict(zip([int(each[0]) for each in rows], scores, strict=True))
        np.testing.assert_allclose([by_id[n] for n in found.ids[row]], scores[order], rtol=1e-5)
    assert (found.ids[3] == -1).all()
    assert found.ids[4, 0] == 507
    np.testing.assert_array_equal(found.scores == -np.inf, found.ids == -1)


@BM25S
def test_equal_scores_keep_the_order_of_passages() -> None:
    text = "".join(f"{number}\tsame\n" for number in range(9))
    Path("a.tsv").write_text(f"id\ttext\n{text}20\tother\n")
    Path("q.tsv").write_text("same\t['x']\n")
    assert found_by(passages=[Path("a.tsv")], top_k=4).ids.tolist() == [[0, 1, 2, 3]]


@BM25S
def test_a_search_gives_the_same_bytes_and_is_not_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found_by()
    found_by(output=Path("again.json"))
    for suffix in (".json", ".ids.npy", ".scores.npy", ".queries.npy"):
        assert Path(f"bm25{suffix}").read_bytes() == Path(f"again{suffix}").read_bytes()
    found_by()
    assert "already complete" in capsys.readouterr().out


@BM25S
def test_its_results_are_evaluated_as_those_of_search() -> None:
    found_by()
    evaluate_retrieval(
        Path("bm25.json"),
        questions=Path("q.tsv"),
        passages=[Path("a.tsv"), Path("b.tsv")],
        output=Path("recall.json"),
    )
    recall = files.read_sealed_json(Path("recall.json"), "")["recall"]
    assert 0 < recall["1"] <= recall["20"] < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 61}, "--top-k: 61 for 60 passages; give 1 or more, at most"),
        ({"k1": -1.0}, "--k1, --b: -1.0 and 0.4; give k1 of 0 or more"),
        ({"b": 1.5}, "b from 0 to 1"),
        ({"passages": [Path("gone.tsv")]}, "gone.tsv: cannot be read"),
        ({"passages": [Path("a.tsv"), Path("a.tsv")]}, "--passages: the id 500 occurs twice"),
        ({"passages": [Path("empty.tsv")]}, "--passages: no word in 1 passages; give texts"),
        ({"output": Path("bm25")}, "bm25: does not end with .json"),
    ],
)
@BM25S
def test_mistakes_are_one_line(options: dict[str, Any], message: str) -> None:
    Path("empty.tsv").write_text("id\ttext\n1\t.\n")
    with pytest.raises(UserError, match=message):
        found_by(**options)


def test_without_bm25s_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match=r"^bm25s is not installed; pip install 'tokamake\[retr"):
        found_by()
