"""The only place that touches private names of DeepSpeed. Checked with DeepSpeed 0.19.

tests/train/backends/test_deepspeed_internals.py has a test for each function, so that a version of
DeepSpeed that changes one of its names fails there.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.parallel.axis import Axis
from tokamake.parallel.collectives import reduce_scatter


class Partition(NamedTuple):
    """This rank's elements of a parameter in DeepSpeed's fp32 weights."""

    start: int
    """Offset of the elements in the flattened parameter."""
    flat: Tensor
    """Buffer of weights, which is one parameter for the optimizer."""
    offset: int
    """Offset of the elements in the buffer."""
    size: int
    """Number of elements."""


def disable_shm_extension() -> None:
    """Keep DeepSpeed from compiling, at start, an extension that training does not use."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def reduce_at_end(engine: Any, enabled: bool) -> None:
    """Choose whether the engine reduces gradients in `allreduce_gradients` alone.

    DeepSpeed's own pipeline engine sets this attribute for the same purpose.
    """
    engine.pipeline_parallelism = enabled


def reduce(engine: Any) -> None:
    """Reduce the gradients of a step, for stages 0 and 1.

    DeepSpeed's optimizer for stage 1 in bf16 would all-reduce them, at twice the bytes. Here each
    rank gets the mean of its partition, and zeros elsewhere.
    """
    optimizer = engine.optimizer
    engine.set_gradient_accumulation_boundary(True)
    if not has_whole_gradients(optimizer):
        engine.allreduce_gradients()
        return
    for flat, own, group in zip(
        optimizer.fp32_groups_gradients_flat,
        optimizer.fp32_groups_gradient_flat_partition,
        optimizer.real_dp_process_group,
        strict=True,
    ):
        axis = Axis(dist.get_rank(group), dist.get_world_size(group), group)
        total = reduce_scatter(flat, axis, dim=0)
        flat.zero_()
        torch.div(total, axis.size, out=own)


def has_whole_gradients(optimizer: Any) -> bool:
    """Whether this is the optimizer for stage 1 in bf16, which shards states alone."""
    return hasattr(optimizer, "fp32_groups_gradient_flat_partition")


def sum_norm_over_all_ranks(optimizer: Any) -> None:
    """Let the optimizer for stage 1 in bf16 compute the norm from the partitions of all ranks."""
    if has_whole_gradients(optimizer):
        optimizer.mpu = copy.copy(optimizer.mpu)
        optimizer.mpu.get_model_parallel_group = lambda: dist.group.WORLD


def partition_each(
    parameters: Iterable[Any], *, config: dict[str, Any], mpu: Any, dtype: torch.dtype
) -> None:
    """Allocate each parameter and partition it before the next one, for stage 3.

    DeepSpeed would otherwise allocate and round all parameters of this rank before it partitions
    the first. Values are undefined until `publish`.
    """
    import deepspeed

    # Before it, DeepSpeed takes the number of ranks to be 1.
    communication = deepspeed.accelerator.get_accelerator().communication_backend_name()
    deepspeed.init_distributed(dist_backend=communication, verbose=False)
    convert: Callable[[list[Any]], None] | None = None
    for parameter in parameters:
        parameter.data = torch.empty_like(
            parameter, dtype=dtype, memory_format=torch.contiguous_format
        )
        if convert is None:
            module, group = torch.nn.ParameterList([parameter]), mpu.get_data_parallel_group()
            deepspeed.zero.Init(
                module, data_parallel_group=group, config_dict_or_path=config, mpu=mpu
            )
            convert = parameter.convert_to_zero_parameters
        else:
            convert([parameter])


def mark(parameter: Any, *, counts: bool, is_replica: bool) -> None:
    """Set the attributes that DeepSpeed's gradient norm reads.

    Args:
        counts: whether this rank's part counts in the norm.
        is_replica: whether another pipeline stage counts the same parameter.
    """
    parameter.model_parallel = counts
    parameter.ds_pipe_replicated = is_replica


def gradient(optimizer: Any, parameter: Any) -> Tensor | None:
    """The sum of a parameter's gradients before they are reduced, for stages 0 and 1."""
    if hasattr(optimizer, "get_gradient_for_reduction"):
        total: Tensor | None = optimizer.get_gradient_for_reduction(parameter)
        return total
    return getattr(parameter, "_hp_grad", parameter.grad)


def partition(optimizer: Any, parameter: Any, stage: int) -> Partition:
    """This rank's elements of a parameter, for stages 1 to 3."""
    return (_stage_3 if stage == 3 else _stages_1_and_2)(optimizer, parameter)


def _stages_1_and_2(optimizer: Any, parameter: Any) -> Partition:
    """Each rank has a slice of a buffer in which the parameters of a group are concatenated."""
    mapping: Any = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return Partition(0, parameter, 0, 0)
    # Stage 1 in bf16 has another optimizer class, with the first of these attributes.
    groups = getattr(optimizer, "fp32_groups_flat_partition", None)
    groups = groups or optimizer.single_partition_of_fp32_groups
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Partition(low.start, groups[mapping.param_group_index], high.start, high.numel)


def _stage_3(optimizer: Any, parameter: Any) -> Partition:
    """Each rank has a slice of each parameter; slices of the last ranks are padded."""
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = size * optimizer._get_param_partition_rank(parameter)
    remaining = max(0, parameter.ds_numel - start)
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return Partition(start, flat, offset, min(size, remaining))


@contextmanager
def seen_by_optimizer(optimizer: Any, stage: int) -> Iterator[None]:
    """Show torch's optimizer all its parameters; stage 3 otherwise shows it one group at a time."""
    if stage == 3:
        optimizer._set_fp32_optimizer_param_groups()
    yield
    if stage == 3:
        optimizer._clear_fp32_optimizer_param_groups()


@contextmanager
def overflowing(optimizer: Any, stage: int) -> Iterator[None]:
    """Let DeepSpeed take a step for an overflow: it drops the gradients and keeps the weights."""
    invalid = torch.tensor(-1.0)  # DeepSpeed's norm of gradients that are not finite
    name: str
    value: Any
    if stage == 3:
        name, value = "_get_norm_groups", [invalid]
    elif hasattr(optimizer, "scaled_global_norm"):
        name, value = "scaled_global_norm", invalid
    else:  # stage 1 in bf16
        name, value = "get_grads_for_norm", ([torch.tensor([torch.nan])], [])
    setattr(optimizer, name, lambda *_, **__: value)
    try:
        yield
    finally:
        delattr(optimizer, name)


@torch.no_grad()
def publish(optimizer: Any, stage: int) -> None:
    """Copy the fp32 weights to the model; all ranks call it."""
    if stage in (1, 2):
        optimizer.update_lp_params()
    if stage == 3:
        optimizer._partition_all_parameters()
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
