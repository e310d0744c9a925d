"""Private names of DeepSpeed, on two ranks. A version that changes one fails by name."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import deepspeed_engines
from tests.support.ranks import spawn
from tokamake.parallel import mesh, sharding
from tokamake.train.backends import _deepspeed_internals as internals
from tokamake.train.backends import _deepspeed_setup as setup

pytestmark = pytest.mark.ranks

STAGES = [(1, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32")]
"""ZeRO stages and precisions with optimizer classes of their own."""


def engine_of(stage: int, precision: str, **options: Any) -> Any:
    """DeepSpeed's engine of a linear layer whose parameters have 12 and 3 elements."""
    deepspeed_engines.initialize()
    import deepspeed

    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    settings: dict[str, Any] = {
        "train_batch_size": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if precision == "bf16":
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, **options)
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


Results = dict[tuple[str, int, str], Any]
"""Result of a function, or its error as text, by name, ZeRO stage and precision."""


def results_of_rank() -> Results:
    """Call all functions below that need an engine; processes take longer than they do."""
    results: Results = {}
    functions = {function.__name__: function for function in (sizes, published, norm, discarded)}
    cases = [(name, *case) for name in functions for case in STAGES]
    cases.remove(("norm", 3, "fp32"))
    functions |= {"gradient": gradient, "seen": seen}
    cases += [("gradient", 0, "fp32"), *(("gradient", *case) for case in STAGES[:2])]
    for name, stage, precision in [*cases, ("seen", 3, "fp32")]:
        try:
            results[name, stage, precision] = functions[name](engine_of(stage, precision), stage)
        except Exception as error:  # one test shall fail, not all
            results[name, stage, precision] = repr(error)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[Results]:
    """The results of two ranks."""
    return spawn(results_of_rank, 2)


def disable_extension() -> bool:
    import deepspeed

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    internals.disable_shm_extension()
    return bool(deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"])


def test_disable_shm_extension() -> None:
    assert spawn(disable_extension, 1) == [False]


def sizes(engine: Any, stage: int) -> dict[str, int]:
    """Sizes of the partitions of this rank, whose elements are those of the initial weights."""
    expected, numbers = weights(), {}
    for name, partition in partitions(engine, stage).items():
        whole = expected[name].to(engine.module.weight.dtype).float().flatten()
        part = whole.narrow(0, partition.start, partition.size)
        torch.testing.assert_close(elements(partition).float(), part, rtol=0, atol=0)
        numbers[name] = partition.size
    return numbers


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_partitions_of_all_ranks_hold_the_fp32_weights(
    ranks: list[Results], stage: int, precision: str
) -> None:
    first, second = (results["sizes", stage, precision] for results in ranks)
    assert {name: first[name] + second[name] for name in first} == {"weight": 12, "bias": 3}


def published(engine: Any, stage: int) -> dict[str, list[float]]:
    """Weights of the model after all fp32 weights became 7."""
    import deepspeed

    for partition in partitions(engine, stage).values():
        elements(partition).fill_(7.0)
    internals.publish(engine.optimizer, stage)
    parameters = dict(engine.module.named_parameters())
    gathered = deepspeed.zero.GatheredParameters([*parameters.values()])
    with gathered if stage == 3 else contextlib.nullcontext():
        return {name: weight.float().unique().tolist() for name, weight in parameters.items()}


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_publish_copies_fp32_weights_to_the_model(
    ranks: list[Results], stage: int, precision: str
) -> None:
    for results in ranks:
        assert results["published", stage, precision] == {"weight": [7.0], "bias": [7.0]}


def gradient(engine: Any, _: int) -> list[float]:
    """Gradient of the bias after two backward passes."""
    assert engine.pipeline_parallelism is False
    internals.reduce_at_end(engine, True)
    x = torch.ones(1, 4, dtype=engine.module.weight.dtype)
    for _ in range(2):
        (engine.module(x).sum() * (dist.get_rank() + 1)).backward()
    total = internals.gradient(engine.optimizer, engine.module.bias)
    assert total is not None
    return total.tolist()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), *STAGES[:2]])
def test_a_gradient_is_the_sum_of_this_rank_alone(
    ranks: list[Results], stage: int, precision: str
) -> None:
    for rank, results in enumerate(ranks):
        assert results["gradient", stage, precision] == [2.0 * (rank + 1)] * 3


def reduced() -> list[tuple[dict[str, Tensor], float]]:
    """Gradients of this rank's partitions after a reduction at the end, and their norm."""
    return [reduced_by(stage, precision) for stage, precision in STAGES[:2]]


def reduced_by(stage: int, precision: str) -> tuple[dict[str, Tensor], float]:
    mpu = setup.Mpu(mesh.SINGLE_RANK, dist.get_world_size(), device=torch.device("cpu"))
    engine = engine_of(stage, precision, mpu=mpu)
    internals.reduce_at_end(engine, True)
    internals.sum_norm_over_all_ranks(engine.optimizer)
    x = torch.arange(4.0, dtype=engine.module.weight.dtype).view(1, 4)
    (engine.module(x).sum() * (dist.get_rank() + 1)).backward()
    internals.reduce(engine)
    seen, update = {}, engine.optimizer.optimizer.step

    def step() -> None:
        for name, (_, flat, offset, size) in partitions(engine, stage).items():
            part = torch.empty(0) if flat.grad is None else flat.grad.view(-1)
            seen[name] = part.narrow(0, offset, size).clone()
        update()

    engine.optimizer.optimizer.step = step
    engine.step()
    return seen, float(engine.get_global_grad_norm())


