"""Pipeline parallelism: which layers a rank has, and the passes of its micro batches.

Stages come from the engine as modules of some layers each; torch's schedules do the passes and send
states to the next stage. GPipe arXiv 1811.06965, 1F1B and interleaved arXiv 2104.04473, zero bubble
arXiv 2401.10241. Shape suffixes: N rows of all micro batches, B rows of one, L tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tokamake.parallel.axis import Axis

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def rank_of_stage(schedule: str, stage: int, *, ranks: int) -> int:
    """Pipeline rank that has a stage: in turns, or for zbv there and back again."""
    if schedule == "zbv" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def stages_of_rank(schedule: str, rank: int, *, ranks: int, num_stages: int) -> list[int]:
    """Stages that a pipeline rank has, ascending."""
    stages = range(num_stages)
    return [stage for stage in stages if rank_of_stage(schedule, stage, ranks=ranks) == rank]


class Pipeline:
    """The stages of this rank, and the passes through them and its peers'.

    Args:
        stages: this rank's stages by their number.
        num_stages: of all ranks.
        schedule: a key of the config's `pipeline_schedule`.
        loss: (output of the last stage, labels) to the loss that is differentiated.
        axis: the pipeline ranks.
        device: of this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        num_stages: int,
        schedule: str,
        loss: Callable[[Tensor, Tensor], Tensor],
        axis: Axis,
        device: torch.device,
    ) -> None:
        assert axis.group is not None
        self._modules, self._num_stages, self._axis = stages, num_stages, axis
        self._stages = [
            PipelineStage(module, number, num_stages, device, group=axis.group)
            for number, module in stages.items()
        ]
        self._schedule, self._loss, self._made = schedule, loss, dict[int, Any]()
        self.has_last = num_stages - 1 in stages

    def train(
        self, inputs_NL: Tensor, labels_NL: Tensor, num_batches: int, **rest: Tensor
    ) -> Tensor:
        """Pass micro batches forward and backward; gradients add up in the stages' parameters.

        Args:
            inputs_NL: tokens of all micro batches.
            labels_NL: their labels.
            num_batches: micro batches that the rows make.
            rest: what every stage's `forward` takes besides, with N rows.

        Returns:
            Sum of the losses of all micro batches where the last stage is, 0 elsewhere.
        """
        losses: list[Tensor] = []
        arguments = (inputs_NL,) if 0 in self._modules else ()
        wanted = {"target": labels_NL, "losses": losses} if self.has_last else {}
        self._schedule_of(num_batches).step(*arguments, **wanted, **rest, return_outputs=False)
        if not losses:
            return torch.zeros((), device=inputs_NL.device)
        return torch.stack(losses).detach().sum()

    def _schedule_of(self, num_batches: int) -> Any:
        if num_batches not in self._made:
            kind = _SCHEDULES[self._schedule]
            single = kind in (ScheduleGPipe, Schedule1F1B)
            stages = self._stages[0] if single else self._stages
            # The loss is a sum over tokens already, so gradients need no division.
            made = kind(stages, num_batches, loss_fn=self._loss, scale_grads=False)
            # Stages remember the last schedule that has prepared them.
            self._made = {num_batches: made}
        return self._made[num_batches]

    @torch.no_grad()
    def evaluate(
        self,
        inputs_NL: Tensor,
        labels_NL: Tensor,
        num_batches: int,
        states: Callable[[Tensor], Tensor],
        **rest: Tensor,
    ) -> Tensor:
        """Pass micro batches forward alone; torch's schedules would go back, too.

        Args:
            inputs_NL: as `train` takes them.
            labels_NL: as `train` takes them.
            num_batches: as `train` takes it.
            states: makes room for what a stage gets from the one before, given its tokens (B, L).
            rest: as `train` takes it.

        Returns:
            Sum of the losses of all micro batches where the last stage is, 0 elsewhere.
        """
        total = torch.zeros((), device=inputs_NL.device)
        passed: dict[tuple[int, int], Tensor] = {}
        sent: list[Any] = []
        chunks = {name: tensor.chunk(num_batches) for name, tensor in rest.items()}
        inputs, labels = inputs_NL.chunk(num_batches), labels_NL.chunk(num_batches)
        for stage, module in sorted(self._modules.items()):
            if stage and stage - 1 not in self._modules:
                # All first: a peer may have to send all before it takes what is sent here.
                for number in range(num_batches):
                    passed[stage, number] = x = states(inputs[number])
                    dist.recv(x, self._peer(stage - 1), group=self._axis.group)
            for number in range(num_batches):
                x = passed.pop((stage, number)) if stage else inputs[number]
                y = module(x, **{name: chunk[number] for name, chunk in chunks.items()})
                if stage == self._num_stages - 1:
                    total += self._loss(y, labels[number])
                elif stage + 1 in self._modules:
                    passed[stage + 1, number] = y
                else:
                    sent.append((y, dist.isend(y, self._peer(stage + 1), group=self._axis.group)))
        for _, request in sent:
            request.wait()
        return total

    def _peer(self, stage: int) -> int:
        assert self._axis.group is not None
        rank = rank_of_stage(self._schedule, stage, ranks=self._axis.size)
        return dist.get_global_rank(self._axis.group, rank)
