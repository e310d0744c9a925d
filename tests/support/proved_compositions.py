"""Proofs of compositions on ranks of this machine; one that fails is shown in its smallest form."""

import os
from collections.abc import Callable, Iterable
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from tests.support.compositions import Composition, known_plug_ins
from tests.support.ranks import RanksFailed, spawn
from tokamake.prove.comparison import differences
from tokamake.runtime.ranks import Ranks


def prove_all(compositions: list[Composition]) -> list[list[str]]:
    """Prove compositions on these ranks; returns the differences of each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)
    ranks = Ranks(rank, size, rank, size)
    with known_plug_ins():
        return [differences(each.run(), ranks, device=torch.device("cpu")) for each in compositions]


def failures(compositions: Iterable[Composition]) -> list[tuple[Composition, str]]:
    """Compositions that fail, each with its first difference or error."""
    by_size: dict[int, list[Composition]] = {}
    for each in compositions:
        by_size.setdefault(each.world_size, []).append(each)
    found = []
    for size, group in by_size.items():
        try:
            of_each = spawn(prove_all, size, group, timeout=900)[0]
        except RanksFailed as error:
            # One of them has ended the ranks of all.
            if len(group) > 1:
                found += [failure for each in group for failure in failures([each])]
                continue
            of_each = [[str(error)]]
        found += [(each, lines[0]) for each, lines in zip(group, of_each, strict=True) if lines]
    return found


Fails = Callable[[Composition], object]
"""Whether a composition fails."""


def shrunk(composition: Composition, fails: Fails) -> Composition:
    """The smallest composition that still fails: axes get their defaults.

    Each axis in turn, then axes together that need each other, such as the size and the schedule of
    a pipeline.
    """
    needed = []
    for axis in composition.values:
        smaller = _without(composition, {axis})
        if smaller.refusal:
            needed.append(axis)
        elif fails(smaller):
            return shrunk(smaller, fails)
    for size in range(2, len(needed) + 1):
        for axes in combinations(needed, size):
            smaller = _without(composition, {*axes})
            if not smaller.refusal and fails(smaller):
                return shrunk(smaller, fails)
    return composition


def _without(composition: Composition, axes: set[str]) -> Composition:
    values = {name: value for name, value in composition.values.items() if name not in axes}
    return composition._replace(values=values)


def assert_proved(compositions: Iterable[Composition]) -> None:
    """Check that all compositions train as one process; the message has the smallest that fails."""
    if not (failed := failures(compositions)):
        return
    composition, line = failed[0]
    # Rounding may differ from run to run: the composition may pass now.
    if again := failures([composition]):
        composition = shrunk(composition, lambda each: failures([each]))
        ((_, line),) = failures([composition]) or again
    form = "the smallest form of one" if again else "one, which passes alone"
    config = f"run.yaml for `tokamake prove`:\n{composition.config}"
    pytest.fail(f"failed: {len(failed)}; {form}:\n{composition}{line}\n{config}")
