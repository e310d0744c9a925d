"""Pipeline parallelism: the stages of a rank, and the passes of micro batches through them.

A stage is a module with some of the layers. torch's schedules run the passes and send hidden states
to the next stage. GPipe: arXiv 1811.06965; 1F1B and interleaved: arXiv 2104.04473; zero bubble:
arXiv 2401.10241. Shape suffixes: N rows of all micro batches, B rows of a micro batch, L tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
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

from tokamake.config.parallel import rank_of_stage
from tokamake.parallel.axis import Axis
from tokamake.parallel.recomputation import backward_part

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class _RecomputingStage(PipelineStage):
    """A stage that computes its activations again once for each part of a backward pass."""

    def backward_one_chunk(self, *args: Any, **options: Any) -> None:
        with backward_part():
            super().backward_one_chunk(*args, **options)

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
        with backward_part():
            super().backward_weight_one_chunk(*args, **options)


class Pipeline:
    """This rank's stages, connected with the other pipeline ranks; `loss` (output, labels)."""

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
            _RecomputingStage(module, number, num_stages, device, group=axis.group)
            for number, module in stages.items()
        ]
        self._schedule, self._loss, self._schedules = schedule, loss, dict[int, Any]()
        self.has_last = num_stages - 1 in stages
        for number, module in stages.items():
            module.register_forward_pre_hook(partial(self._log_inputs, is_first=number == 0))
            is_last = number == num_stages - 1
            module.register_forward_hook(partial(self._log_outputs, is_last=is_last))

    def _log_inputs(self, _: nn.Module, inputs: tuple[Any, ...], *, is_first: bool) -> None:
        """Log the hidden states that a stage receives, and later the gradients that it sends."""
        log = self._axis.log
        if log is None or not log.is_on or is_first:
            return
        for x in inputs:
            log.received(x)
            if x.requires_grad:
                log.gradient_computed(x)

    def _log_outputs(self, _: nn.Module, __: Any, output: Any, *, is_last: bool) -> None:
        """Log the hidden states that a stage sends, and later the gradients that it receives."""
        log = self._axis.log
        if log is None or not log.is_on:
            return
        for y in output if isinstance(output, tuple) else (output,):
            log.computed(y)
            if y.requires_grad:
                (log.gradient_computed if is_last else log.gradient_received)(y)

    def train(
        self, inputs_NL: Tensor, labels_NL: Tensor, num_batches: int, **rest: Tensor
    ) -> Tensor:
        """Run micro batches forward and backward; gradients accumulate in the parameters.

        Args:
            num_batches: number of micro batches; it divides N.
            rest: keyword arguments of the `forward` of every stage, with N rows each.

        Returns:
            Sum of the losses of all micro batches, fp32, on the rank of the last stage; 0 on
            other ranks.
        """
        losses: list[Tensor] = []
        arguments = (inputs_NL,) if 0 in self._modules else ()
        outputs = {"target": labels_NL, "losses": losses} if self.has_last else {}
        self._schedule_of(num_batches).step(*arguments, **outputs, **rest, return_outputs=False)
        if not losses:
            return torch.zeros((), device=inputs_NL.device)
        return torch.stack(losses).detach().sum()

    def _schedule_of(self, num_batches: int) -> Any:
        if num_batches not in self._schedules:
            kind = _SCHEDULES[self._schedule]
            if kind is Schedule1F1B and num_batches < self._num_stages:
                # torch refuses it; all forward passes come before the backward passes then.
                kind = ScheduleGPipe
            single = kind in (ScheduleGPipe, Schedule1F1B)
            stages = self._stages[0] if single else self._stages
            # The loss is a sum over tokens, so gradients are not divided by num_batches.
            schedule = kind(stages, num_batches, loss_fn=self._loss, scale_grads=False)
            # Only one at a time: a new schedule changes the state of the stages.
            self._schedules = {num_batches: schedule}
        return self._schedules[num_batches]

    @torch.no_grad()
    def evaluate(
        self,
        inputs_NL: Tensor,
        labels_NL: Tensor,
        num_batches: int,
        states: Callable[[Tensor], Tensor],
        **rest: Tensor,
    ) -> Tensor:
        """Run micro batches forward only; torch's schedules would also run the backward pass.

        Args:
            states: function of the token ids (B, L) of a micro batch that returns an empty tensor
                for the output of the previous stage.
        """
        total = torch.zeros((), device=inputs_NL.device)
        received: dict[tuple[int, int], Tensor] = {}
        sent: list[Any] = []
        chunks = {name: tensor.chunk(num_batches) for name, tensor in rest.items()}
        inputs, labels = inputs_NL.chunk(num_batches), labels_NL.chunk(num_batches)
        for stage, module in sorted(self._modules.items()):
            if stage and stage - 1 not in self._modules:
                # Receive all of them first: the peer may send all before it receives from here.
                for number in range(num_batches):
                    received[stage, number] = x = states(inputs[number])
                    dist.recv(x, self._peer(stage - 1), group=self._axis.group)
            for number in range(num_batches):
                x = received.pop((stage, number)) if stage else inputs[number]
                y = module(x, **{name: chunk[number] for name, chunk in chunks.items()})
                if stage == self._num_stages - 1:
                    total += self._loss(y, labels[number])
                elif stage + 1 in self._modules:
                    received[stage + 1, number] = y
                else:
                    sent.append((y, dist.isend(y, self._peer(stage + 1), group=self._axis.group)))
        for _, request in sent:
            request.wait()
        return total

    def _peer(self, stage: int) -> int:
        """Global rank of a stage."""
        assert self._axis.group is not None
        rank = rank_of_stage(self._schedule, stage, ranks=self._axis.size)
        return dist.get_global_rank(self._axis.group, rank)
