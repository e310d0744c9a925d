"""Faults that are planted in the code that divides a step among ranks, and what shows them."""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.support.composition_axes import Values
from tests.support.compositions import Composition
from tests.support.proved_compositions import prove_all


def composition(
    world_size: int, values: Values, family: str = "llama", objective: str = "causal"
) -> Composition:
    single = Composition(family, objective, values, 3)
    size = world_size // single.world_size
    return single._replace(values=values | {"data_parallel_size": size})


TENSOR = {"parallel.tensor_parallel_size": 2}
SEQUENCE = TENSOR | {"parallel.sequence_parallel": True}
CONTEXT = {"parallel.context_parallel_size": 2}
ULYSSES = CONTEXT | {"parallel.context_parallel_method": "ulysses"}
PIPELINE = {"parallel.pipeline_parallel_size": 2}
EXPERTS = {"parallel.expert_parallel_size": 2, "architecture.num_experts": 4}
TIED = {"architecture.tie_word_embeddings": True}
SHARDED = {"zero_stage": 2}
MASKED = {"eod_mask_loss": True}
DEEPSPEED = {"backend": "deepspeed"}
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
FURTHER = {"architecture.num_nextn_predict_layers": 1}


class Fault(NamedTuple):
    """A change of a function's source, and a composition that shows it."""

    function: Callable[..., Any]
    right: str
    wrong: str
    shown_by: Composition


def faulty_source(fault: Fault) -> str:
    """Source of the function with the fault."""
    source = textwrap.dedent(inspect.getsource(fault.function))
    assert source.count(fault.right) == 1, f"{fault.right!r} in {fault.function.__qualname__}"
    return source.replace(fault.right, fault.wrong)


def plant(fault: Fault) -> None:
    """Change the function in this process, wherever it is imported.

    The new code replaces the old function's code, since other modules hold the function itself.
    """
    changed = faulty_source(fault)
    changed = changed.removeprefix("@staticmethod\n").removeprefix("@once_differentiable\n")
    function = inspect.unwrap(fault.function)
    cells = function.__code__.co_freevars
    # A function that uses `super` or `self.__class__` has a cell for its class.
    around = f"def around({', '.join(cells)}):\n{textwrap.indent(changed, '    ')}\n"
    around += f"    return {function.__name__}\n"
    namespace: dict[str, Any] = {}
    exec(around, function.__globals__, namespace)
    made = inspect.unwrap(namespace["around"](*cells))
    function.__code__ = made.__code__


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Change the function, and restore it at the end."""
    function = inspect.unwrap(fault.function)
    right = function.__code__
    plant(fault)
    try:
        yield
    finally:
        function.__code__ = right


class Proved(NamedTuple):
    """Differences in the proof of a composition on these ranks."""

    with_fault: dict[str, list[str]]
    """By the names of faults that it shows."""
    without: list[str]
    """After them: none, if the code is right again."""


def prove_with(faults: Iterable[tuple[str, Fault]]) -> list[Proved]:
    """Prove compositions with each of their faults in place, then without a fault."""
    by_composition: dict[str, list[tuple[str, Fault]]] = {}
    for name, fault in faults:
        by_composition.setdefault(str(fault.shown_by), []).append((name, fault))
    proved = []
    for group in by_composition.values():
        found = {}
        for name, fault in group:
            with planted(fault):
                (found[name],) = prove_all([fault.shown_by])
        (without,) = prove_all([group[0][1].shown_by])
        proved.append(Proved(found, without))
    return proved
