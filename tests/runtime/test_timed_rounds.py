"""Work in rounds: what ranks have finished is known to all after each round."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.ranks import spawn
from tokamake.errors import UserError
from tokamake.runtime import timed_rounds
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.timed_rounds import in_rounds


def work(num_parts: int) -> Iterator[str | None]:
    for part in range(num_parts):
        yield None
        yield f"rank {dist.get_rank()}, {part}"


def rounds_of(*nums: int) -> tuple[list[list[str]], int]:
    """What each round yields, with a round for each step of the work; the number of beats."""
    rank, beats = dist.get_rank(), list[int]()
    timed_rounds._ROUND_SECONDS = -1
    ranks = Ranks(rank, len(nums), 0, 1)
    rounds = [*in_rounds(work(nums[rank]), ranks, beat=lambda: beats.append(1))]
    return rounds, len(beats)


@pytest.mark.ranks
def test_ranks_with_less_work_meet_the_others_in_each_round() -> None:
    first, second = spawn(rounds_of, 2, 2, 0)
    assert first == second == ([[], ["rank 0, 0"], [], ["rank 0, 1"], []], 5)


def failing() -> str:
    def fail() -> Iterator[None]:
        if dist.get_rank():
            raise UserError("damaged")
        yield None

    try:
        list(in_rounds(fail(), Ranks(dist.get_rank(), 2, 0, 1)))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_an_error_of_a_rank_is_raised_on_all() -> None:
    assert spawn(failing, 2) == ["damaged"] * 2
