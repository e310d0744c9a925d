"""Settings of a command line replace single values of a config, as Snakemake's --config does."""

import pytest

from tokamake.config.overrides import merged, read_overrides
from tokamake.errors import UserError


def test_settings_are_nested_yaml() -> None:
    arguments = ["train.optimizer.name=adamw", "train.split=[9, 1]", "seed=5"]
    assert read_overrides(arguments) == {
        "train": {"optimizer": {"name": "adamw"}, "split": [9, 1]},
        "seed": 5,
    }


def test_an_argument_without_a_value_is_refused() -> None:
    with pytest.raises(UserError, match=r"^report: not a setting; write SECTION\.KEY=VALUE"):
        read_overrides(["report"])


def test_a_replaced_value_leaves_the_rest_of_its_section() -> None:
    values = {"train": {"split": [1], "optimizer": {"name": "sgd", "rate": 1}}, "model": None}
    overrides = {"train": {"optimizer": {"name": "lion"}}, "model": {"checkpoint": "a"}}
    assert merged(values, overrides) == {
        "train": {"split": [1], "optimizer": {"name": "lion", "rate": 1}},
        "model": {"checkpoint": "a"},
    }
    assert values["train"] == {"split": [1], "optimizer": {"name": "sgd", "rate": 1}}
