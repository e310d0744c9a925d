"""Corpora that name their splits: each split has a weighting file; epochs count training only."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.data.mixture.test_weigh import write_metadata
from tokamake.data.mixture.weigh import weigh
from tokamake.data.mixture.weighting_file import WeightedPrefix, read_weighting_file
from tokamake.errors import UserError

DATASETS = [("a", 600), ("a", 200), ("b", 100), ("v", 50)]
TABLE = """\
corpus\tfiles\tweight\tsets
a\tx\t3\ttrain=0:0.75 valid=0.75:1 both
b\tx\t1\t
v\tx\t\tvalid hard=0:0.5 both test=0.5:1
"""


def build(folder: Path, table: str, **options: Any) -> dict[str, list[WeightedPrefix]]:
    (folder / "corpora.tsv").write_text(table)
    weigh(
        corpora=folder / "corpora.tsv",
        metadata=write_metadata(folder, DATASETS),
        output=folder / "weights.txt",
        **options,
    )
    return {path.name: read_weighting_file(path) for path in sorted(folder.glob("weights*.txt"))}


def test_each_split_has_its_weighting_file(tmp_path: Path) -> None:
    files = build(tmp_path, TABLE)
    assert {
        name: [(line.prefix[7:], line.part) for line in lines] for name, lines in files.items()
    } == {
        "weights.txt": [("a-0000", (0, 0.75)), ("a-0001", (0, 0.75)), ("b-0002", None)],
        "weights.valid.txt": [("a-0000", (0.75, 1)), ("a-0001", (0.75, 1)), ("v-0003", (0, 1))],
        "weights.both.txt": [("a-0000", (0, 1)), ("a-0001", (0, 1)), ("v-0003", (0, 1))],
        "weights.hard.txt": [("v-0003", (0, 0.5))],
        "weights.test.txt": [("v-0003", (0.5, 1))],
    }
    for lines in files.values():
        assert math.isclose(math.fsum(line.weight for line in lines), 1)
    assert [line.weight for line in files["weights.txt"]] == [0.75 * 0.75, 0.75 * 0.25, 0.25]
    # v states no weight, so tokens count: a quarter of the 800 tokens of a, and 50 of v.
    valid_weights = [line.weight for line in files["weights.valid.txt"]]
    assert valid_weights == pytest.approx([0.8 * 0.75, 0.8 * 0.25, 0.2])


def test_a_split_uses_weights_if_all_its_corpora_state_them(tmp_path: Path) -> None:
    files = build(tmp_path, TABLE.replace("v\tx\t\t", "v\tx\t2\t"))
    valid_weights = [line.weight for line in files["weights.valid.txt"]]
    assert valid_weights == pytest.approx([0.6 * 0.75, 0.6 * 0.25, 0.4])
    assert [line.weight for line in files["weights.txt"]] == [0.75 * 0.75, 0.75 * 0.25, 0.25]


def test_epochs_count_training_documents(tmp_path: Path) -> None:
    table = (
        "corpus\tfiles\tepochs\tsets\n"
        "a\tx\t2\ttrain=0:0.75 valid=0.75:1\nb\tx\t4\t\nv\tx\t\tvalid\n"
    )
    drawn = {"a": 2 * 600, "b": 4 * 80}
    for options in ({}, {"train_tokens": 1520}):
        lines = build(tmp_path, table, split="80,10,10", **options)["weights.txt"]
        for corpus, tokens in drawn.items():
            share = math.fsum(line.weight for line in lines if line.corpus == corpus)
            assert math.isclose(share, Fraction(tokens, sum(drawn.values())))
    with pytest.raises(UserError, match="its epochs need 1,520 tokens, the training has 1,000"):
        build(tmp_path, table, split="80,10,10", train_tokens=1000)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "corpus\tfiles\tsets\na\tx\tvalid\nb\tx\ttest\nv\tx\ttest\n",
            "no corpus trains; add `train` to the sets column",
        ),
        ("corpus\tfiles\tweight\tsets\na\tx\t1\ttrain=0:2\n", r"tsv:2: sets: .*START:END from"),
        ("corpus\tfiles\tweight\tsets\na\tx\t1\ta a\n", "tsv:2: sets: .*a is repeated"),
        (
            "corpus\tfiles\tepochs\tsets\na\tx\t1\tvalid\n",
            "tsv:2: sets: 'valid': not used for training, so epochs has no effect",
        ),
        ("corpus\tfiles\tweight\tsets\na\tx\t\ttrain\n", "tsv:2: no weight, epochs or"),
    ],
)
def test_invalid_splits_in_the_table_are_refused(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(tmp_path, table)


def test_a_split_without_training_documents_is_refused(tmp_path: Path) -> None:
    table = "corpus\tfiles\tweight\na\tx\t1\nb\tx\t1\nv\tx\t1\n"
    with pytest.raises(UserError, match="'0,1,1': nothing to train on"):
        build(tmp_path, table, split="0,1,1")
