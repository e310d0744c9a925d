"""Meshes: who works with whom in any layout, by real groups of 8 ranks and by random plans."""

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
    sizes = ParallelSettings(
        tensor_parallel_size=plan["tp"],
        context_parallel_size=plan["cp"],
        pipeline_parallel_size=plan["pp"],
        data_parallel_replicate_size=plan["replicas"],
        sequence_parallel=plan["sp"],
    )
    made = mesh.build(sizes, dist.get_world_size(), torch.device("cpu"), shard=plan["shard"])
    last = made.pipeline.rank == made.pipeline.size - 1
    found: Plan = {"copy": made.copy, "last": last, "sp": made.sequence_parallel}
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


def check(plan: Plan, founds: list[Plan]) -> None:
    """Whether what all ranks see of a mesh fits together."""
    tp, cp, pp = plan["tp"], plan["cp"], plan["pp"]
    sizes = {"tensor": tp, "context": cp, "data": len(founds) // (tp * cp * pp), "pipeline": pp}
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
    held = sorted(rank for copy in copies for shards in copy for rank in shards)
    assert held == [*range(len(founds))]


@pytest.mark.ranks
def test_meshes_of_eight_ranks() -> None:
    of_ranks = spawn(build_all, 8, MESHES)
    for number, plan in enumerate(MESHES):
        check(plan, [found[number] for found in of_ranks])


@given(plans(), st.booleans())
@settings(max_examples=12, deadline=None)
def test_every_layout_that_fits_has_a_mesh(plan: Plan, shard: bool) -> None:
    """Each rank of it is played by this process, with groups that carry nothing."""
    world_size = plan["world_size"]
    assume(world_size <= 64)
    chosen = plan["settings"]
    short = {
        "tp": chosen["tensor_parallel_size"],
        "cp": chosen["context_parallel_size"],
        "pp": chosen["pipeline_parallel_size"],
        "replicas": chosen["data_parallel_replicate_size"],
        "sp": chosen["sequence_parallel"],
        "shard": shard,
    }
    check(short, [as_rank(rank, world_size, short) for rank in range(world_size)])


def as_rank(rank: int, world_size: int, plan: Plan) -> Plan:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        return seen(plan)
    finally:
        dist.destroy_process_group()
