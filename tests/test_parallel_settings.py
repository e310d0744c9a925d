"""How ranks may share a run: random settings that fit pass, those that do not fail in one line."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ranks import spawn
from runs import ARCHITECTURE

from tokamake.config import Architecture, ParallelSettings, TrainSettings
from tokamake.config.batching import BatchSizes
from tokamake.config.parallel import INTERLEAVED
from tokamake.errors import UserError
from tokamake.parallel import mesh
from tokamake.parallel.pipeline import rank_of_stage, stages_of_rank
from tokamake.parallel.tensor import part

Plan = dict[str, Any]
"""Of a run: settings, architecture, ranks and batches."""


@st.composite
def plans(draw: st.DrawFn, most_ranks: int = 64) -> Plan:
    """Runs whose sizes fit together by construction."""
    tensor, context = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    pipeline, replicas = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    settings: Plan = {
        "tensor_parallel_size": tensor,
        "context_parallel_size": context,
        "pipeline_parallel_size": pipeline,
        "data_parallel_replicate_size": replicas,
        "sequence_parallel": draw(st.booleans()),
        "context_parallel_method": draw(st.sampled_from(["ring", "ulysses"])),
    }
    if pipeline > 1:
        settings |= draw(schedules())
    data = replicas * draw(st.integers(1, 3))
    micro = draw(st.integers(1, 3))
    stages = pipeline * settings.get("virtual_pipeline_size", 1)
    if draw(st.booleans()) and pipeline > 1:
        counts = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
        settings["pipeline_layers"] = tuple(counts)
    layers = sum(settings.get("pipeline_layers", ())) or stages + draw(st.integers(0, 9))
    return {
        "settings": settings,
        "world_size": tensor * context * pipeline * data,
        "data": data,
        "architecture": architecture(draw, tensor * context, layers),
        "sequence_length": 2 * context * tensor * draw(st.integers(1, 9)),
        "micro_batch_size": micro,
        "global_batch_size": micro * data * pipeline * draw(st.integers(1, 4)),
    }


@st.composite
def schedules(draw: st.DrawFn) -> Plan:
    """A schedule of a pipeline, and stages of each rank that it can have."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", *INTERLEAVED]))
    several = 2 if schedule == "zbv" else draw(st.integers(2, 3))
    virtual = several if schedule in INTERLEAVED else 1
    return {"pipeline_schedule": schedule, "virtual_pipeline_size": virtual}


def architecture(draw: st.DrawFn, multiple: int, layers: int) -> Architecture:
    """A model whose heads and widths are multiples of so many."""
    groups = draw(st.sampled_from([1, multiple]))
    heads = multiple * draw(st.integers(1, 3))
    return ARCHITECTURE.model_copy(
        update={
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "hidden_size": 4 * heads,
            "intermediate_size": multiple * draw(st.integers(1, 9)),
        }
    )


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
    "does not divide": lambda p: p | {"world_size": p["world_size"] + 1},
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
        "does not divide": plan["world_size"] == plan["data"],
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
    "tensor 2 × context 3 × pipeline 1 parallel = 6 does not divide 8 ranks": {
        "tensor_parallel_size": 2, "context_parallel_size": 3,
    },
    "data_parallel_replicate_size: 3: does not divide 8 data-parallel ranks": {
        "data_parallel_replicate_size": 3,
    },
    "tensor 16 × context 1 × pipeline 1 parallel = 16 does not divide 8 ranks; start a multiple": {
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
    with pytest.raises(UserError, match=rf"^train\.parallel.*{message}"):
        ParallelSettings(**settings).check_architecture(ARCHITECTURE.model_copy(update=shape), 16)


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


MESHES: list[Plan] = [
    {"tp": tp, "cp": cp, "pp": pp, "replicas": replicas, "shard": shard, "sp": tp == 2}
    for tp, cp, pp, replicas, shard in [
        (1, 1, 1, 1, True), (1, 1, 1, 1, False), (1, 1, 1, 2, True), (1, 1, 1, 8, True),
        (2, 1, 1, 1, True), (8, 1, 1, 1, True), (1, 4, 1, 1, True), (1, 8, 1, 1, False),
        (1, 1, 8, 1, True), (2, 2, 2, 1, True), (2, 1, 2, 2, True), (2, 2, 1, 2, True),
        (1, 2, 2, 2, True), (4, 1, 1, 2, False), (2, 2, 1, 1, False),
    ]
]  # fmt: skip


def build_all(plans: list[Plan]) -> list[Plan]:
    """What this rank sees of each mesh."""
    return [seen(plan) for plan in plans]


def seen(plan: Plan) -> Plan:
    import torch.distributed as dist

    settings = ParallelSettings(
        tensor_parallel_size=plan["tp"],
        context_parallel_size=plan["cp"],
        pipeline_parallel_size=plan["pp"],
        data_parallel_replicate_size=plan["replicas"],
        sequence_parallel=plan["sp"],
    )
    made = mesh.build(settings, dist.get_world_size(), torch.device("cpu"), shard=plan["shard"])
    found: Plan = {"copy": made.copy, "last": made.is_last_stage, "sp": made.sequence_parallel}
    for name in ("tensor", "context", "data", "pipeline"):
        axis = getattr(made, name)
        group = dist.get_process_group_ranks(axis.group) if axis.group else [dist.get_rank()]
        assert dist.get_rank(axis.group) == axis.rank if axis.group else not axis.rank
        found[name] = (axis.rank, axis.size, tuple(group))
    assert made.shards is not None
    last = made.shards.ndim - 1
    found["shards"] = tuple(dist.get_process_group_ranks(made.shards.get_group(last)))
    found["shard"] = made.shards.get_local_rank(last)
    return found


@pytest.mark.ranks
def test_meshes_of_eight_ranks() -> None:
    of_ranks = spawn(build_all, 8, MESHES)
    for number, plan in enumerate(MESHES):
        founds = [found[number] for found in of_ranks]
        tp, cp, pp = plan["tp"], plan["cp"], plan["pp"]
        sizes = {"tensor": tp, "context": cp, "data": 8 // (tp * cp * pp), "pipeline": pp}
        replicas = plan["replicas"] if plan["shard"] else cp * sizes["data"]
        copies: set[tuple[tuple[int, ...], ...]] = set()
        for rank, found in enumerate(founds):
            rest = rank
            # The first one counts fastest.
            for name, size in sizes.items():
                rest, place = divmod(rest, size)
                assert found[name][:2] == (place, size), (plan, name)
                group = found[name][2]
                assert group[place] == rank
                assert len(group) == size
                # All of a group know the same group: each rank is in one of a kind.
                assert all(founds[peer][name][2] == group for peer in group)
            assert found["last"] == (found["pipeline"][0] == pp - 1)
            assert found["sp"] == (plan["sp"] and tp > 1)
            copy = found["copy"]
            assert len(copy) == tp
            assert all(len(shards) * replicas == cp * sizes["data"] for shards in copy)
            assert copy[found["tensor"][0]][found["shard"]] == rank
            assert copy[found["tensor"][0]] == found["shards"]
            copies.add(copy)
        assert sorted(rank for copy in copies for shards in copy for rank in shards) == [*range(8)]
