"""What our own optimizers share: local parts in fp32, state of each parameter, bounded memory.

A rule is a subclass that updates lists of tensors. Parameters may be plain or DTensors; a rule sees
what this rank holds. State belongs to parameters alone, since DeepSpeed steps them in portions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from tokamake.optim._whole import ALONE, WholeParameters, local

Group = dict[str, Any]

AT_ONCE = {"cpu": 2**18, "accelerator": 2**24}
"""Elements that a rule updates at once, which bounds its memory: to what caches hold on a CPU, to a
few times 64 MiB where starting a kernel costs more."""


@dataclass
class ParameterBatch:
    """Some parameters of a group with all that their update needs, lists of equal length.

    Local parts, fp32 or wider; a rule changes `values` and state in place and leaves `gradients`.
    """

    parameters: list[Tensor] = field(default_factory=list)
    """As the optimizer was given them, to ask `WholeParameters` about."""
    values: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def state(self, name: str) -> list[Tensor]:
        """A tensor of the state of each parameter; its local part if it is like the parameter."""
        return [local(state[name]) for state in self.states]

    def tick(self) -> list[float]:
        """Count a step of each parameter; its number from 1."""
        for state in self.states:
            state["step"] += 1
        return [state["step"].item() for state in self.states]

    def only(self, wanted: list[bool]) -> "ParameterBatch":
        """Those parameters for which it is true."""
        return ParameterBatch(
            list(compress(self.parameters, wanted)),
            list(compress(self.values, wanted)),
            list(compress(self.gradients, wanted)),
            list(compress(self.states, wanted)),
        )


class Rule(torch.optim.Optimizer, ABC):
    """Base of the rules.

    Args:
        groups: parameter groups, as `parameter_groups` makes them.
        whole: how to see parameters whole that ranks hold parts of.
        defaults: what a group may say differently; `lr` and `weight_decay` are set each step.
    """

    zeros: tuple[str, ...] = ()
    """State that is shaped like the parameter and starts from 0."""

    def __init__(
        self, groups: list[Group], *, whole: WholeParameters = ALONE, **defaults: Any
    ) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.whole = whole

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first update."""
        return {"step": number(), **{name: self.like(parameter) for name in self.zeros}}

    @staticmethod
    def like(parameter: Tensor) -> Tensor:
        """Zeros of a parameter's shape and layout, fp32 or wider."""
        return torch.zeros_like(parameter, dtype=wide(parameter), requires_grad=False)

    @abstractmethod
    def update(self, batch: ParameterBatch, group: Group) -> None:
        """Change values and state of a batch by its gradients."""

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
        """Parameters with gradients, in batches of `AT_ONCE` elements or one parameter.

        Cut by whole sizes, so that all ranks' batches are alike.
        """
        batch, size = ParameterBatch(), 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            elements = torch.Size(self.whole.shape(parameter)).numel()
            most = AT_ONCE["cpu" if parameter.device.type == "cpu" else "accelerator"]
            if batch.parameters and size + elements > most:
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
    """Number format of a parameter's state: fp32, or its own if that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def number() -> Tensor:
    """A number in a state, from 0; on the CPU, where reading it waits for no device."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


def decay(batch: ParameterBatch, group: Group) -> None:
    """Decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""
    if group["weight_decay"]:
        torch._foreach_mul_(batch.values, 1.0 - group["lr"] * group["weight_decay"])


def moments(batch: ParameterBatch, beta1: float, beta2: float) -> tuple[list[Tensor], list[Tensor]]:
    """Adam's running means of gradients and of their squares, updated (arXiv 1412.6980)."""
    means, squares = batch.state("exp_avg"), batch.state("exp_avg_sq")
    torch._foreach_lerp_(means, batch.gradients, 1.0 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, batch.gradients, batch.gradients, 1.0 - beta2)
    return means, squares


def adamw(batch: ParameterBatch, group: Group) -> None:
    """AdamW's step, for what a rule leaves to it."""
    directions = adam_direction(batch, group)
    decay(batch, group)
    torch._foreach_add_(batch.values, directions, alpha=-group["lr"])


def adam_direction(batch: ParameterBatch, group: Group) -> list[Tensor]:
    """Adam's update for a rate of 1, both moments freed of their bias."""
    beta1, beta2 = group["betas"]
    steps = batch.tick()
    means, squares = moments(batch, beta1, beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1.0 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(roots, group["eps"])
    found = torch._foreach_div(means, roots)
    torch._foreach_div_(found, [1.0 - beta1**step for step in steps])
    return list(found)
