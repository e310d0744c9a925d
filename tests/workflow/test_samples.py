"""Inputs and options of the rules that divide the data of a run."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.workflow_configs import read_config, train, wildcards
from tokamake.workflow.samples import SampleRules

pytestmark = pytest.mark.usefixtures("workspace_here")

SMOKE = wildcards(run="smoke")


def make_rules(**config: Any) -> SampleRules:
    return SampleRules(read_config(**config))


def epochs_table(sets: str = "") -> str:
    rows = (f"code\tresults/raw/code/*\t2\t{sets}\n", "docs\tresults/raw/docs/*\t0.5\t" + sets)
    return "corpus\tfiles\tepochs\tsets\n" + "".join(rows) + "\n"


def test_weights_depend_on_the_length_of_a_run_only_with_epochs() -> None:
    assert make_rules().length_options(SMOKE) == []
    samples = 40 * 16
    rules = make_rules(table=epochs_table())
    assert rules.length_options(SMOKE) == ["--split=80,10,10", f"--train-tokens={samples * 32}"]
    rules = make_rules(table=epochs_table(), train=train(train_steps=None))
    assert rules.length_options(SMOKE) == ["--split=80,10,10"]


def test_the_index_has_the_samples_of_the_run() -> None:
    assert make_rules().sample_options(SMOKE) == ["--train-samples=640", "--valid-samples=16"]
    rules = make_rules(train=train(evaluation_steps=0))
    assert rules.sample_options(SMOKE) == ["--train-samples=640", "--valid-samples=0"]


def test_epochs_decide_the_samples_of_a_run_without_a_length() -> None:
    settings = train(train_steps=None)
    rules = make_rules(table=epochs_table(), train=settings)
    expected = ["--epochs=code=2.0", "--epochs=docs=0.5", "--valid-samples=16"]
    assert rules.sample_options(SMOKE) == expected
    table = (
        "corpus\tfiles\tepochs\tsets\n"
        "code\tresults/raw/code/*\t2\t\ndocs\tresults/raw/docs/*\t\tvalid=0:1\n"
    )
    rules = make_rules(table=table, train=settings)
    assert rules.sample_options(SMOKE) == ["--epochs=code=2.0", "--valid-samples=16"]


# Held-out splits


def sets_table(sets: str) -> str:
    row = f"docs\tresults/raw/docs/*\t1\t{sets}\n"
    return f"corpus\tfiles\tweight\tsets\ncode\tresults/raw/code/*\t1\t\n{row}"


def test_each_held_out_split_has_its_weighting_file() -> None:
    rules = make_rules(table=sets_table("train=0:0.8 hard=0.8:0.9 test=0.9:1"))
    files = SimpleNamespace(held_out=["a.txt", "b.txt"])
    assert rules.held_out_options(SMOKE, files) == [
        "--held-out=hard=a.txt",
        "--held-out=test=b.txt",
    ]
    with pytest.raises(ValueError, match="zip"):
        rules.held_out_options(SMOKE, SimpleNamespace(held_out=["a.txt"]))


@pytest.mark.parametrize(
    ("sets", "split", "names"),
    [
        ("train=0:0.8 hard=0.8:0.9 test=0.9:1", "80,10,10", ["test"]),
        ("train=0:0.8 hard=0.8:0.9 valid=0.9:1", "90,10,0", ["hard", "valid"]),
        ("train=0:0.8 hard=0.8:1", "80,10,10", []),  # the shared split has a test split
        ("", "80,10,10", []),
    ],
)
def test_the_test_split_is_evaluated_or_else_validation_splits(
    sets: str, split: str, names: list[str]
) -> None:
    rules = make_rules(table=sets_table(sets), train=train(split=split))
    paths = [f"results/data/smoke.weights.{name}.txt" for name in names]
    assert rules.evaluation_weights(SMOKE) == paths
    options = rules.evaluation_options(SMOKE, SimpleNamespace(held_out=paths))
    assert options == [f"--held-out={name}={path}" for name, path in zip(names, paths, strict=True)]
