"""Looks for silent data corruption: each rank computes a micro batch twice and compares the bits.

Training is deterministic, so a difference is an error of the hardware. Errors of a processor or of
memory, which no driver reports, otherwise spoil the weights of all ranks (arXiv 2102.11245).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokamake.errors import TemporaryError, note_faulty_hosts
from tokamake.train.bad_steps import described
from tokamake.train.random_state import random_state, set_random_state

_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the bytes of an element."""


def check_ranks_repeat(
    passes: Callable[[], Tensor], modules: Sequence[nn.Module], *, hosts: Sequence[str], step: int
) -> None:
    """Run passes twice on all ranks, and compare their losses and gradients bit by bit.

    Rank 0 prints a line if no rank differs.

    Args:
        passes: forward and backward passes of a micro batch; returns the loss.
        modules: parts of the model on this rank.
        hosts: host of each rank.

    Raises:
        TemporaryError: results differ on a rank. Its host is noted as faulty, so that the job is
            tried again without it.
    """
    state = random_state()
    first, second = (_sums_of_bits(passes, modules, state=state) for _ in range(2))
    set_random_state(state)
    same: list[Any] = [None] * len(hosts)
    dist.all_gather_object(same, torch.equal(first, second))
    faulty = [rank for rank, repeats in enumerate(same) if not repeats]
    if not faulty:
        if dist.get_rank() == 0:
            print(
                f"step {step}: each rank computed a micro batch twice, with the same bits",
                flush=True,
            )
        return
    named = [*dict.fromkeys(hosts[rank] for rank in faulty)]
    if dist.get_rank() == 0:
        note_faulty_hosts(named)
    raise TemporaryError(
        f"step {step}: train.verify_interval: {described(faulty)} on {', '.join(named)} computed "
        "other bits from the same micro batch; a processor or memory there is faulty. The run "
        f"continues from its last checkpoint; leave {', '.join(named)} out if the scheduler does "
        "not"
    )


def _sums_of_bits(
    passes: Callable[[], Tensor], modules: Sequence[nn.Module], *, state: dict[str, Any]
) -> Tensor:
    """Sum of the bits of the loss, and of each parameter's gradient on this rank alone."""
    set_random_state(state)
    parameters = [each for module in modules for each in _own_parameters(module)]
    sums = [torch.zeros((), dtype=torch.int64, device=each.device) for each in parameters]

    def note(gradient: Tensor, *, number: int) -> None:
        sums[number] = sums[number] + _sum_of_bits(gradient)

    with ExitStack() as hooks:
        for number, parameter in enumerate(parameters):
            hook = parameter.register_hook(partial(note, number=number))
            hooks.callback(hook.remove)
        loss = passes()
    return torch.stack([_sum_of_bits(loss), *sums])


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Sum of the elements as integers: one flipped bit changes it, the order does not."""
    integers = tensor.detach().contiguous().view(_WIDTHS[tensor.element_size()])
    return integers.sum(dtype=torch.int64)


def _own_parameters(module: nn.Module) -> list[Tensor]:
    """Parameters whose gradients no other rank has added to: FSDP2 gathers them for a pass."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    found: dict[int, Tensor] = {}
    for part in module.modules():
        gathered = part if isinstance(part, FSDPModule) else None
        if gathered:
            gathered.unshard()
        if gathered or part is module:
            own = (each for each in part.parameters() if not isinstance(each, DTensor))
            found |= {id(each): each for each in own if each.requires_grad}
        if gathered:
            gathered.reshard()
    return [*found.values()]
