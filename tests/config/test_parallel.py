"""Parallel layouts: random valid settings pass, invalid ones fail with a one-line message."""

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
from tokamake.config.parallel import ParallelSettings, rank_of_stage
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.parallel import mesh
from tokamake.parallel.axis import part


def check(plan: Plan) -> ParallelSettings:
    """Run the checks that the trainer runs before it starts."""
    settings = ParallelSettings.model_validate(plan["settings"])
    data = settings.data_parallel_size(plan["world_size"])
    sizes, micro = BatchSizes(plan["global_batch_size"]), plan["micro_batch_size"]
    sizes.check_micro_batches(micro, data)
    settings.check_batches(plan["global_batch_size"] // (micro * data))
    settings.check_architecture(plan["architecture"], plan["sequence_length"])
    return settings


@given(plans())
def test_valid_layouts_pass(plan: Plan) -> None:
    settings = check(plan)
    assert settings.data_parallel_size(plan["world_size"]) == plan["data"]
    layers = plan["architecture"].num_hidden_layers
    stages = settings.layers_of_stages(layers)
    assert [number for stage in stages for number in stage] == [*range(layers)]
    assert len(stages) == settings.num_stages
    if not settings.pipeline_layers:
        sizes = [len(stage) for stage in stages]
        assert max(sizes) - min(sizes) <= 1
        # The embedding counts as work, and the output layer as more.
        assert sizes[-1] == min(sizes)
        assert sizes[0] == min(sizes) or layers % len(sizes) == len(sizes) - 1
    schedule, ranks = settings.pipeline_schedule, settings.pipeline_parallel_size
    of_ranks = [settings.stages_of_rank(rank) for rank in range(ranks)]
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
    "empty stage": lambda p: few_layers(p),
}
"""Word of the message → change that makes a plan invalid, unless the plan allows it."""


def settled(plan: Plan, **settings: Any) -> Plan:
    return plan | {"settings": plan["settings"] | settings}


def odd(plan: Plan, name: str) -> Architecture:
    architecture: Architecture = plan["architecture"]
    return architecture.model_copy(update={name: getattr(architecture, name) + 1})


def few_layers(plan: Plan) -> Plan:
    plan = settled(plan, pipeline_layers=())
    architecture = plan["architecture"].model_copy(update={"num_hidden_layers": 1})
    return plan | {"architecture": architecture}


NAMES = (*ParallelSettings.model_fields, "global_batch_size", "train.parallel:")


@given(plans(), st.sampled_from(sorted(BREAKS)))
def test_invalid_layouts_fail_with_a_one_line_message(plan: Plan, change: str) -> None:
    broken = BREAKS[change](plan)
    settings = plan["settings"]
    still_valid = {
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
        "empty stage": settings["pipeline_parallel_size"] == 1,
    }
    if still_valid.get(change):
        return
    with pytest.raises((UserError, ValidationError)) as caught:
        check(broken)
    message = message_of(caught.value)
    assert "\n" not in message
    assert any(name in message for name in NAMES), message
    assert "{" not in message


def message_of(error: Exception) -> str:
    if isinstance(error, ValidationError):
        (mistake,) = error.errors()
        return ".".join(map(str, mistake["loc"])) + ": " + mistake["msg"]
    return str(error)


def test_interleaved_schedules_need_equal_rounds() -> None:
    settings = ParallelSettings(
        pipeline_parallel_size=4, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2
    )
    settings.check_batches(8)
    with pytest.raises(
        UserError, match="9 micro batches a step cannot be divided into equal rounds"
    ):
        settings.check_batches(9)


def test_ranks_of_a_pipeline_may_be_idle_while_the_batch_grows() -> None:
    settings = ParallelSettings(pipeline_parallel_size=4)
    settings.check_batches(2, in_rampup=True)
    with pytest.raises(UserError, match=r"2 micro batches leave ranks idle; raise global_batch_"):
        settings.check_batches(2)
    interleaved = {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2}
    settings = ParallelSettings(pipeline_parallel_size=4, **interleaved)
    with pytest.raises(UserError, match=r"idle; start rampup_batch_size with 4 or more, or use"):
        settings.check_batches(2, in_rampup=True)


INVALID_WORLD_SIZES: dict[str, Plan] = {
    "tensor 2 × context 3 × pipeline 1 needs 6 ranks or a multiple, this run has 8": {
        "tensor_parallel_size": 2, "context_parallel_size": 3,
    },
    "data_parallel_replicate_size: 3: does not divide 8 data-parallel ranks": {
        "data_parallel_replicate_size": 3,
    },
    "tensor 16 × context 1 × pipeline 1 needs 16 ranks or a multiple, this run has 8; change": {
        "tensor_parallel_size": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", INVALID_WORLD_SIZES)
def test_invalid_numbers_of_ranks_are_refused(message: str) -> None:
    with pytest.raises(UserError, match=message):
        ParallelSettings(**INVALID_WORLD_SIZES[message]).data_parallel_size(8)


INVALID_MODELS: dict[str, tuple[Plan, Plan]] = {
    "tensor_parallel_size: 3: does not divide 4 .attention heads": (
        {"tensor_parallel_size": 3}, {},
    ),
    "tensor_parallel_size: 2: neither divides 3 key-value heads nor is a multiple": (
        {"tensor_parallel_size": 2},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24},
    ),
    r"tensor_parallel_size: 4: does not divide 50 .intermediate_size.*; give one of 1, .*, 50$": (
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
    "pipeline_parallel_size: 4: 2 layers for 4 pipeline stages leave .*; give at most 2$": (
        {"pipeline_parallel_size": 4}, {},
    ),
    "2 layers for 4 pipeline stages .virtual_pipeline_size: 2. leave a stage empty; lower both": (
        {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2,
         "pipeline_schedule": "interleaved_1f1b"}, {},
    ),
    "pipeline_layers: the sum is 5, but the model has 2 layers": (
        {"pipeline_parallel_size": 2, "pipeline_layers": (2, 3)}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", INVALID_MODELS)
def test_models_that_the_layout_cannot_divide_are_refused(message: str) -> None:
    settings, changes = INVALID_MODELS[message]
    architecture = Architecture(**{**ARCHITECTURE.model_dump(), **changes})
    with pytest.raises(UserError, match=rf"^train\.parallel.*{message}"):
        ParallelSettings(**settings).check_architecture(architecture, 16)


def test_a_ring_needs_no_share_of_the_heads() -> None:
    settings = {"tensor_parallel_size": 2, "context_parallel_size": 4}
    ParallelSettings(**settings).check_architecture(ARCHITECTURE, 16)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_split_backward_schedules_refuse_zero_3(schedule: str) -> None:
    sizes = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
    parallel = {**sizes, "pipeline_schedule": schedule}
    assert TrainSettings(zero_stage=2, parallel=parallel).zero_stage == 2  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=f"wrong, because pipeline_schedule {schedule}"):
        TrainSettings(zero_stage=3, parallel=parallel)  # type: ignore[arg-type]


@given(st.integers(0, 200), st.integers(1, 9))
def test_parts_equal_chunks_of_torch(size: int, ranks: int) -> None:
    parts = [part(size, mesh.Axis(rank, ranks)) for rank in range(ranks)]
    assert [number for rows in parts for number in rows] == [*range(size)]
    chunks = torch.arange(size).chunk(ranks)
    assert [len(rows) for rows in parts if rows] == [len(chunk) for chunk in chunks if len(chunk)]
