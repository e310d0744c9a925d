"""Settings with which a run can continue, or not."""

from typing import Any

from tests.support.runs import (
    ARCHITECTURE,
)
from tokamake import plugins
from tokamake.config.fields import dotted
from tokamake.config.objective import SECTIONS
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight import changes
from tokamake.preflight.initial_checkpoint import state_keys
from tokamake.preflight.run_record import WITHOUT_EFFECT, weight_settings


def effective_names() -> set[str]:
    settings = TrainSettings(optimizer=OptimizerSettings(name="sgd")).model_dump(
        exclude={*SECTIONS}
    )
    return {
        name for name in dotted({"train": settings}) if name.split(".")[1] not in WITHOUT_EFFECT
    }


def test_skipped_steps_have_other_samples_with_another_batch_size() -> None:
    settings = {"train.skip_data": [[5, 6]], "train.global_batch_size": 8}
    changed = {**settings, "train.global_batch_size": 4}
    lines = changes.compare_settings(settings, changed, step=5).lines
    assert lines == (
        "train.global_batch_size 8 -> 4",
        "train.skip_data [[5, 6]] (its steps have other samples now)",
    )
    assert len(changes.compare_settings(settings, changed, step=6).lines) == 1


def test_settings_that_were_added_or_removed_are_changes_and_hashes_are_not_shown() -> None:
    earlier = {"seed": 1, "rate": 0.1, "momentum": 0.9, "none": None, "weights": "a" * 64}
    current = {"seed": 1, "rate": 0.2, "nesterov": True, "weights": "b" * 64}
    assert changes.compare_settings(earlier, current).lines == (
        *("rate 0.1 -> 0.2", "nesterov empty -> True", "weights differs"),
        "momentum 0.9 -> empty",
    )


def test_each_setting_is_one_to_continue_with_or_not() -> None:
    """A new setting must be put into one of these lists."""
    fixed = {"train.finetune", "train.load_optimizer"}
    fixed |= {"train.objective", "train.sequence_length", "train.optimizer.name"}
    continued = {
        *("train.global_batch_size", "train.rampup_batch_size", "train.gradient_clipping"),
        *("train.train_steps", "train.train_samples", "train.train_tokens", "train.precision"),
        *("train.split_rule", "train.blend", "train.within_corpus", "train.separate_last_epoch"),
        *("train.drop_last_partial_sequence", "train.reset_position_ids"),
        *("train.reset_attention_mask", "train.eod_mask_loss", "train.skip_data"),
    }
    names = effective_names()
    sections = {name for name in names if name.count(".") > 1} - fixed
    assert {name.split(".")[1] for name in sections} == {
        *("dropout", "fim", "loss_scaling", "masking", "mtp", "optimizer", "router", "schedule")
    }
    assert names - sections == fixed | continued
    refused = {name for name in names if changes.compare_settings({name: 1}, {name: 2}).obstacles}
    assert refused == fixed


def test_an_empty_section_of_an_objective_has_its_defaults() -> None:
    def settings(section: dict[str, Any] | None) -> dict[str, Any]:
        return weight_settings(TrainSettings(objective="ict", ict=section))  # type: ignore[call-arg]

    assert settings(None) == settings({}) == settings({"topk": [1, 2]})
    assert settings(None) != settings({"query_in_block_probability": 0.5})
    assert "ict" not in weight_settings(TrainSettings())


def test_momentum_alone_decides_which_states_an_optimizer_has() -> None:
    """Other hyperparameters may change, even to 0."""
    for name in plugins.names("optim"):
        if name == "adamw_8bit":
            continue
        used = plugins.constant("optim", name, "SETTINGS")
        whole = state_keys(ARCHITECTURE, OptimizerSettings(name=name))
        for setting in {*used} - {"learning_rate"}:
            try:
                settings = OptimizerSettings.model_validate({"name": name, setting: 0})
                changed = state_keys(ARCHITECTURE, settings) != whole
            except (ValueError, UserError):  # 0 is not allowed
                continue
            old, new = {f"train.optimizer.{setting}": 0.9}, {f"train.optimizer.{setting}": 0.0}
            assert not changed or changes.compare_settings(old, new).obstacles, (name, setting)
