"""A resolved run before it starts: `resolve` knows its files, `train` also ranks and device.

No tensor is read. Checks raise `UserError`.
"""

import math
from typing import TYPE_CHECKING

from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.data import IndexContent, check_index, check_vocabulary
from tokamake.preflight.model import check_layout, check_objective
from tokamake.preflight.packages import check_training_packages
from tokamake.preflight.tokenizer import check_embeddings, check_fim

if TYPE_CHECKING:
    import torch


def check_resolved(run: Run, index: IndexContent) -> None:
    """Check a run against its files, before the number of ranks and the device are known."""
    check_index(run, index)
    check_objective(run.train, run.architecture)
    check_layout(run.train, run.architecture)
    check_vocabulary(run.architecture, index, data_root=run.data_root)
    check_fim(run.train.fim, run.tokenizer)
    if run.train.fim.rate and run.tokenizer:
        check_embeddings(run.tokenizer, run.architecture)


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
    check_training_packages(run.train)
    check_ranks(run.train, world_size)
    check_layout(run.train, run.architecture)
    check_precision(run.train, device)
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
    """Check that a finished run has changed its initial weights.

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


def check_ranks(train: TrainSettings, world_size: int) -> None:
    """Check that the sizes of the mesh and the batches fit the number of ranks."""
    data_parallel_size = train.parallel.data_parallel_size(world_size)
    train.batch_sizes.check_micro_batches(train.micro_batch_size, data_parallel_size)
    for size in train.batch_sizes.all:
        num_batches = train.batch_sizes.num_micro_batches(
            train.micro_batch_size, data_parallel_size, size=size
        )
        in_rampup = size < train.global_batch_size
        train.parallel.check_batches(num_batches, in_rampup=in_rampup)


def check_some_ranks(train: TrainSettings) -> None:
    """Check that there are numbers of ranks on which the layout and the batches fit."""
    parallel = train.parallel
    context, experts = parallel.context_parallel_size, parallel.expert_parallel_size
    fewest = parallel.data_parallel_replicate_size * (experts // math.gcd(experts, context))
    most = max(fewest, train.global_batch_size // train.micro_batch_size)
    shares = parallel.tensor_parallel_size * context * parallel.pipeline_parallel_size
    first: UserError | None = None
    for data_parallel_size in range(fewest, most + 1, fewest):
        try:
            check_ranks(train, shares * data_parallel_size)
        except UserError as error:
            first = first or error
        else:
            return
    assert first, "the first number of ranks was tried"
    raise first


def check_precision(train: TrainSettings, device: "torch.device") -> None:
    """Check the precision on a device, which has decided it if the config does not."""
    try:
        train.check_precision(device.type)
    except ValueError as error:
        raise UserError(f"train.{error}") from None


def check_deterministic(run: Run, device: "torch.device") -> None:
    """Refuse settings that need a deterministic algorithm where a device has none."""
    optimizer, interval = run.train.optimizer, run.train.verify_interval
    if interval and device.type != "cpu" and not run.train.deterministic:
        raise UserError(
            f"train.verify_interval: {interval}: kernels of {device.type} may round differently "
            "each time; set train.deterministic to true, or remove it"
        )
    if run.train.deterministic and device.type != "cpu" and not optimizer.facts.deterministic:
        raise UserError(
            f"train.deterministic: true: optimizer {optimizer.name} has no deterministic algorithm "
            f"on {device.type}; set it to false, or use another optimizer"
        )
