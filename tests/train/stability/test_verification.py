"""A rank whose hardware computes other bits is found, and its host is named and left out."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support import standin_use
from tests.support.composition_axes import KINDS, Values
from tests.support.compositions import Composition
from tests.support.ranks import spawn
from tests.support.standin_costs import counted
from tokamake import errors, plugins
from tokamake.config.parallel import INTERLEAVED
from tokamake.errors import TemporaryError, UserError
from tokamake.preflight.run import check_deterministic
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples
from tokamake.runtime.ranks import Ranks
from tokamake.train.batch import SampleIds
from tokamake.train.numerics import with_precision

CPU = torch.device("cpu")
DATA: Values = {"data_parallel_size": 2}
TENSOR: Values = {"parallel.tensor_parallel_size": 2}
CONTEXT: Values = {"parallel.context_parallel_size": 2}
EXPERTS: Values = DATA | {"parallel.expert_parallel_size": 2, "architecture.num_experts": 4}
SEQUENCE: Values = TENSOR | {"parallel.sequence_parallel": True}
PIPELINE: Values = {"parallel.pipeline_parallel_size": 2}
DEEPSPEED: Values = DATA | {"backend": "deepspeed"}
ULYSSES: Values = CONTEXT | {"parallel.context_parallel_method": "ulysses"}
LAYOUTS: dict[str, tuple[str, Values]] = {
    "stage 3, recomputation": ("gpt", DATA | {"zero_stage": 3, "recompute_granularity": "full"}),
    "tensor, sequence, data": ("llama", SEQUENCE | DATA | {"zero_stage": 2}),
    "experts": ("mixtral", EXPERTS),
    "pipeline": ("gpt", PIPELINE | {"precision": "bf16"}),
    "DeepSpeed": ("gpt", DEEPSPEED | {"zero_stage": 1}),
}
GRID: dict[str, tuple[str, Values]] = {
    "stage 0": ("gpt", DATA | {"zero_stage": 0}),
    "stage 1, bf16": ("gpt", DATA | {"zero_stage": 1, "precision": "bf16"}),
    "ring": ("llama", CONTEXT),
    "tensor": ("gpt", TENSOR),
    "replicas": (
        "gpt",
        DATA | {"zero_stage": 2, "parallel.data_parallel_replicate_size": 2, "dropout.hidden": 0.1},
    ),
    "ict": ("biencoder", DATA),
    "ulysses": ("gpt", ULYSSES),
    "ring, documents": ("llama", CONTEXT | {"reset_attention_mask": True}),
    "tensor, ring": ("llama", SEQUENCE | CONTEXT | {"zero_stage": 3}),
    "experts, tensor, fp16": ("mixtral", EXPERTS | SEQUENCE | {"precision": "fp16"}),
    "experts over context": (
        "qwen3_moe",
        ULYSSES | {"parallel.expert_parallel_size": 2, "architecture.num_experts": 4},
    ),
    "gpipe, tensor": ("llama", PIPELINE | SEQUENCE | {"parallel.pipeline_schedule": "gpipe"}),
    **{
        f"{schedule}, data": (
            "gpt",
            PIPELINE
            | DATA
            | {"parallel.pipeline_schedule": schedule, "parallel.virtual_pipeline_size": 2},
        )
        for schedule in INTERLEAVED
    },
    **{
        f"DeepSpeed, stage {stage}, tensor": ("llama", DEEPSPEED | TENSOR | {"zero_stage": stage})
        for stage in range(4)
    },
    "DeepSpeed, bf16": ("gpt", DEEPSPEED | {"zero_stage": 1, "precision": "bf16"}),
    "DeepSpeed, pipeline": ("gpt", DEEPSPEED | PIPELINE | {"data_parallel_size": 1}),
}


def engine_of(family: str, values: Values, device: torch.device = CPU) -> Any:
    objective = "ict" if family == "biencoder" else "causal"
    run = with_precision(Composition(family, objective, values, 1).run(), device)
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)  # for DeepSpeed
    backend = plugins.load("train/backends", run.train.backend)
    return backend.Engine(run, Ranks(rank, size, rank, size), device=device)


def step_of(engine: Any) -> tuple[list[Any], SampleIds]:
    objective, mesh = engine.stages.objective, engine.mesh
    rows = rank_samples(step_samples(objective, step=0), mesh)
    return rows, rank_ids(objective, mesh, step=0)


def check(engine: Any, step: int) -> str:
    """Check the hardware; return the error, or an empty text."""
    hosts = [f"host{rank}" for rank in range(dist.get_world_size())]
    rows, samples = step_of(engine)
    try:
        engine.check_repeats(rows, samples=samples, hosts=hosts, step=step)
    except TemporaryError as error:
        return str(error)
    return ""


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with another bit at its begin, and at its end: a model may not use one of them."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy.view(torch.int16).view(-1)[[1, -1]] ^= 1 << 6
    return copy


@contextmanager
def flip(engine: Any, module: torch.nn.Module, kind: str, *, call: int) -> Iterator[None]:
    """In one call of a module, flip a bit of its output, of that gradient, or of a weight."""
    calls, weight = 0, engine._chunks[0].local.data

    def flip_in_call(_: Any, __: Any, output: Any) -> None:
        nonlocal calls
        output = output[0] if isinstance(output, tuple) else output
        if not engine.mesh.log.is_on or not torch.is_grad_enabled():
            return
        calls += 1
        if calls != call:
            return
        if kind == "gradient":
            output.register_hook(flipped)
        else:
            wrong = weight if kind == "weight" else output.data
            wrong.copy_(flipped(wrong))

    hook = module.register_forward_hook(flip_in_call)
    yield
    hook.remove()
    if kind == "weight":
        weight.copy_(flipped(weight))


def products(engine: Any, *, of_each_kind: bool = False) -> list[torch.nn.Module]:
    """Innermost modules with parameters, whose outputs are products of this rank.

    Args:
        of_each_kind: only the last one of modules that differ by numbers in their names alone, such
            as a layer's.
    """
    named = [each for stage in engine.stages.modules.values() for each in stage.named_modules()]
    innermost = [
        (name, module)
        for name, module in named
        if not [*module.children()] and [*module.parameters()]
    ]
    if of_each_kind:
        return [*{re.sub(r"\d+", "", name): module for name, module in innermost}.values()]
    return [module for _, module in innermost]


def found(layout: tuple[str, Values], faulty: Path, *, everywhere: bool) -> dict[str, str]:
    """Errors of checks on healthy ranks, and of checks in which one rank flips a bit.

    On many ranks, those that have the same module flip it in turn, an output or a gradient.
    """
    os.environ[errors.FAULTY_HOSTS_VARIABLE] = str(faulty)
    engine, texts = engine_of(*layout), {}
    state, before = torch.get_rng_state(), weights(engine)
    texts["no flip"] = check(engine, 1)
    for rank in range(dist.get_world_size()):
        modules = products(engine, of_each_kind=everywhere)
        numbers = range(len(modules)) if everywhere else (len(modules) // 2,)
        most = torch.tensor(len(numbers))
        dist.all_reduce(most, dist.ReduceOp.MAX)  # stages may have different modules
        both = ("output", "gradient")
        kinds = [*product(range(int(most)), both)]
        if (size := dist.get_world_size()) > 2:
            turns = size // 2 if everywhere else 1
            own = range(rank % turns, int(most), turns)
            kinds = [(index, both[(index + rank.bit_count()) % 2]) for index in own]
        if type(engine).__module__.endswith("native"):  # DeepSpeed keeps weights elsewhere
            kinds.append((0, "weight"))
        for index, kind in kinds:
            flips: Any = nullcontext()
            if dist.get_rank() == rank:
                module = modules[numbers[index % len(numbers)]]
                flips = flip(engine, module, kind, call=1 + index % 2)
            with flips:
                texts[f"{rank} {kind} {index}"] = check(engine, 3)
    texts["no flip any more"] = check(engine, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, weights(engine)))
    trained = [trained_weights(each) for each in (engine, engine_of(*layout))]
    assert all(map(torch.equal, *trained))
    assert not all(map(torch.equal, before, trained[0]))
    return texts


def trained_weights(engine: Any) -> list[torch.Tensor]:
    """Weights after a step."""
    rows, samples = step_of(engine)
    result = engine.train_step(rows, learning_rate=0.01, weight_decay=0.1, samples=samples)
    assert result.updated
    return weights(engine)


def weights(engine: Any) -> list[torch.Tensor]:
    return [part.clone() for _, flat in engine._weights() for part in flat.chunks.values()]


def assert_each_flip_names_its_host(
    layout: tuple[str, Values], faulty: Path, *, everywhere: bool = False
) -> None:
    size = math.prod(layout[1].get(kind, 1) for kind in KINDS)
    first, *others = spawn(partial(found, everywhere=everywhere), size, layout, faulty)
    assert all(each == first for each in others)
    assert first.pop("no flip") == first.pop("no flip any more") == ""
    assert len(first) >= 2 * size
    # Some outputs are unused, such as scores that a router only returns.
    seen = {name: text for name, text in first.items() if text or not everywhere}
    assert len(seen) > 0.75 * len(first)
    is_sure = layout[1].get("backend") != "deepspeed" or layout[1].get("zero_stage", 0) < 3
    cause = "; a processor or memory there" if is_sure else ", or gathered other weights from the "
    for name, text in seen.items():
        rank = name.split()[0]
        assert text.startswith(
            f"step 3: train.verify_interval: rank {rank} on host{rank} computed other bits from "
            f"the same micro batch{cause}"
        ), name
        assert "The run continues from its last checkpoint" in text
    named = [f"host{name.split()[0]}" for name in seen] if is_sure else []
    assert (faulty.read_text().split() if faulty.exists() else []) == named


@pytest.mark.ranks
@pytest.mark.fault("flipped bit")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_in_a_product_names_the_host(layout: str, tmp_path: Path) -> None:
    assert_each_flip_names_its_host(LAYOUTS[layout], tmp_path / "faulty")


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.fault("flipped bit")
@pytest.mark.parametrize("layout", LAYOUTS | GRID)
def test_a_flipped_bit_in_any_product_names_the_host(layout: str, tmp_path: Path) -> None:
    layouts = LAYOUTS | GRID
    assert_each_flip_names_its_host(layouts[layout], tmp_path / "faulty", everywhere=True)


def received_wrongly(layout: tuple[str, Values], faulty: Path, *, name: str) -> str:
    """Error of a check in which rank 1 gets wrong bits from its last call of a collective."""
    os.environ[errors.FAULTY_HOSTS_VARIABLE] = str(faulty)
    engine, exchange, calls, wrong = engine_of(*layout), getattr(dist, name), 0, 0

    def exchange_wrongly(*args: Any, **options: Any) -> Any:
        nonlocal calls
        work = exchange(*args, **options)
        total = args[0] if args else options["output_tensor"]
        if engine.mesh.log.is_on:
            calls += 1
            if calls == wrong and dist.get_rank() == 1:
                if work is not None:
                    work.wait()
                total.copy_(flipped(total))
        return work

    with patch.object(dist, name, exchange_wrongly):
        assert not check(engine, 1)
        calls, wrong = 0, calls
        return check(engine, 3)


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@pytest.mark.ranks
@pytest.mark.fault("flipped bit")
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (("gpt", TENSOR), "all_reduce"),
        # The last gather is one of the backward pass.
        (("gpt", DATA | {"zero_stage": 3}), GATHER),
    ],
    ids=["sum", "gather"],
)
def test_an_error_of_a_link_accuses_no_host(
    layout: tuple[str, Values], name: str, tmp_path: Path
) -> None:
    first, second = spawn(partial(received_wrongly, name=name), 2, layout, tmp_path / "faulty")
    assert first == second
    assert first.startswith(
        "step 3: train.verify_interval: rank 1 on host1 received other bits "
        "in the second of two equal passes, and no rank had computed other bits before"
    )
    assert not (tmp_path / "faulty").exists()


def found_on_device(faulty: Path) -> list[str]:
    """Errors of five checks on an accelerator: rank 1 flips a bit in all but the first and last."""
    os.environ[errors.FAULTY_HOSTS_VARIABLE] = str(faulty)
    engine = engine_of("llama", DATA | {"zero_stage": 3}, standin_use.use())
    with counted() as costs:
        texts = [check(engine, 1)]
    assert len(costs.waits) == 2, costs.waits  # for the hashes of each pass
    module = products(engine)[-1]
    for kind in ("output", "gradient", "weight"):
        is_faulty = dist.get_rank() == 1
        with flip(engine, module, kind, call=1) if is_faulty else nullcontext():
            texts.append(check(engine, 3))
    return [*texts, check(engine, 2)]


@pytest.mark.ranks
@pytest.mark.fault("flipped bit")
def test_a_flipped_bit_on_an_accelerator_names_the_host(tmp_path: Path) -> None:
    """A stand-in plays the device."""
    first, second = spawn(found_on_device, 2, tmp_path / "faulty")
    assert first == second
    begin, *seen, end = first
    assert begin == end == ""
    for text in seen:
        assert "verify_interval: rank 1 on host1 computed other bits from the same micro" in text
    assert (tmp_path / "faulty").read_text().split() == ["host1"] * len(seen)


def test_accelerators_need_deterministic_kernels() -> None:
    run = Composition("gpt", "causal", {}, 1).run()

    def checked(**changes: Any) -> None:
        train = run.train.model_copy(update={"verify_interval": 100, **changes})
        check_deterministic(run.model_copy(update={"train": train}), torch.device("cuda"))

    with pytest.raises(UserError, match=r"verify_interval: 100: kernels of cuda may round"):
        checked()
    checked(deterministic=True)
