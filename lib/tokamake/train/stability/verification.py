"""Looks for silent data corruption: each rank computes a micro batch twice and compares the bits.

Training is deterministic, so a difference is an error of the hardware. Errors of a processor or of
memory, which no driver reports, otherwise spoil the weights of all ranks (arXiv 2102.11245).

An error of one rank reaches others through collectives: its peers compute other bits, too. So both
passes log, in the order of time, hashes of what a rank has or computes (its shards of the weights,
what it sends to other ranks, its loss and its gradients) and of what it receives. A rank is faulty
if the first hash that differs is of something that it computed: until then, it had received the
same bits in both passes. This needs no order between ranks, and no second copy of any tensor.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tokamake.errors import TemporaryError, note_faulty_hosts
from tokamake.parallel.exchange_log import BitOrigin, ExchangeLog, first_difference
from tokamake.train.bad_steps import described
from tokamake.train.random_state import random_state, set_random_state


def check_ranks_repeat(
    passes: Callable[[], Tensor],
    modules: Sequence[nn.Module],
    *,
    weights: Sequence[Tensor],
    log: ExchangeLog,
    warm_up: bool,
    hosts: Sequence[str],
    step: int,
) -> None:
    """Run passes twice on all ranks, and compare their losses and gradients bit by bit.

    Rank 0 prints a line if no rank differs.

    Args:
        passes: forward and backward passes; returns the loss.
        modules: parts of the model on this rank.
        weights: this rank's shards of the weights.
        log: where the passes log their exchanges with other ranks.
        warm_up: whether to run the passes once before: the first ones of a pipeline find shapes.
        hosts: host of each rank.

    Raises:
        TemporaryError: results differ on a rank. The host of the faulty rank is noted, so that the
            job is tried again without it.
    """
    state = random_state()
    if warm_up:
        passes()
    first, second = (
        _logged(passes, modules, weights=weights, log=log, state=state) for _ in range(2)
    )
    set_random_state(state)
    differences: list[Any] = [None] * len(hosts)
    dist.all_gather_object(differences, first_difference(first, second))
    if not any(differences):
        if dist.get_rank() == 0:
            print(
                f"step {step}: each rank computed a micro batch twice, with the same bits",
                flush=True,
            )
        return
    faulty = [rank for rank, each in enumerate(differences) if each is BitOrigin.COMPUTED]
    affected = [rank for rank, each in enumerate(differences) if each]
    named = [*dict.fromkeys(hosts[rank] for rank in faulty or affected)]
    names = ", ".join(named)
    begin, end = f"step {step}: train.verify_interval: ", "The run continues from its last "
    if not faulty:
        raise TemporaryError(
            f"{begin}{described(affected)} on {names} received other bits in the second of two "
            "equal passes, and no rank had computed other bits before; a link between them, or a "
            f"sum on the way, is faulty. {end}checkpoint"
        )
    if not log.has_gathers:  # the error may be another rank's
        raise TemporaryError(
            f"{begin}{described(faulty)} on {names} computed other bits from the same micro batch, "
            "or gathered other weights from the ranks that share them; a processor or memory, or a "
            f"link, is faulty. {end}checkpoint"
        )
    if dist.get_rank() == 0:
        note_faulty_hosts(named)
    raise TemporaryError(
        f"{begin}{described(faulty)} on {names} computed other bits from the same micro batch; a "
        f"processor or memory there is faulty. {end}checkpoint; leave {names} out if the "
        "scheduler does not"
    )


def _logged(
    passes: Callable[[], Tensor],
    modules: Sequence[nn.Module],
    *,
    weights: Sequence[Tensor],
    log: ExchangeLog,
    state: dict[str, Any],
) -> list[tuple[BitOrigin, int]]:
    """Log of passes, with the loss, and each parameter's gradient on this rank alone."""
    from torch.distributed.fsdp import FSDPModule

    set_random_state(state)
    with ExitStack() as hooks, log.on():
        log.computed(*weights)
        for module in modules:
            for part, parameters in _used_parameters(module).items():
                if isinstance(part, FSDPModule):
                    note = partial(_note_gathered, parameters=parameters, log=log)
                    again = partial(_note_gathered_again, parameters=parameters, log=log)
                    hooks.callback(part.register_forward_pre_hook(note).remove)
                    hooks.callback(part.register_forward_hook(again).remove)
                for parameter in parameters:
                    log.gradient_computed(parameter)
        log.computed(passes())
        return log.take()


def _note_gathered(_: nn.Module, __: Any, *, parameters: list[Tensor], log: ExchangeLog) -> None:
    log.received(*parameters)


def _note_gathered_again(
    _: nn.Module, __: Any, output: Any, *, parameters: list[Tensor], log: ExchangeLog
) -> None:
    """Note the weights that the backward pass gathers, before it uses them.

    FSDP2 gathers them in hooks on the same tensors, which it has registered before.
    """

    def note(_: Tensor) -> None:
        log.received(*parameters)

    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(note)


def _used_parameters(module: nn.Module) -> dict[nn.Module, list[Tensor]]:
    """Parameters of the passes, by the part of the model for which FSDP2 gathers them.

    No other rank has added to their gradients.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    found: dict[nn.Module, list[Tensor]] = {}
    for part in module.modules():
        gathered = part if isinstance(part, FSDPModule) else None
        if gathered:
            gathered.unshard()
        if gathered or part is module:
            own = [each for each in part.parameters() if not isinstance(each, DTensor)]
            found[part] = [each for each in own if each.requires_grad]
        if gathered:
            gathered.reshard()
    return found
