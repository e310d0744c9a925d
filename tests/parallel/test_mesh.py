"""Meshes: the groups of ranks in any layout, with 8 real ranks and with random layouts."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.random_sharding import Plan, plans
from tests.support.ranks import spawn
from tokamake.config.parallel import ParallelSettings
from tokamake.parallel import mesh

MESHES: list[Plan] = [
    {"tp": tp, "cp": cp, "pp": pp, "replicas": replicas, "shard": shard, "sp": tp == 2, "ep": 1}
    for tp, cp, pp, replicas, shard in [
        (1, 1, 1, 1, True), (1, 1, 1, 1, False), (1, 1, 1, 2, True), (1, 1, 1, 8, True),
        (2, 1, 1, 1, True), (8, 1, 1, 1, True), (1, 4, 1, 1, True), (1, 8, 1, 1, False),
        (1, 1, 8, 1, True), (2, 2, 2, 1, True), (2, 1, 2, 2, True), (2, 2, 1, 2, True),
        (1, 2, 2, 2, True), (4, 1, 1, 2, False), (2, 2, 1, 1, False),
    ]
]  # fmt: skip
WITH_EXPERTS: list[Plan] = [
    {"tp": tp, "cp": cp, "pp": pp, "replicas": replicas, "shard": shard, "sp": False, "ep": ep}
    for ep, tp, cp, pp, replicas, shard in [
        (2, 1, 1, 1, 1, True), (8, 1, 1, 1, 1, True), (4, 1, 2, 1, 1, False), (2, 2, 1, 1, 1, True),
        (2, 1, 2, 2, 1, False), (2, 1, 1, 1, 2, True), (2, 2, 1, 2, 1, True), (4, 1, 4, 1, 1, True),
        (4, 1, 1, 1, 2, True), (2, 1, 1, 1, 4, True),
    ]
]  # fmt: skip


def build_all(plans: list[Plan]) -> list[Plan]:
    """Describe each mesh as seen by this rank."""
    return [describe(plan) for plan in plans]


def describe(plan: Plan) -> Plan:
    sizes = ParallelSettings(
        tensor_parallel_size=plan["tp"],
        context_parallel_size=plan["cp"],
        expert_parallel_size=plan["ep"],
        pipeline_parallel_size=plan["pp"],
        data_parallel_replicate_size=plan["replicas"],
        sequence_parallel=plan["sp"],
    )
    built = mesh.build(
        sizes, dist.get_world_size(), device=torch.device("cpu"), shard=plan["shard"]
    )
    last = built.pipeline.rank == built.pipeline.size - 1
    view: Plan = {"copy": built.copy, "last": last, "sp": built.sequence_parallel}
    for name in ("tensor", "context", "data", "pipeline", "expert"):
        axis = getattr(built, name)
        group = dist.get_process_group_ranks(axis.group) if axis.group else [dist.get_rank()]
        assert dist.get_rank(axis.group) == axis.rank if axis.group else not axis.rank
        view[name] = (axis.rank, axis.size, tuple(group))
    assert built.shards is not None
    last = built.shards.ndim - 1
    view["shards"] = tuple(dist.get_process_group_ranks(built.shards.get_group(last)))
    view["shard"] = built.shards.get_local_rank(last)
    if built.expert_shards is not None:
        last = built.expert_shards.ndim - 1
        view["expert_shards"] = tuple(
            dist.get_process_group_ranks(built.expert_shards.get_group(last))
        )
        view["expert_grid"] = built.copy_grid(["expert"]).tolist()
    return view


def check(plan: Plan, views: list[Plan]) -> None:
    """Check that the views of all ranks describe the same mesh."""
    tp, cp, pp = plan["tp"], plan["cp"], plan["pp"]
    sizes = {"tensor": tp, "context": cp, "data": len(views) // (tp * cp * pp), "pipeline": pp}
    replicas = plan["replicas"] if plan["shard"] else cp * sizes["data"]
    copies: set[tuple[tuple[int, ...], ...]] = set()
    for rank, view in enumerate(views):
        rest = rank
        # The first axis varies fastest.
        for name, size in sizes.items():
            rest, place = divmod(rest, size)
            assert view[name][:2] == (place, size), (plan, name)
            group = view[name][2]
            assert group[place] == rank
            assert len(group) == size
            # All ranks of a group see the same group, so each rank is in one group per axis.
            assert all(views[peer][name][2] == group for peer in group)
        assert view["last"] == (view["pipeline"][0] == pp - 1)
        assert view["sp"] == (plan["sp"] and tp > 1)
        copy = view["copy"]
        assert len(copy) == tp
        assert all(len(shards) * replicas == cp * sizes["data"] for shards in copy)
        assert copy[view["tensor"][0]][view["shard"]] == rank
        assert copy[view["tensor"][0]] == view["shards"]
        copies.add(copy)
    held = sorted(rank for copy in copies for shards in copy for rank in shards)
    assert held == [*range(len(views))]
    if plan["ep"] > 1:
        check_experts(plan, views)


def check_experts(plan: Plan, views: list[Plan]) -> None:
    """Check that consecutive ranks divide experts, and that ranks with the same ones shard them."""
    stride, size = plan["tp"], plan["ep"]
    num_sharers = len(views) // (plan["tp"] * plan["pp"])
    replicas = plan["replicas"] if plan["shard"] else num_sharers
    shards = max(1, num_sharers // replicas // size)
    for rank, view in enumerate(views):
        place, _, group = view["expert"]
        first = rank - place * stride
        assert group == tuple(range(first, first + size * stride, stride))
        assert place == rank // stride % num_sharers % size
        of_shards = view["expert_shards"]
        assert len(of_shards) == shards
        assert rank in of_shards
        assert all(views[peer]["expert"][0] == place for peer in of_shards)
        assert tuple(view["expert_grid"][rank % stride][place]) == of_shards


@pytest.mark.grid
@pytest.mark.ranks
def test_meshes_of_eight_ranks() -> None:
    views_by_rank = spawn(build_all, 8, MESHES + WITH_EXPERTS)
    for number, plan in enumerate(MESHES + WITH_EXPERTS):
        check(plan, [views[number] for views in views_by_rank])


@pytest.mark.parametrize("plan", WITH_EXPERTS)
def test_consecutive_ranks_divide_experts(plan: Plan) -> None:
    check(plan, [as_rank(rank, 8, plan) for rank in range(8)])


@given(plans(), st.booleans())
@settings(max_examples=12, deadline=None)
def test_every_valid_layout_has_a_mesh(plan: Plan, shard: bool) -> None:
    """This process takes the place of one rank after the other, with a fake process group."""
    world_size = plan["world_size"]
    assume(world_size <= 64)
    sizes = plan["settings"]
    short = {
        "tp": sizes["tensor_parallel_size"],
        "cp": sizes["context_parallel_size"],
        "pp": sizes["pipeline_parallel_size"],
        "replicas": sizes["data_parallel_replicate_size"],
        "sp": sizes["sequence_parallel"],
        "ep": 1,
        "shard": shard,
    }
    check(short, [as_rank(rank, world_size, short) for rank in range(world_size)])


def as_rank(rank: int, world_size: int, plan: Plan) -> Plan:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        return describe(plan)
    finally:
        dist.destroy_process_group()