def test_gradients_are_reduced_to_the_partitions() -> None:
    expected = {"weight": 1.5 * torch.arange(4.0).repeat(3), "bias": 1.5 * torch.ones(3)}
    norm = torch.cat([*expected.values()]).norm().item()
    for first, second in zip(*spawn(reduced, 2), strict=True):
        for name, whole in expected.items():
            torch.testing.assert_close(torch.cat([first[0][name], second[0][name]]), whole)
        assert first[1] == second[1] == pytest.approx(norm, rel=1e-5)


def storages() -> tuple[dict[str, int], list[int], int]:
    """Sizes of partitions, bytes of all storages before each next parameter, and at the end."""
    deepspeed_engines.initialize()
    import deepspeed

    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    sharding.shape_parameters(module, torch.device("cpu"))
    parameters = [*module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    counts: list[int] = []

    def in_use() -> int:
        tensors = [*parameters, *(each.ds_tensor for each in parameters if hasattr(each, "ds_id"))]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def counted() -> Iterator[nn.Parameter]:
        for parameter in parameters:
            counts.append(in_use())
            yield parameter

    ranks = SimpleNamespace(
        get_data_parallel_group=lambda: dist.group.WORLD,
        get_data_parallel_rank=dist.get_rank,
        get_data_parallel_world_size=dist.get_world_size,
        get_model_parallel_world_size=lambda: 1,
    )
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    internals.partition_each(counted(), config=config, mpu=ranks, dtype=torch.bfloat16)
    last = in_use()
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    sizes = {name: partition.size for name, partition in partitions(engine, 3).items()}
    return sizes, counts, last


def test_stage_3_partitions_each_parameter_before_the_next_is_allocated() -> None:
    """Otherwise a rank needs, at the start, memory for all parameters of its pipeline stages."""
    for sizes, counts, last in spawn(storages, 2):
        assert sizes == {f"{n}.{name}": size for n in range(4) for name, size in HALVES.items()}
        # A parameter without storage takes one fp32 number, a partition two bytes a number.
        assert counts[0] == 4 * len(counts)
        assert counts == sorted(counts)
        assert last == 2 * sum(sizes.values())


HALVES = {"weight": 32 * 64, "bias": 32}
"""This rank's numbers of a layer."""


def norm(engine: Any, _: int) -> float:
    """DeepSpeed's norm of the gradients, which are all 1, if another stage counts the bias."""
    internals.mark(engine.module.weight, counts=True, is_replica=False)
    internals.mark(engine.module.bias, counts=True, is_replica=True)
    engine.backward(engine(torch.ones(1, 4, dtype=engine.module.weight.dtype)).sum())
    engine.step()
    return float(engine.get_global_grad_norm())


@pytest.mark.parametrize(("stage", "precision"), STAGES[:3])
def test_a_marked_copy_does_not_count_in_the_norm(
    ranks: list[Results], stage: int, precision: str
) -> None:
    for results in ranks:
        assert results["norm", stage, precision] == pytest.approx(12**0.5, rel=1e-3)


def is_model_parallel(counts: bool) -> bool:
    deepspeed_engines.initialize()
    from deepspeed.runtime.utils import is_model_parallel_parameter

    parameter = nn.Parameter(torch.zeros(1))
    internals.mark(parameter, counts=counts, is_replica=False)
    return bool(is_model_parallel_parameter(parameter))


@pytest.mark.parametrize("counts", [True, False])
def test_a_marked_parameter_counts_on_each_model_parallel_rank(counts: bool) -> None:
    assert spawn(is_model_parallel, 1, counts) == [counts]


def seen(engine: Any, stage: int) -> list[int]:
    """Numbers of parameters that torch's optimizer has in and after the block."""
    groups = engine.optimizer.optimizer.param_groups
    with internals.seen_by_optimizer(engine.optimizer, stage):
        inside = sum(len(group["params"]) for group in groups)
    return [inside, sum(len(group["params"]) for group in groups)]


def test_in_stage_3_the_optimizer_sees_its_parameters_in_the_block_alone(
    ranks: list[Results],
) -> None:
    for results in ranks:
        inside, after = results["seen", 3, "fp32"]
        assert inside > after == 0


def discarded(engine: Any, stage: int) -> list[bool]:
    """Whether an overflow, then a usual step, have updated the fp32 weights."""
    updated = []
    for scale, overflows in ((5.0, True), (1.0, False)):
        before = {name: elements(part).clone() for name, part in partitions(engine, stage).items()}
        engine.backward(engine(torch.ones(1, 4, dtype=engine.module.weight.dtype)).sum() * scale)
        with (
            internals.overflowing(engine.optimizer, stage)
            if overflows
            else contextlib.nullcontext()
        ):
            engine.step()
        after = partitions(engine, stage)
        updated.append(any(not before[name].equal(elements(after[name])) for name in before))
    # Gradients of 1; what the overflow has left would add to them.
    assert float(engine.get_global_grad_norm()) == pytest.approx(15**0.5, rel=1e-3)
    return updated


@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_an_overflow_drops_the_gradients_and_keeps_the_weights(
    ranks: list[Results], stage: int, precision: str
) -> None:
    for results in ranks:
        assert results["discarded", stage, precision] == [False, True]
