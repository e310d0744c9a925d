"""Load the newest checkpoint of a run that is whole; damage shows only while tensors are read."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from tokamake.checkpoint.native.folder import check_files
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints import resume
from tokamake.train.checkpoints.resume import ResumePoint


def load_newest_whole(
    load: Callable[[Path], None], run: Run, *, ranks: Ranks, start: ResumePoint
) -> ResumePoint:
    """Load the checkpoint that a run resumes from, or the newest one before it that is whole.

    All ranks call this together, and load the same checkpoint.

    Args:
        load: loads a checkpoint and verifies what it reads; each call replaces what it has loaded.
    """
    newest_problem = ""
    while start.resumed:
        try:
            with raise_on_all_ranks():
                if ranks.rank == 0:  # what is not whole must not come into the model
                    check_files(start.resumed)
            with raise_on_all_ranks():
                load(start.resumed)
        except UserError as error:
            newest_problem = newest_problem or str(error)
            problem = error
        else:
            return start
        if (before := newest_before(start.state, run, ranks=ranks)) is None:
            break
        start = before
        reason = str(problem).rpartition("; ")[0] or str(problem)  # no remedy is needed
        ranks.print_once(f"{reason}: going back to {start.resumed}")
    raise UserError(
        f"{newest_problem}; {run.output} has no whole checkpoint before it: restore one, or move "
        "the folder away to start at step 0"
    )


def newest_before(state: ResumeState, run: Run, *, ranks: Ranks) -> ResumePoint | None:
    """Newest checkpoint of a run with all its files before a state; None: there is none.

    All ranks call this together.
    """
    agreed: list[ResumeState | None] = [None]
    with raise_on_all_ranks():
        if ranks.rank == 0:
            agreed = [resume.state_before(run.output, state)]
    dist.broadcast_object_list(agreed, src=0)
    before = agreed[0]
    return before and ResumePoint(before, run.output / f"global_step{before.step}")
