"""Load the newest checkpoint of a run that is whole; damage shows only while tensors are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train import resume
from tokamake.train.resume import StartingPoint


def load_newest_whole(
    load: Callable[[Path], None], run: Run, ranks: Ranks, start: StartingPoint
) -> StartingPoint:
    """Load the checkpoint that a run resumes from, or the newest one before it that is whole.

    All ranks call this together, and load the same checkpoint.

    Args:
        load: loads a checkpoint and verifies what it reads; each call replaces what it has loaded.
        run: the resolved run.
        ranks: this process among its peers.
        start: the run's newest checkpoint.

    Returns:
        Where training goes on.

    Raises:
        UserError: no checkpoint of the run is whole.
    """
    newest_problem = ""
    while start.resumed:
        try:
            with raise_on_all_ranks():
                load(start.resumed)
        except UserError as error:
            newest_problem = newest_problem or str(error)
            problem = error
        else:
            return start
        agreed: list[Any] = [None]
        with raise_on_all_ranks():
            if ranks.rank == 0:
                agreed = [resume.state_before(run.output, start.state)]
        dist.broadcast_object_list(agreed, src=0)
        if (state := agreed[0]) is None:
            break
        start = StartingPoint(state, run.output / f"global_step{state.step}")
        ranks.print_once(f"{problem}: going back to {start.resumed}")
    raise UserError(
        f"{newest_problem}; {run.output} has no whole checkpoint before it: restore one, or move "
        "the folder away to start at step 0"
    )
