"""Settings of the config become options and `params` of rules."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.workflows import CONFIG
from tokamake.config.root import Config
from tokamake.config.training import ADDED_SETTINGS
from tokamake.validation import validate
from tokamake.workflow.options import RunSettings


def settings_in_params(**train: Any) -> dict[str, Any]:
    config = validate(Config, CONFIG | {"train": CONFIG["train"] | train}, "config")
    workflow: Any = SimpleNamespace(runs={"smoke": config})
    wildcards: Any = {"run": "smoke"}
    wildcards = type("Wildcards", (dict,), {"run": "smoke"})(wildcards)
    value: dict[str, Any] = json.loads(RunSettings(workflow).section("train")(wildcards))
    return value


def test_settings_that_are_newer_than_results_change_no_params_by_default() -> None:
    assert not settings_in_params().keys() & {*ADDED_SETTINGS}
    assert settings_in_params()["save_interval"] == 1000


@pytest.mark.parametrize("value", [True, False])
def test_a_newer_setting_with_another_value_is_in_params(value: bool) -> None:
    assert settings_in_params(verify_data=value)["verify_data"] is value
