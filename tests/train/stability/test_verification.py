"""A rank whose hardware computes other bits is found, and its host is named and left out."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from tests.support.composition_axes import Values
from tests.support.compositions import Composition
from tests.support.layouts import parallel
from tests.support.ranks import spawn
from tokamake import errors
from tokamake.config.training import TrainSettings
from tokamake.errors import TemporaryError, UserError
from tokamake.preflight.run import check_deterministic
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends.native import Engine
from tokamake.train.numerics import with_precision

CPU = torch.device("cpu")
DATA = {"data_parallel_size": 2}
LAYOUTS: dict[str, Values] = {
    "stage 0": DATA | {"zero_stage": 0},
    "stage 1, bf16": DATA | {"zero_stage": 1, "precision": "bf16"},
    "stage 3, recomputation": DATA | {"zero_stage": 3, "recompute_granularity": "full"},
    "replicas": {
        "data_parallel_size": 2,
        "zero_stage": 2,
        "parallel.data_parallel_replicate_size": 2,
        "dropout.hidden": 0.1,
    },
}


def engine_of(values: Values) -> Engine:
    run = with_precision(Composition("gpt", "causal", values, 1).run(), CPU)
    rank, size = dist.get_rank(), dist.get_world_size()
    return Engine(run, Ranks(rank, size, rank, size), device=CPU)


def check(engine: Engine, step: int) -> str:
    """Check the hardware; return the error, or an empty text."""
    objective, mesh = engine.stages.objective, engine.mesh
    rows = rank_samples(step_samples(objective, step=0), mesh)
    hosts = [f"host{rank}" for rank in range(dist.get_world_size())]
    samples = rank_ids(objective, mesh, step=0)
    try:
        engine.check_repeats(rows, samples=samples, hosts=hosts, step=step)
    except TemporaryError as error:
        return str(error)
    return ""


def flip_in_call(module: torch.nn.Module, number: int) -> None:
    """Flip a bit of a product in one call of a module."""
    calls = [0]

    def flip(_: Any, __: Any, output: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == number:
            bits = output.data.view(torch.int16)
            bits.view(-1)[-1] ^= 1 << 6

    module.register_forward_hook(flip)


def found(values: Values, faulty: Path) -> list[str]:
    """Errors of a check on healthy ranks, and of one in which a product of rank 1 has a flip."""
    os.environ[errors.FAULTY_HOSTS_VARIABLE] = str(faulty)
    engine = engine_of(values)
    state, before = torch.get_rng_state(), [chunk.local.clone() for chunk in engine._chunks]
    texts = [check(engine, 1), check(engine, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    after = [chunk.local for chunk in engine._chunks]
    assert all(map(torch.equal, before, after))
    assert all(chunk.local.grad is None for chunk in engine._chunks)
    if dist.get_rank() == 1:
        (module,) = engine.stages.modules.values()
        flip_in_call(module.blocks[0].mlp, 2)
    return [*texts, check(engine, 3)]


@pytest.mark.ranks
@pytest.mark.fault("flipped bit")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_in_a_product_names_the_host(layout: str, tmp_path: Path) -> None:
    first, second = spawn(found, 2, LAYOUTS[layout], tmp_path / "faulty")
    assert first == second
    assert first[:2] == ["", ""]
    assert first[2].startswith(
        "step 3: train.verify_interval: rank 1 on host1 computed other bits from the same micro "
        "batch; a processor or memory there is faulty. The run continues from its last checkpoint"
    )
    assert (tmp_path / "faulty").read_text() == "host1\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (parallel(pp=2), "a pipeline of 2 ranks passes the error of one rank to all"),
        ({"objective": "ict"}, "an error of one rank changes the gradients of all"),
        ({"backend": "deepspeed"}, "DeepSpeed adds up the gradients of ranks"),
        ({"verify_interval": 0}, "greater than or equal to 1"),
    ],
)
def test_layouts_that_hide_the_faulty_rank_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainSettings.model_validate({"verify_interval": 100, **settings})


def test_accelerators_need_deterministic_kernels() -> None:
    run = Composition("gpt", "causal", {}, 1).run()

    def checked(**changes: Any) -> None:
        train = run.train.model_copy(update={"verify_interval": 100, **changes})
        check_deterministic(run.model_copy(update={"train": train}), torch.device("cuda"))

    with pytest.raises(UserError, match=r"verify_interval: 100: kernels of cuda may round"):
        checked()
    checked(deterministic=True)
