"""Base class of tokamake's own optimizers: fp32 local parts, state per parameter, bounded memory.

A subclass, a rule, updates lists of tensors. Parameters may be plain tensors or DTensors; a rule
sees this rank's local parts. All state is per parameter, because DeepSpeed steps some parameters at
a time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from tokamake.optim._sharded_parameters import UNSHARDED, WholeParameters, local
from tokamake.runtime.torch_internals import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
)

Group = dict[str, Any]

AT_ONCE = {"cpu": 2**18, "accelerator": 2**24}
"""Elements that a rule updates at once. On a CPU they fit into the caches. On accelerators, where
kernel launches are costly, they need a few times 64 MiB."""


@dataclass
class ParameterBatch:
    """Some parameters of a group, their gradients and states, in lists of equal length.

    `values` and `gradients` are local parts, fp32 or wider. A rule changes `values` and states in
    place and does not change `gradients`.
    """

    parameters: list[Tensor] = field(default_factory=list)
    """The parameters of the optimizer, as arguments of the methods of `WholeParameters`."""
    values: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def state(self, name: str) -> list[Tensor]:
        """State tensor `name` of each parameter: the local part if it is shaped like it."""
        return [local(state[name]) for state in self.states]

    def tick(self) -> list[float]:
        """Increment the step counts of all parameters and return them; the first step is 1."""
        for state in self.states:
            state["step"] += 1
        return [state["step"].item() for state in self.states]

    def only(self, selected: list[bool]) -> "ParameterBatch":
        """The batch of the parameters for which `selected` is True."""
        return ParameterBatch(
            list(compress(self.parameters, selected)),
            list(compress(self.values, selected)),
            list(compress(self.gradients, selected)),
            list(compress(self.states, selected)),
        )


class Rule(torch.optim.Optimizer, ABC):
    """Base class of the rules; `lr` and `weight_decay` are set before each step."""

    zeros: tuple[str, ...] = ()
    """Names of the state tensors that are shaped like the parameter and start at 0."""
    has_owners = False
    """Whether `update` gives each whole parameter of a batch to one of the ranks that divide it."""

    def __init__(
        self, groups: list[Group], *, whole: WholeParameters = UNSHARDED, **defaults: Any
    ) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.whole = whole

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Create the state of a parameter before its first update."""
        return {"step": number(), **{name: self.like(parameter) for name in self.zeros}}

    @staticmethod
    def like(parameter: Tensor) -> Tensor:
        """Zeros of a parameter's shape and layout, fp32 or wider."""
        return torch.zeros_like(parameter, dtype=wide(parameter), requires_grad=False)

    @abstractmethod
    def update(self, batch: ParameterBatch, group: Group) -> None:
        """Update values and states of a batch in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in self.batches(group):
                self.update(batch, group)
                for parameter, value in zip(batch.parameters, batch.values, strict=True):
                    if (part := local(parameter.detach())).dtype != value.dtype:
                        part.copy_(value)
        return loss

    def batches(self, group: Group) -> Iterator[ParameterBatch]:
        """Yield parameters with gradients in batches of at most `AT_ONCE` elements a rank.

        A larger parameter is a batch of its own; with `has_owners`, a batch has a parameter for
        each rank. Batches count equal parts of whole parameters, so that they are the same on all
        ranks, which call collectives together.
        """
        batch, size = ParameterBatch(), 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            num_parts = self.whole.num_parts(parameter)
            elements = math.ceil(math.prod(self.whole.shape(parameter)) / num_parts)
            limit = AT_ONCE["cpu" if parameter.device.type == "cpu" else "accelerator"]
            enough = num_parts if self.has_owners else 1
            if len(batch.parameters) >= enough and size + elements > limit:
                yield batch
                batch, size = ParameterBatch(), 0
            size += elements
            self._add(batch, parameter)
        if batch.parameters:
            yield batch

    def _add(self, batch: ParameterBatch, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.start(parameter))
        assert parameter.grad is not None
        batch.parameters.append(parameter)
        batch.values.append(local(parameter.detach()).to(wide(parameter)))
        batch.gradients.append(local(parameter.grad).to(wide(parameter)))
        batch.states.append(state)


def wide(parameter: Tensor) -> torch.dtype:
    """Dtype of a parameter's state: fp32, or the parameter's dtype if that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def number() -> Tensor:
    """Create a scalar of a state, 0; on the CPU, so that reading it does not wait for a device."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


def decay(batch: ParameterBatch, group: Group) -> None:
    """Apply decoupled weight decay in place (Loshchilov & Hutter 2019, arXiv 1711.05101)."""
    if group["weight_decay"]:
        foreach_mul_(batch.values, 1.0 - group["lr"] * group["weight_decay"])


def moments(batch: ParameterBatch, beta1: float, beta2: float) -> tuple[list[Tensor], list[Tensor]]:
    """Update and return Adam's means of gradients and of their squares (arXiv 1412.6980)."""
    means, squares = batch.state("exp_avg"), batch.state("exp_avg_sq")
    foreach_lerp_(means, batch.gradients, 1.0 - beta1)
    foreach_mul_(squares, beta2)
    foreach_addcmul_(squares, batch.gradients, batch.gradients, 1.0 - beta2)
    return means, squares


def adamw(batch: ParameterBatch, group: Group) -> None:
    """Apply a step of AdamW, for parameters that a rule itself does not cover."""
    directions = adam_direction(batch, group)
    decay(batch, group)
    foreach_add_(batch.values, directions, alpha=-group["lr"])


def adam_direction(batch: ParameterBatch, group: Group) -> list[Tensor]:
    """Adam's update for a learning rate of 1, with bias correction."""
    beta1, beta2 = group["betas"]
    steps = batch.tick()
    means, squares = moments(batch, beta1, beta2)
    roots = foreach_sqrt(squares)
    foreach_div_(roots, [(1.0 - beta2**step) ** 0.5 for step in steps])
    foreach_add_(roots, group["eps"])
    directions = foreach_div(means, roots)
    foreach_div_(directions, [1.0 - beta1**step for step in steps])
    return list(directions)
