"""Documents that training, validation and tests need, from the config and the table of corpora."""

from pathlib import Path

import pytest
import yaml

from tests.support.workflow_configs import read_config, refused, train, write_runs
from tests.support.workflows import ARCHITECTURE
from tokamake.config.training import TrainSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.preflight.data import held_out_splits

pytestmark = pytest.mark.usefixtures("workspace_here")

OWN_SETS = "corpus\tfiles\tweight\tsets\ncode\tresults/raw/code/*\t2\t{}\n"


@pytest.mark.parametrize(
    ("split", "sets", "remedy"),
    [
        ("90,0,10", "", "; give the second number a share, name"),
        ("80,10,10", "train=0:0.9 test=0.9:1", " (all corpora have sets of their own); name"),
    ],
)
def test_validation_needs_documents(split: str, sets: str, remedy: str) -> None:
    settings = train(split=split)
    assert refused(table=OWN_SETS.format(sets), train=settings) == (
        f"my.yaml: train: split: {split!r}: nothing to validate on{remedy} a validation split in "
        "the column sets of the table of corpora, or set evaluation_steps to 0"
    )
    assert read_config(table=OWN_SETS.format(sets), train={**settings, "evaluation_steps": 0})


def test_training_needs_documents() -> None:
    settings = train(split="0,50,50")
    assert refused(train=settings).startswith(
        "my.yaml: train: split: '0,50,50': nothing to train on; give the first number a share"
    )
    sets = "corpus\tfiles\tweight\tsets\ncode\tresults/raw/code/*\t2\ttrain=0:0.9 valid=0.9:1\n"
    assert read_config(table=sets, train=settings)


def test_a_named_split_is_enough_to_validate_on() -> None:
    table = OWN_SETS.format("train=0:0.9 hard=0.9:1")
    assert read_config(table=table, train=train(split="100,0,0")).splits == ["hard"]


def corpus(sets: str) -> Corpus:
    return Corpus(corpus="web", files="*", weight=1, sets=sets)


@pytest.mark.parametrize(
    ("split", "sets", "splits"),
    [
        ("80,10,10", [""], ["valid", "test"]),
        ("90,10,0", [""], ["valid"]),
        ("90,10", [""], ["valid"]),
        ("90,0,10", [""], ["test"]),
        ("100,0,0", [""], []),
        ("80,10,10", ["train=0:1"], []),
        ("80,10,10", ["train=0:0.9 hard=0.9:1"], ["hard"]),
        ("80,10,10", ["train=0:0.9 hard=0.9:1", ""], ["valid", "test", "hard"]),
        ("90,10,0", ["train=0:0.8 hard=0.8:0.9 test=0.9:1", ""], ["valid", "test", "hard"]),
        ("80,10,10", ["hard=0:1", "easy=0:1"], ["hard", "easy"]),
    ],
)
def test_held_out_splits_begin_with_valid_and_test(
    split: str, sets: list[str], splits: list[str]
) -> None:
    settings = TrainSettings(split=split)
    assert held_out_splits(settings, iter(map(corpus, sets))) == splits


@pytest.mark.parametrize(
    ("split", "report"),
    [
        ("90,10", "tokamake: run smoke: no test split: evaluation uses the split valid\n"),
        ("100,0,0", "tokamake: run smoke: no test split: there is no evaluation\n"),
        ("90,0,10", ""),
    ],
)
def test_the_main_process_reports_a_run_without_a_test_split(
    capsys: pytest.CaptureFixture[str], split: str, report: str
) -> None:
    settings = train(split=split, evaluation_steps=0)
    read_config(train=settings)
    assert not capsys.readouterr().err
    read_config(train=settings, is_main_process=True)
    assert capsys.readouterr().err == report


def test_a_model_that_is_not_evaluated_needs_no_test_split(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("bert.yaml").write_text(
        yaml.safe_dump({**ARCHITECTURE, "family": "bert", "num_key_value_heads": 4})
    )
    read_config(
        train=train(split="90,10,0", objective="masked"),
        model={"architecture": "bert.yaml"},
        tokenizer={"kind": "wordpiece", "vocab_size": 500},
        tokenize={"split_sentences": True, "append_eod": False},
        is_main_process=True,
    )
    assert "no test split" not in capsys.readouterr().err


def test_runs_with_the_same_held_out_split_share_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = ("a 90,10", "b 90,10", "c 90,0,10", "d 100,0,0", "e 90,10")
    runs = write_runs("run train.split train.evaluation_steps", *(f"{row} 0" for row in rows))
    read_config(runs=runs, is_main_process=True)
    assert capsys.readouterr().err.splitlines() == [
        "tokamake: run a and 2 other runs: no test split: evaluation uses the split valid",
        "tokamake: run d: no test split: there is no evaluation",
    ]
