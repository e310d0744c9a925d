"""Near-duplicates are found as often as theory says, and nothing else is found."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.find_near_duplicates import find_near_duplicates
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import write_plan
from tokamake.data.corpus.sign_documents import sign_documents

BANDS, ROWS, SHINGLE = 14, 8, 5
PLANTED = {"0.9": (38, 36), "0.8": (36, 32), "0.7": (34, 28), "0.5": (33, 22), "0": (36, 0)}
"""Jaccard similarity: shingles of each document of a pair, and shingles that both have."""


def pair(numbers: random.Random, shingles: int, common: int) -> tuple[str, str]:
    """Two texts that begin alike. All words differ, so that all shingles do."""
    size = shingles + SHINGLE - 1
    shared = common + SHINGLE - 1 if common else 0
    words = [f"{word:x}" for word in numbers.sample(range(1 << 40), 2 * size - shared)]
    return " ".join(words[:size]), " ".join([*words[:shared], *words[size:]])


def theory(similarity: float) -> float:
    return 1 - (1 - similarity**ROWS) ** BANDS


def found_pairs(folder: Path, num_pairs: int) -> dict[str, int]:
    """Number of pairs of each similarity whose second document is dropped for the first one.

    First documents are in the corpus a, second ones in b, in several shards and in another order.
    """
    numbers = random.Random(55)
    kinds = [kind for kind in PLANTED for _ in range(num_pairs)]
    numbers.shuffle(kinds)
    pairs = [pair(numbers, *PLANTED[kind]) for kind in kinds]
    order = numbers.sample(range(len(pairs)), len(pairs))
    for name, texts in (("a", [a for a, _ in pairs]), ("b", [pairs[i][1] for i in order])):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    table = [Corpus(corpus=name, files=f"{folder}/{name}.jsonl", weight=1) for name in "ab"]
    shard_bytes = (folder / "a.jsonl").stat().st_size // 3
    plan = make_plan(table, PlanSettings(shard_bytes=shard_bytes), declared={})
    write_plan(folder / "plan.json", plan)
    files = [folder / f"{batch.name}.rows" for batch in plan.tokenize_batches]
    for batch, file in zip(plan.tokenize_batches, files, strict=True):
        sign_documents(plan=folder / "plan.json", batch=batch.name, output=file)
    options = {"plan": folder / "plan.json", "output": folder / "all.rows"}
    find_near_duplicates(files, table=folder / "all.parquet", workers=2, **options)
    starts = {name: line_starts(folder / f"{name}.jsonl") for name in "ab"}
    found = dict.fromkeys(PLANTED, 0)
    for row in pq.read_table(folder / "all.parquet").to_pylist():
        second = order[starts["b"][row["byte"]]]
        assert (Path(row["file"]).stem, Path(row["kept_file"]).stem) == ("b", "a")
        assert starts["a"][row["kept_byte"]] == second  # no document is dropped for another reason
        found[kinds[second]] += 1
    return found


def line_starts(path: Path) -> dict[int, int]:
    """Number of the line that begins at each byte."""
    starts, position = {}, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            starts[position] = number
            position += len(line)
    return starts


@pytest.mark.parametrize(
    ("num_pairs", "tolerance"),
    [(1500, 0.04), pytest.param(40_000, 0.01, marks=pytest.mark.grid)],
)
def test_recall_is_as_in_theory_and_precision_perfect(
    tmp_path: Path, num_pairs: int, tolerance: float
) -> None:
    """The tolerances are three and four standard deviations for a recall of 0.56."""
    found = found_pairs(tmp_path, num_pairs)
    recall = {kind: number / num_pairs for kind, number in found.items()}
    expected = {kind: theory(common / (2 * n - common)) for kind, (n, common) in PLANTED.items()}
    assert recall == pytest.approx(expected, abs=tolerance)
    assert found["0"] == 0
