"""Shares of corpora in the training samples."""

from pathlib import Path
from typing import Any

import pytest

from tokamake.data.corpus.corpora import Corpus
from tokamake.data.mixture.shares import TOLERANCE, seen_tokens, shares
from tokamake.errors import UserError

TABLE = Path("corpora.tsv")
TOKENS = {"a": 100, "b": 1600}


def corpora(*columns: dict[str, Any]) -> list[Corpus]:
    return [
        Corpus(corpus=name, files="*", **each) for name, each in zip("ab", columns, strict=True)
    ]


def shares_of(*columns: dict[str, Any], train_tokens: int | None = None) -> tuple[float, float]:
    result = shares(corpora(*columns), TOKENS, train_tokens=train_tokens, table=TABLE)
    return result["a"], result["b"]


def refused(*columns: dict[str, Any], train_tokens: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        shares_of(*columns, train_tokens=train_tokens)
    return str(caught.value)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (({"weight": 1}, {"weight": 3}), (0.25, 0.75)),
        (({"weight": 1e308}, {"weight": 1e308}), (0.5, 0.5)),
        (({"epochs": 4}, {"epochs": 1}), (0.2, 0.8)),
        (({"epochs": 2}, {"weight": 5}), (0.25, 0.75)),
    ],
)
def test_shares_by_weights_and_epochs(
    columns: tuple[dict[str, Any], ...], expected: tuple[float, float]
) -> None:
    assert shares_of(*columns, train_tokens=800 if "weight" in columns[1] else None) == expected


@pytest.mark.parametrize(("temperature", "share"), [(1, 100 / 1700), (2, 0.2), (4, 1 / 3)])
def test_temperatures_raise_the_share_of_small_corpora(temperature: float, share: float) -> None:
    columns = {"temperature": temperature}
    assert shares_of(columns, columns)[0] == pytest.approx(share, rel=1e-12)


def test_epochs_must_fit_the_length_of_the_training() -> None:
    epochs = ({"epochs": 2}, {"epochs": 1})
    assert shares_of(*epochs, train_tokens=1800)
    assert shares_of(*epochs, train_tokens=int(1800 / (1 + TOLERANCE)) + 1)
    assert refused(*epochs, train_tokens=1700) == (
        "corpora.tsv: its epochs need 1,800 tokens, the training has 1,700 (--train-tokens); lower "
        "epochs or train longer"
    )
    mixed = ({"epochs": 2}, {"weight": 1})
    assert "its epochs need 200 tokens, the training has 199" in refused(*mixed, train_tokens=199)
    assert refused(*mixed, train_tokens=200) == (
        "corpora.tsv: its epochs take all 200 tokens of the training and leave nothing to b; lower "
        "epochs or train longer"
    )
    assert refused(*mixed) == (
        "corpora.tsv: some corpora state epochs and some do not, so shares depend on how long "
        "the training is; give --train-tokens, or epochs to all"
    )


def test_a_share_that_no_float_holds_is_refused() -> None:
    assert refused({"weight": 1e-308}, {"weight": 1e308}) == (
        'corpora.tsv: the share of corpus "a" is too small for a float; raise its weight or '
        "temperature"
    )


def test_tokens_that_training_sees_follow_named_splits_and_shares() -> None:
    rows = corpora({"weight": 1, "sets": "train=0.5:0.75 valid=0.75:1"}, {"weight": 1})
    assert seen_tokens(rows, TOKENS, split=None) == {"a": 25, "b": 1600}
    assert seen_tokens(rows, TOKENS, split="3,1,0") == {"a": 25, "b": 1200}
    assert seen_tokens(rows, {"a": 1, "b": 0}, split="3,1,0") == {"a": 1, "b": 1}


def test_a_split_that_trains_on_nothing_is_refused_unless_all_corpora_have_splits() -> None:
    own = {"weight": 1, "sets": "train=0:1"}
    assert seen_tokens(corpora(own, own), TOKENS, split="0,1,0") == TOKENS
    with pytest.raises(UserError) as caught:
        seen_tokens(corpora(own, {"weight": 1}), TOKENS, split="0,1,0")
    message = "split: '0,1,0': nothing to train on; give a share as the first number"
    assert str(caught.value) == message
