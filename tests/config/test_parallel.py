"""How ranks may share a run: random settings that fit pass, those that do not fail in one line."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.random_sharding import Plan, plans
from tests.support.runs import ARCHITECTURE
from tokamake.config.architecture import Architecture
from tokamake.config.batching import BatchSizes
from tokamake.config.parallel import ParallelSettings
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.parallel import mesh
from tokamake.parallel.axis import part
from tokamake.parallel.pipeline import rank_of_stage, stages_of_rank


def check(plan: Plan) -> ParallelSettings:
    """All that the trainer checks before it starts."""
    settings = ParallelSettings.model_validate(plan["settings"])
    data = settings.data_parallel_size(plan["world_size"])
    sizes, micro = BatchSizes(plan["global_batch_size"]), plan["micro_batch_size"]
    sizes.check(micro, data)
    settings.check_batches(plan["global_batch_size"] // (micro * data))
    settings.check_architecture(plan["architecture"], plan["sequence_length"])
    return settings


@given(plans())
def test_what_fits_passes(plan: Plan) -> None:
    settings = check(plan)
    assert settings.data_parallel_size(plan["world_size"]) == plan["data"]
    layers = plan["architecture"].num_hidden_layers
    stages = settings.layers_of_stages(layers)
    assert [number for stage in stages for number in stage] == [*range(layers)]
    assert len(stages) == settings.num_stages
    if not settings.pipeline_layers:
        sizes = [len(stage) for stage in stages]
        assert max(sizes) - min(sizes) <= 1
        # The embedding weighs, and the output layer more.
        assert sizes[-1] == min(sizes)
        assert sizes[0] == min(sizes) or layers % len(sizes) == len(sizes) - 1
    schedule, ranks = settings.pipeline_schedule, settings.pipeline_parallel_size
    of_ranks = [
        stages_of_rank(schedule, rank, ranks=ranks, num_stages=len(stages)) for rank in range(ranks)
    ]
    assert sorted(number for numbers in of_ranks for number in numbers) == [*range(len(stages))]
    for rank, numbers in enumerate(of_ranks):
        assert len(numbers) == settings.virtual_pipeline_size
        assert all(rank_of_stage(schedule, n, ranks=ranks) == rank for n in numbers)


BREAKS: dict[str, Any] = {
    "ranks or a multiple": lambda p: p | {"world_size": p["world_size"] + 1},
    "attention heads": lambda p: p | {"architecture": odd(p, "num_attention_heads")},
    "intermediate_size": lambda p: p | {"architecture": odd(p, "intermediate_size")},
    "sequence_length": lambda p: p | {"sequence_length": p["sequence_length"] + 1},
    "global_batch_size": lambda p: p | {"global_batch_size": p["global_batch_size"] + 1},
    "leave ranks idle": lambda p: p | {"global_batch_size": p["micro_batch_size"] * p["data"]},
    "pipeline_layers": lambda p: settled(p, pipeline_layers=(9,) * 50),
    "virtual_pipeline_size": lambda p: settled(p, virtual_pipeline_size=7),
    "data_parallel_replicate_size": lambda p: settled(p, data_parallel_replicate_size=97),
    "tensor_parallel_size": lambda p: settled(p, tensor_parallel_size=0),
    "has none": lambda p: few_layers(p),
}
"""By what is said: ways to break a plan, which some plans bear."""


def settled(plan: Plan, **settings: Any) -> Plan:
    return plan | {"settings": plan["settings"] | settings}


def odd(plan: Plan, name: str) -> Architecture:
    found: Architecture = plan["architecture"]
    return found.model_copy(update={name: getattr(found, name) + 1})


def few_layers(plan: Plan) -> Plan:
    plan = settled(plan, pipeline_layers=())
    shape = plan["architecture"].model_copy(update={"num_hidden_layers": 1})
    return plan | {"architecture": shape}


NAMES = (*ParallelSettings.model_fields, "global_batch_size", "train.parallel:")


@given(plans(), st.sampled_from(sorted(BREAKS)))
def test_what_does_not_fit_fails_in_one_line(plan: Plan, way: str) -> None:
    broken = BREAKS[way](plan)
    settings = plan["settings"]
    bears = {
        "ranks or a multiple": plan["world_size"] == plan["data"],
        "attention heads": settings["tensor_parallel_size"] == 1
        and (
            settings["context_parallel_size"] == 1 or settings["context_parallel_method"] == "ring"
        ),
        "intermediate_size": settings["tensor_parallel_size"] == 1,
        "sequence_length": settings["context_parallel_size"] == 1
        and not (settings["sequence_parallel"] and settings["tensor_parallel_size"] > 1),
        "global_batch_size": plan["micro_batch_size"] * plan["data"] == 1,
        "leave ranks idle": settings["pipeline_parallel_size"] == 1,
        "has none": settings["pipeline_parallel_size"] == 1,
    }
    if bears.get(way):
        return
    with pytest.raises((UserError, ValidationError)) as caught:
        check(broken)
    message = told(caught.value)
    assert "\n" not in message
    assert any(name in message for name in NAMES), message
    assert "{" not in message


def told(error: Exception) -> str:
    """What a user reads."""
    if isinstance(error, ValidationError):
        (one,) = error.errors()
        return ".".join(map(str, one["loc"])) + ": " + one["msg"]
    return str(error)


def test_interleaved_rounds_are_equal() -> None:
    settings = ParallelSettings(
        pipeline_parallel_size=4, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2
    )
    settings.check_batches(8)
    with pytest.raises(UserError, match="9 micro batches a step do not fall into equal rounds"):
        settings.check_batches(9)


SIZED: dict[str, Plan] = {
    "tensor 2 × context 3 × pipeline 1 takes 6 ranks or a multiple, this run has 8": {
        "tensor_parallel_size": 2, "context_parallel_size": 3,
    },
    "data_parallel_replicate_size: 3: does not divide 8 data-parallel ranks": {
        "data_parallel_replicate_size": 3,
    },
    "tensor 16 × context 1 × pipeline 1 takes 16 ranks or a multiple, this run has 8; start it": {
        "tensor_parallel_size": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", SIZED)
def test_ranks_that_do_not_fit(message: str) -> None:
    with pytest.raises(UserError, match=message):
        ParallelSettings(**SIZED[message]).data_parallel_size(8)


SHAPED: dict[str, tuple[Plan, Plan]] = {
    "tensor_parallel_size: 3: does not divide 4 .attention heads": (
        {"tensor_parallel_size": 3}, {},
    ),
    "tensor_parallel_size: 2: neither divides 3 key-value heads nor is a multiple": (
        {"tensor_parallel_size": 2},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24},
    ),
    "tensor_parallel_size: 4: does not divide 50 .intermediate_size": (
        {"tensor_parallel_size": 4}, {"intermediate_size": 50},
    ),
    "context_parallel_size × 2: 6: does not divide 16 .sequence_length": (
        {"context_parallel_size": 3}, {},
    ),
    "context_parallel_size: 4: does not divide 2 .attention heads of a rank": (
        {"tensor_parallel_size": 2, "context_parallel_size": 4,
         "context_parallel_method": "ulysses"}, {},
    ),
    "tensor_parallel_size: 3: does not divide 16 .tokens of a rank's sequence": (
        {"tensor_parallel_size": 3, "sequence_parallel": True},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24},
    ),
    "2 layers for 4 pipeline stages, so that one has none; take fewer": (
        {"pipeline_parallel_size": 4}, {},
    ),
    "pipeline_layers: 5 in all, the model has 2 layers": (
        {"pipeline_parallel_size": 2, "pipeline_layers": (2, 3)}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", SHAPED)
def test_models_that_do_not_fit(message: str) -> None:
    settings, shape = SHAPED[message]
    architecture = Architecture(**{**ARCHITECTURE.model_dump(), **shape})
    with pytest.raises(UserError, match=rf"^train\.parallel.*{message}"):
        ParallelSettings(**settings).check_architecture(architecture, 16)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_late_gradients_are_refused_where_weights_are_gone(schedule: str) -> None:
    sizes = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
    parallel = {**sizes, "pipeline_schedule": schedule}
    assert TrainSettings(zero_stage=2, parallel=parallel).zero_stage == 2  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=f"zero_stage: 3: with pipeline_schedule {schedule}"):
        TrainSettings(zero_stage=3, parallel=parallel)  # type: ignore[arg-type]


@given(st.integers(0, 200), st.integers(1, 9))
def test_parts_are_those_of_torch(size: int, ranks: int) -> None:
    parts = [part(size, mesh.Axis(rank, ranks)) for rank in range(ranks)]
    assert [number for rows in parts for number in rows] == [*range(size)]
    chunks = torch.arange(size).chunk(ranks)
    assert [len(rows) for rows in parts if rows] == [len(chunk) for chunk in chunks if len(chunk)]
