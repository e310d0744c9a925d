"""How ranks end: what one meets, all learn of; one of them says it; all leave."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from tokamake.errors import UserError, of_system
from tokamake.runtime.ranks import Ranks

Item = TypeVar("Item")

STOPPED = 75
"""Exit code of a run that was asked to stop before its end: EX_TEMPFAIL of sysexits.h."""


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise what one rank of the process group meets on all of them, else they would wait for it.

    Raises:
        UserError: a rank met one, or an `OSError`: a disk that is full, a file that is gone.
    """
    import torch.distributed as dist

    own: str | None = None
    try:
        yield
    except UserError as error:
        own = str(error)
    except OSError as error:
        own = f"{of_system(error)}; mend it and run again"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    for found in errors:
        if found is not None:
            raise UserError(found)


def report_from_any_rank(items: Iterable[Item], ranks: Ranks) -> Iterator[Item]:
    """Items, and any rank reports a `UserError` that comes in place of one; rank 0 does so anyway.

    The other ranks may not meet it; launchers end them, who wait for this one.
    """
    try:
        yield from items
    except UserError as error:
        if ranks.rank:
            print(f"tokamake: rank {ranks.rank}: {error}", file=sys.stderr, flush=True)
        raise


@contextmanager
def report_from_rank_0(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 alone report a `UserError` that all ranks raise; the others exit with code 2."""
    try:
        yield
    except UserError:
        if ranks.rank:
            # torchrun ends all ranks as soon as one has failed, and rank 0 is still to speak.
            time.sleep(2)
            raise SystemExit(2) from None
        raise


def leave(ranks: Ranks, code: int) -> None:
    """End a rank of several at once, with an exit code; does nothing in a lone process with code 0.

    Python's own way out would now and then abort: gloo's threads ask for the interpreter while it
    shuts down.
    """
    if ranks.world_size == 1:
        if code:
            raise SystemExit(code)
        return
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End this process without Python's own way out, on which see `leave`."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
