"""Recomputation for backward passes in parts: one part for gradients of inputs, one for weights.

torch's `checkpoint` computes a function again for each call of the autograd engine. Zero-bubble
schedules (arXiv 2401.10241) call it once for the inputs of a stage, and later once for each group
of weights: a layer would be computed again about ten times, and not as often on ranks that have
other experts in use. Here, it is once for each part, so ranks exchange the same tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Result = TypeVar("Result")
_latest: list["_Frame"] = []
"""The frame that holds its tensors, if any. Both parts visit the layers of a stage in a row, so one
is enough, and memory holds the activations of one frame."""


class _Enough(Exception):
    """All tensors have been computed again."""


class _Frame:
    """A call of a function whose saved tensors are computed again."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._forms, self._tensors = list[str](), list[Tensor]()

    def save(self, tensor: Tensor) -> int:
        """Return the place of a tensor among the saved ones."""
        self._forms.append(_form(tensor))
        return len(self._forms) - 1

    def load(self, place: int) -> Tensor:
        """Return a saved tensor; compute all again if this frame does not hold them.

        Raises:
            RuntimeError: the function has not saved tensors of the same number, shapes and dtypes.
        """
        if not self._tensors:
            forget()
            self._tensors = self._computed()
            _latest.append(self)
        return self._tensors[place]

    def forget(self) -> None:
        """Free the tensors."""
        self._tensors = []

    def _computed(self) -> list[Tensor]:
        tensors: list[Tensor] = []

        def keep(tensor: Tensor) -> int:
            tensors.append(tensor.detach())
            if len(tensors) == len(self._forms):
                raise _Enough
            return len(tensors) - 1

        try:
            with saved_tensors_hooks(keep, tensors.__getitem__), torch.enable_grad():
                self._function(*self._arguments)
        except _Enough:
            pass
        # Ranks that exchange tokens of different micro batches have other shapes.
        if (forms := [*map(_form, tensors)]) != self._forms:
            pairs = zip_longest(self._forms, forms, fillvalue="none")
            number, pair = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
            raise RuntimeError(
                f"a layer saved {pair[0]} as tensor {number}, and {pair[1]} when it was computed "
                "again"
            )
        return tensors


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {(*tensor.shape,)} on {tensor.device}"


def checkpoint(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function; save its arguments alone, and compute the rest again in backward passes.

    Its results may not depend on a random generator or on anything else that changes.
    """
    frame = _Frame(function, arguments)
    with saved_tensors_hooks(frame.save, frame.load):
        return function(*arguments)


@contextmanager
def backward_part() -> Iterator[None]:
    """Calls of the autograd engine in this context are one part of a backward pass."""
    try:
        yield
    finally:
        forget()


def forget() -> None:
    """Free the tensors that are held."""
    while _latest:
        _latest.pop().forget()
