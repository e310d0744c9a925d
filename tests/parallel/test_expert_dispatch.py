"""Rows that travel to the ranks of their experts and back, against sorting in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import spawn
from tokamake.parallel.axis import Axis
from tokamake.parallel.expert_dispatch import ExpertDispatch

RANKS, EXPERTS = 4, 8
COUNTS = {
    "uneven": torch.randint(0, 5, (RANKS, EXPERTS), generator=torch.Generator().manual_seed(1)),
    "all to one expert": torch.tensor([[0] * 5 + [6] + [0] * 2] * RANKS),
    "one rank has none": torch.tensor([[1] * EXPERTS] * 3 + [[0] * EXPERTS]),
    "none at all": torch.zeros(RANKS, EXPERTS, dtype=torch.int64),
}
"""Rows of each rank for each expert."""


def rows_of(counts_E: Tensor, rank: int) -> Tensor:
    """(R, 3) rows of a rank, sorted by expert: rank, expert, number of the row."""
    experts_R = torch.arange(EXPERTS).repeat_interleave(counts_E)
    numbers_R = torch.arange(len(experts_R))
    return torch.stack((torch.full_like(experts_R, rank), experts_R, numbers_R), 1).float()


def travel(counts: list[Tensor], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Send rows to their experts, which multiply them by a factor, and back."""
    rank, results = dist.get_rank(), []
    for counts_RE in counts:
        dispatch = ExpertDispatch(counts_RE[rank], Axis(rank, RANKS, dist.group.WORLD))
        x = rows_of(counts_RE[rank], rank).to(dtype).requires_grad_()
        assert dispatch.lengths == dispatch.counts.tolist()
        assert dispatch.num_sent == len(x)
        own = dispatch.to_experts(x)
        experts_R = torch.arange(EXPERTS).view(RANKS, -1)[rank].repeat_interleave(dispatch.counts)
        factors = (experts_R + 2.0).to(dtype).requires_grad_()
        back = dispatch.to_tokens(own * factors[:, None])
        back.backward(torch.ones_like(back))
        assert x.grad is not None
        assert factors.grad is not None
        results.append((own.detach(), back.detach(), x.grad, factors.grad))
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_reach_their_experts_in_the_order_of_ranks_and_come_back(dtype: torch.dtype) -> None:
    of_ranks = spawn(travel, RANKS, [*COUNTS.values()], dtype)
    for number, (name, counts_RE) in enumerate(COUNTS.items()):
        sent = torch.cat([rows_of(counts_RE[rank], rank) for rank in range(RANKS)])
        by_expert = sent[sent[:, 1].argsort(stable=True)]
        arrived = torch.cat([results[number][0] for results in of_ranks])
        assert torch.equal(arrived, by_expert.to(dtype)), name
        for rank, results in enumerate(of_ranks):
            own, back, gradient, of_factors = results[number]
            x = rows_of(counts_RE[rank], rank).to(dtype)
            factors_R = (x[:, 1:2] + 2).to(dtype)
            assert torch.equal(back, x * factors_R), name
            assert torch.equal(gradient, factors_R.expand_as(x)), name
            assert torch.equal(of_factors, own.sum(1)), name
