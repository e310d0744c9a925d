"""Warnings about splits name a remedy, and are silent where there is none."""

import pytest

from tokamake.config.root import Config
from tokamake.data.corpus.corpora import Corpus
from tokamake.estimate.data import CorpusEstimate
from tokamake.estimate.workflow import _about_splits


def warnings(split: str, *, documents: int, tokens: int, sets: str = "") -> list[str]:
    row = Corpus(corpus="web", files="raw/*", sets=sets, weight=1)
    found = CorpusEstimate("web", 1, 4 * tokens, documents, tokens, None, "counted")
    run = Config(run="a", train={"split": split, "train_steps": 1})
    return _about_splits(run, [row], corpora={"web": found})


@pytest.mark.parametrize(
    ("split", "size", "remedy"),
    [
        ("98,1,1", (4_000, 40_000_000), "40 documents, 400,000 tokens"),
        ("98,1,1", (4_000, 40_000_000), "give it 3 %"),  # 100 of 4,000 documents
        ("98,1,1", (90_000, 1_000_000), "give it 5 %"),  # 50,000 of a million tokens
        ("98,1,1", (0, 1_000_000), "about 10,000 tokens"),  # documents are not known
        ("90,5,5", (59, 1_900_000), ""),  # three in a new project; no share would help
        ("90,5,5", (1_000, 100_000), ""),
        ("98,1,1", (90_000, 90_000_000), ""),  # large enough
        ("98,2,0", (4_000, 40_000_000), ""),  # none is wanted
    ],
)
def test_a_small_test_split_is_named_where_a_larger_share_helps(
    split: str, size: tuple[int, int], remedy: str
) -> None:
    found = warnings(split, documents=size[0], tokens=size[1])
    assert len(found) == bool(remedy), found
    assert remedy in "".join(found)


def test_a_test_set_of_the_table_is_named_by_its_column() -> None:
    found = warnings(
        "98,1,1", documents=1_000, tokens=9_000_000, sets="train=0:0.9 valid=0.9:0.95 test=0.95:1"
    )
    assert len(found) == 1
    assert "name more of them in the column sets" in found[0]
