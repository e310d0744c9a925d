"""Training settings that earlier versions did not have."""

from typing import Any

from tokamake.config.training import TrainSettings

ADDED_SETTINGS = (
    *("verify_data", "keep_last", "keep_every", "keep_best"),
    *("init_timeout_seconds", "train_timeout_seconds"),
    *("on_bad_step", "skip_data", "loss_scaling", "log_style", "trackers"),
    *("profile_steps", "log_layer_norms", "log_corpus_losses", "load_optimizer"),
    *("deepspeed", "dropout", "objective", "masking", "pack_samples", "log_settings"),
)
"""Training settings that earlier versions did not have. The workflow leaves them out of `params` of
rules, and `train` out of the run's digest, where they have their default; otherwise, an update
would train all runs again."""


def without_added_defaults(train: dict[str, Any]) -> dict[str, Any]:
    """Settings of `train` as JSON, without fields of `ADDED_SETTINGS` with their defaults."""
    defaults = TrainSettings().model_dump(mode="json", include={*ADDED_SETTINGS})
    return {
        name: value
        for name, value in train.items()
        if name not in defaults or value != defaults[name]
    }
