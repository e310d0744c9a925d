"""A resolved run before it starts: `resolve` knows its files, `train` also ranks and device.

No tensor is read. Checks raise `UserError`.
"""

from typing import TYPE_CHECKING

from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.preflight.data import IndexContent, check_index, check_vocabulary
from tokamake.preflight.layout import (
    check_auxiliary_loss,
    check_backend,
    check_deterministic,
    check_layout,
    check_precision,
)
from tokamake.preflight.model import check_fim, check_objective
from tokamake.preflight.packages import check_packages

if TYPE_CHECKING:
    import torch


def check_resolved(run: Run, index: IndexContent) -> None:
    """Check a run against its files, before the number of ranks and the device are known."""
    check_index(run, index)
    check_objective(run.train, run.architecture)
    run.train.parallel.check_architecture(run.architecture, run.train.sequence_length)
    check_vocabulary(run.architecture, index, data_root=run.data_root)
    if run.train.fim.rate:
        check_fim(run.train.fim, run.architecture, tokenizer=run.tokenizer)
    check_precision(run.train)
    check_backend(run)


def check_run(
    run: Run, *, index: IndexContent | None, world_size: int, device: "torch.device"
) -> None:
    """Check a run on the ranks that are about to train it.

    Args:
        index: content of its index.json; None: the run reads no samples.
    """
    if index is not None:
        check_index(run, index)
    check_objective(run.train, run.architecture)
    check_on_ranks(run, world_size=world_size, device=device)


def check_on_ranks(run: Run, *, world_size: int, device: "torch.device") -> None:
    """Check a run against its ranks and their device; runs that finetune, too."""
    check_packages(run.train)
    check_layout(run, world_size)
    check_auxiliary_loss(run)
    check_precision(run.train)
    check_backend(run, device)
    check_deterministic(run, device)


def check_until_step(run: Run, until_step: int | None) -> None:
    """Check that the step at which this job ends, if any, lies within the run."""
    if until_step is not None and not run.step < until_step <= run.train.train_steps:
        raise UserError(
            f"until_step: {until_step}: the run goes from step {run.step} to "
            f"{run.train.train_steps}; give one between them"
        )


def step_of_samples(run: Run, samples: int) -> int:
    """Last step of a job that ends before it consumes more samples than these."""
    first, last = run.consumed_samples, run.train.batch_sizes.samples(run.train.train_steps)
    if first < samples <= last:
        step = run.train.batch_sizes.whole_steps(samples)
        if step > run.step:
            return step
    length = run.train.sequence_length
    raise UserError(
        f"until_samples: {samples} ({samples * length:,} tokens): the run goes from {first} to "
        f"{last} samples, {run.train.global_batch_size} a step; give a number in it, at least one "
        "step"
    )


def check_updated(run: Run, *, step: int, updates: int | None) -> None:
    """Check that the weights of a finished run are not those that it began with.

    Args:
        updates: steps that have updated the weights; None if that is not known.
    """
    if updates != 0 or not run.step < step == run.train.train_steps:
        return
    reason = "the loss or the gradient norm was never finite; lower train.optimizer.learning_rate"
    if run.train.precision == "fp16":
        reason = "gradients always overflowed; lower train.loss_scaling.initial_scale"
    if run.train.skip_data:
        reason += ", and check train.skip_data"
    raise UserError(
        f"{run.output}: no step has updated the weights: {reason}. Set train.on_change to restart, "
        "and start again"
    )
