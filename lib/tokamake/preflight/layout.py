"""The layout of a run: facts are the config, the number of ranks and their device."""

from typing import TYPE_CHECKING

from tokamake import plugins
from tokamake.config.parallel import SPLIT_BACKWARD
from tokamake.config.resolved_run import Run
from tokamake.config.training import BACKEND_CHECKS, TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.model import FAMILIES

if TYPE_CHECKING:
    import torch


def check_ranks(train: TrainSettings, world_size: int) -> None:
    """Check that the sizes of the mesh and the batches fit the number of ranks."""
    data_parallel_size = train.parallel.data_parallel_size(world_size)
    train.batch_sizes.check_micro_batches(train.micro_batch_size, data_parallel_size)
    for size in train.batch_sizes.all:
        num_batches = size // (train.micro_batch_size * data_parallel_size)
        in_rampup = size < train.global_batch_size
        train.parallel.check_batches(num_batches, in_rampup=in_rampup)


def check_layout(run: Run, world_size: int) -> None:
    """Check that the ranks can share the model, its sequences and its batches."""
    check_ranks(run.train, world_size)
    run.train.parallel.check_architecture(run.architecture, run.train.sequence_length)


def check_auxiliary_loss(run: Run) -> None:
    """Refuse a pipeline for a family whose layers have auxiliary losses."""
    model = plugins.load(FAMILIES, run.architecture.family).Model
    size = run.train.parallel.pipeline_parallel_size
    if model.has_auxiliary_loss and size > 1:
        raise UserError(
            f"train.parallel.pipeline_parallel_size: {size}: a pipeline does not carry the "
            f"auxiliary losses of {run.architecture.family}; set 1"
        )


def check_precision(train: TrainSettings) -> None:
    """Refuse pipeline schedules that would add up gradients in low precision."""
    parallel = train.parallel
    split = parallel.pipeline_parallel_size > 1 and parallel.pipeline_schedule in SPLIT_BACKWARD
    if split and train.precision not in ("fp32", None):
        raise UserError(
            f"train.parallel.pipeline_schedule: {parallel.pipeline_schedule}: would add up "
            f"gradients in {train.precision}; use interleaved_1f1b, or train.precision fp32"
        )


def check_backend(run: Run, device: "torch.device | None" = None) -> None:
    """Refuse what the back end cannot do, or would do wrongly.

    Args:
        device: device of this rank; None where it is not known yet.
    """
    checks = plugins.load(BACKEND_CHECKS, run.train.backend)
    checks.check_run(run, device.type if device is not None else None)


def check_deterministic(run: Run, device: "torch.device") -> None:
    """Refuse an optimizer that has no deterministic algorithm on a device."""
    optimizer = run.train.optimizer
    if run.train.deterministic and device.type != "cpu" and optimizer.facts.sampled_labels:
        raise UserError(
            f"train.deterministic: labels that {optimizer.name} draws need cumulative sums, which "
            f"torch has no deterministic algorithm for on {device.type}; set it to false, or use "
            "another optimizer"
        )
