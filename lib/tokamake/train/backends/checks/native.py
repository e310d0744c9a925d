"""Checks of the back end `native` (FSDP2)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokamake.config.training import TrainSettings

EXTRA_PASS = True


def check_settings(train: "TrainSettings") -> None:
    """Check that FSDP2 supports the settings of a run."""
    if train.deepspeed:
        raise ValueError(
            "deepspeed: only the back end deepspeed has these settings; set backend to deepspeed, "
            "or remove them"
        )
    schedule = train.parallel.pipeline_schedule
    if train.parallel.splits_backward and train.zero_stage == 3:
        # FSDP2 reshards weights before their gradients are computed, without an error.
        raise ValueError(
            f"zero_stage: 3: gradients would be wrong, because pipeline_schedule {schedule} "
            "computes gradients of weights late; set it to 2"
        )


def check_precision(train: "TrainSettings", device_type: str | None) -> None:
    """Accept every precision."""
