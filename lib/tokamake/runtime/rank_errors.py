"""Errors across ranks: an error on one rank is raised on all; one rank reports it; all exit."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from tokamake.errors import TemporaryError, UserError, note_failure, of_system
from tokamake.runtime.device import group_device
from tokamake.runtime.ranks import Ranks

Item = TypeVar("Item")
_SINGLE: list[Ranks] = []
"""Single ranks of this process that have left, see `leave`."""


def first_of_ranks(value: str) -> str:
    """The first text that is not empty, in the order of ranks; all ranks call this together."""
    import torch.distributed as dist

    values = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return next(filter(None, values), "")


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise an error of any rank on all ranks; otherwise, other ranks would wait forever.

    Without an error, ranks exchange one number, so this takes no time on thousands of ranks.

    Raises:
        UserError: a rank raised a `UserError`.
        TemporaryError: a rank raised a `TemporaryError`, or an `OSError` such as a full disk.
    """
    import torch
    import torch.distributed as dist

    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
    except OSError as error:
        own = TemporaryError(f"{of_system(error)}; fix it and rerun")
    num_errors = torch.tensor(int(own is not None), device=group_device())
    dist.all_reduce(num_errors)
    if not num_errors:
        return
    errors: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own and (isinstance(own, TemporaryError), str(own)))
    for first in filter(None, errors):
        is_temporary, message = first
        raise (TemporaryError if is_temporary else UserError)(message)


def report_from_any_rank(items: Iterable[Item], ranks: Ranks) -> Iterator[Item]:
    """Yield the items; a `UserError` is reported on whichever rank raises it, not only on rank 0.

    An error while reading samples may occur on one rank only. The other ranks then wait until the
    launcher ends them.
    """
    try:
        yield from items
    except UserError as error:
        if ranks.rank:  # rank 0 reports all its errors
            print(f"tokamake: rank {ranks.rank}: {error}", file=sys.stderr, flush=True)
        raise


@contextmanager
def report_from_rank_0(ranks: Ranks) -> Iterator[None]:
    """Let only rank 0 report a `UserError` that all ranks raise; other ranks exit with code 2."""
    try:
        yield
    except UserError as error:
        if ranks.rank:
            note_failure(error)  # it may be the only rank that fails
            # torchrun ends all ranks when one of them fails: give rank 0 time to report.
            time.sleep(2)
            raise SystemExit(2) from None
        raise


def leave(ranks: Ranks, code: int) -> None:
    """Exit with `code`; a single rank with code 0 returns instead, and `has_left` is true then.

    Ranks skip Python's own shutdown. It sometimes aborts, because threads of gloo request the
    interpreter while it shuts down.
    """
    if ranks.world_size == 1:
        _SINGLE.append(ranks)
        if code:
            raise SystemExit(code)
        return
    exit_now(code)


def has_left() -> bool:
    """Whether this process was a single rank whose work has ended; `exit_now` is safe then."""
    return bool(_SINGLE)


def exit_now(code: int) -> NoReturn:
    """End this process without Python's own shutdown, see `leave`."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
