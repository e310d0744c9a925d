"""Private names of DeepSpeed, on two ranks. A version that changes one fails by name."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import deepspeed_engines
from tests.support.ranks import spawn
from tokamake.train.backends import _deepspeed_internals as internals

pytestmark = pytest.mark.ranks

STAGES = [(1, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32")]
"""ZeRO stages and precisions with optimizer classes of their own."""


def engine_of(stage: int, precision: str) -> Any:
    """DeepSpeed's engine of a linear layer whose parameters have 12 and 3 elements."""
    deepspeed_engines.initialize()
    import deepspeed

    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    settings: dict[str, Any] = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if precision == "bf16":
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    return engine


def weights() -> dict[str, Tensor]:
    """Initial weights of the layer."""
    torch.manual_seed(0)
    return {name: weight.detach() for name, weight in nn.Linear(4, 3).named_parameters()}


def partitions(engine: Any, stage: int) -> dict[str, internals.Partition]:
    return {
        name: internals.partition(engine.optimizer, parameter, stage)
        for name, parameter in engine.module.named_parameters()
    }


def elements(partition: internals.Partition) -> Tensor:
    return partition.flat.detach().view(-1).narrow(0, partition.offset, partition.size)


def disable_extension() -> bool:
    import deepspeed

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    internals.disable_shm_extension()
    return bool(deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"])


def test_disable_shm_extension() -> None:
    assert spawn(disable_extension, 1) == [False]


def sizes_of_equal_partitions(stage: int, precision: str) -> dict[str, int]:
    engine, expected = engine_of(stage, precision), weights()
    if precision == "bf16":
        expected = {name: weight.bfloat16().float() for name, weight in expected.items()}
    sizes = {}
    for name, partition in partitions(engine, stage).items():
        whole = expected[name].flatten()
        part = whole.narrow(0, partition.start, partition.size)
        torch.testing.assert_close(elements(partition), part, rtol=0, atol=0)
        sizes[name] = partition.size
    return sizes


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_partitions_of_all_ranks_hold_the_fp32_weights(stage: int, precision: str) -> None:
    ranks = spawn(sizes_of_equal_partitions, 2, stage, precision)
    assert {name: sum(sizes[name] for sizes in ranks) for name in ranks[0]} == {
        "weight": 12,
        "bias": 3,
    }


def published(stage: int, precision: str) -> dict[str, list[float]]:
    engine = engine_of(stage, precision)
    import deepspeed

    for partition in partitions(engine, stage).values():
        elements(partition).fill_(7.0)
    internals.publish(engine.optimizer, stage)
    parameters = dict(engine.module.named_parameters())
    gathered = deepspeed.zero.GatheredParameters([*parameters.values()])
    with gathered if stage == 3 else contextlib.nullcontext():
        return {name: weight.float().unique().tolist() for name, weight in parameters.items()}


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_publish_copies_fp32_weights_to_the_model(stage: int, precision: str) -> None:
    expected = {"weight": [7.0], "bias": [7.0]}
    assert spawn(published, 2, stage, precision) == [expected, expected]


def gradients(stage: int, precision: str) -> list[list[float]]:
    """Gradients of the bias, of this rank before and of all ranks after they are reduced."""
    engine = engine_of(stage, precision)
    internals.reduce_at_end(engine, True)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for _ in range(2):
        (engine.module(torch.ones(1, 4, dtype=dtype)).sum() * (dist.get_rank() + 1)).backward()
    gradient = internals.gradient(engine.optimizer, engine.module.bias)
    assert gradient is not None
    local = gradient.tolist()
    engine.set_gradient_accumulation_boundary(True)
    engine.allreduce_gradients()
    assert engine.pipeline_parallelism
    return local


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), *STAGES[:2]])
def test_gradients_are_sums_of_this_rank_until_the_end(stage: int, precision: str) -> None:
    assert spawn(gradients, 2, stage, precision) == [[2.0] * 3, [4.0] * 3]


def marked_norm(stage: int, precision: str, counts: bool, is_copy: bool) -> float:
    engine = engine_of(stage, precision)
    for parameter in engine.module.parameters():
        internals.mark(parameter, counts=counts, is_copy=is_copy)
    engine.backward(engine(torch.ones(1, 4, dtype=next(engine.module.parameters()).dtype)).sum())
    engine.step()
    return float(engine.get_global_grad_norm())


@pytest.mark.parametrize(("stage", "precision"), STAGES[:3])
def test_copies_of_a_marked_parameter_do_not_count_in_the_norm(stage: int, precision: str) -> None:
    assert spawn(marked_norm, 2, stage, precision, True, False) == pytest.approx([15**0.5] * 2)
    copies = spawn(marked_norm, 2, stage, precision, True, True)
    assert max(copies) < 1e-5


def is_model_parallel(counts: bool) -> bool:
    deepspeed_engines.initialize()
    from deepspeed.runtime.utils import is_model_parallel_parameter

    parameter = nn.Parameter(torch.zeros(1))
    internals.mark(parameter, counts=counts, is_copy=False)
    return bool(is_model_parallel_parameter(parameter))


@pytest.mark.parametrize("counts", [True, False])
def test_a_marked_parameter_counts_on_each_model_parallel_rank(counts: bool) -> None:
    assert spawn(is_model_parallel, 1, counts) == [counts]


def seen(stage: int) -> list[int]:
    """Numbers of parameters that torch's optimizer has before, in and after the block."""
    engine = engine_of(stage, "fp32")
    optimizer = engine.optimizer.optimizer
    numbers = [sum(len(group["params"]) for group in optimizer.param_groups)]
    with internals.seen_by_optimizer(engine.optimizer, stage):
        numbers.append(sum(len(group["params"]) for group in optimizer.param_groups))
    return [*numbers, sum(len(group["params"]) for group in optimizer.param_groups)]


def test_in_stage_3_the_optimizer_sees_its_parameters_in_the_block_alone() -> None:
    for before, inside, after in spawn(seen, 2, 3):
        assert before == after == 0
        assert inside == 1
