"""Long work that ranks share, in rounds: no rank waits longer for another one than a round lasts.

Collectives end after a time-out. Ranks that hash terabytes may finish hours apart, so they meet
every few seconds instead of once at the end.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks

Item = TypeVar("Item")

_ROUND_SECONDS = 20.0
"""Time between two meetings of the ranks."""


def in_rounds(
    work: Iterator[Item | None], ranks: Ranks, *, beat: Callable[[], object] = lambda: None
) -> Iterator[list[Item]]:
    """Do each rank's work (None: a part is done); yield the items that all ranks have finished.

    All ranks call this together.
    """
    import torch.distributed as dist

    is_done = False
    while not is_done:
        own: tuple[list[Item], bool] = [], False
        with raise_on_all_ranks():
            own = _work_for(_ROUND_SECONDS, work)
        rounds: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(rounds, own)
        beat()
        is_done = all(done for _, done in rounds)
        yield [item for finished, _ in rounds for item in finished]


def _work_for(seconds: float, work: Iterator[Item | None]) -> tuple[list[Item], bool]:
    """Work for some time; return the finished items, and whether none are left."""
    end, finished = time.monotonic() + seconds, list[Item]()
    for item in work:
        if item is not None:
            finished.append(item)
        if time.monotonic() > end:
            return finished, False
    return finished, True
