"""Settings for bad steps, data to leave out, and loss scaling."""

from typing import Any

import pytest

from tokamake.config.training import TrainSettings, without_added_defaults


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_data": [[0, 3]]}, r"\[0, 3\]: give the first and the last step, from 1"),
        ({"skip_data": [[5, 4]]}, r"\[5, 4\]: give the first and the last step, from 1"),
        ({"skip_data": [3, 4]}, "skip_data"),
        ({"loss_scaling": {"min_scale": 8, "initial_scale": 4}}, "min_scale: 8: is above initial"),
        ({"loss_scaling": {"hysteresis": 0}}, "hysteresis"),
        (
            {"loss_scaling": {"static": True}},
            r"loss_scaling\.static: true: precision empty has no loss scale; set precision to fp16",
        ),
        (
            {"loss_scaling": {"initial_scale": 128}, "precision": "bf16"},
            r"loss_scaling\.initial_scale: 128: precision bf16 has no loss scale; set precision to",
        ),
        ({"on_bad_step": {"not_finite": "journal"}}, "not_finite"),
        ({"on_bad_step": {"rate_factor": 1}}, "rate_factor"),
        (
            {"dropout": {"attention": 0.1}, "parallel": {"context_parallel_size": 2}},
            r"dropout\.attention: 0\.1: ring attention has no weights to drop",
        ),
        (
            {
                "zero_stage": 3,
                "parallel": {
                    "pipeline_parallel_size": 2,
                    "virtual_pipeline_size": 2,
                    "pipeline_schedule": "zbv",
                },
            },
            "zero_stage: 3: gradients would be wrong, because pipeline_schedule zbv",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings.model_validate(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": {"attention": 0.1}},
        {
            "dropout": {"attention": 0.1},
            "parallel": {"context_parallel_size": 2, "context_parallel_method": "ulysses"},
        },
        {"zero_stage": 3},
        {
            "zero_stage": 2,
            "parallel": {
                "pipeline_parallel_size": 2,
                "virtual_pipeline_size": 2,
                "pipeline_schedule": "zbv",
            },
        },
    ],
)
def test_settings_that_fit_together_are_accepted(settings: dict[str, Any]) -> None:
    TrainSettings.model_validate(settings)


def test_default_loss_scaling_may_be_stated_with_any_precision() -> None:
    """A run.yaml states all settings."""
    stated = {"loss_scaling": {"static": False, "window": 1000}, "precision": "bf16"}
    assert TrainSettings.model_validate(stated).precision == "bf16"


def test_settings_that_earlier_versions_lack_are_left_out_by_default() -> None:
    section = TrainSettings().model_dump(mode="json")
    left = without_added_defaults(section)
    assert section.keys() - left.keys() >= {"on_bad_step", "skip_data", "loss_scaling"}
    assert left["save_interval"] == 1000
    for name, value in (("skip_data", [[1, 1]]), ("loss_scaling", {"hysteresis": 2})):
        changed = TrainSettings.model_validate({"precision": "fp16", name: value})
        assert name in without_added_defaults(changed.model_dump(mode="json"))
