"""Compositions that cover every pair of values of two axes several times.

Pairs that tokamake refuses are impossible: the config and its checks decide that, no list here.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import combinations
from typing import Any

from tests.support.composition_axes import EFFECTS, KINDS, learner_axes
from tests.support.compositions import Composition, changed, known_plug_ins, learners

TIMES = 5
"""Compositions that a whole drawing has for each pair."""
USUAL_RANKS = (1, 2, 2, 2)
"""Most ranks of a composition, unless its pair needs more: each rank costs as much time."""
_CONTEXTS = 40
"""Compositions that a pair is tried in before it counts as refused."""
_CHANGED = 0.4
"""Share of axes whose value is drawn where no pair needs one."""
EXPERTS = "parallel.expert_parallel_size"
OF_16_BITS = {"precision", "static_loss_scale"}
"""Axes whose pairs a proof in 16 bits counts for. It has wide limits: other pairs need fp32."""
Fact = tuple[str, Any]
"""An axis and its value."""
Pair = tuple[Fact, Fact]


def pairs(facts: dict[str, Any]) -> Iterator[Pair]:
    """Pairs of values of two axes, by the names of the axes."""
    return combinations(sorted(facts.items(), key=lambda fact: fact[0]), 2)


def together(kinds: Iterable[str], composition: Composition) -> bool:
    """Whether a composition has kinds of parallelism together, and does not divide experts."""
    divides_experts = EXPERTS in composition.axes and composition.value(EXPERTS) > 1
    return not divides_experts and all(
        kind in composition.axes and composition.value(kind) > 1 for kind in kinds
    )


@cache
def learners_of_pairs() -> dict[Pair, list[tuple[str, str]]]:
    """All pairs whose values have an effect together, with the learners that have both axes."""
    found: dict[Pair, list[tuple[str, str]]] = {}
    for family, objective in learners():
        of_learner = {"family": (family,), "objective": (objective,)}
        values = {**learner_axes(family, objective), **of_learner}
        for first, second in combinations(sorted(values), 2):
            for pair in ((a, b) for a in values[first] for b in values[second]):
                named = (first, pair[0]), (second, pair[1])
                if not any(_without_effect(*each) for each in (named, named[::-1])):
                    found.setdefault(named, []).append((family, objective))
    return found


def _without_effect(fact: Fact, other: Fact) -> bool:
    others = EFFECTS.get(fact[0], {})
    return len(others) == 1 and other[1] in others.get(other[0], ())


class Drawing:
    """Draws compositions, each for the pair that fewest of them have so far.

    Attributes:
        counts: number of compositions with each pair.
        refused: pairs that tokamake refuses in each context, with the reason in one of them.
    """

    def __init__(self, seed: int = 1) -> None:
        self._generator = random.Random(seed)
        self.counts = Counter[Pair](dict.fromkeys(learners_of_pairs(), 0))
        self.refused: dict[Pair, str] = {}
        self.drawn: list[Composition] = []
        order = [*self.counts]
        self._generator.shuffle(order)
        # The first compositions, of which `make test` has some, have each two kinds of parallelism.
        order.sort(key=lambda pair: not all(axis.endswith("parallel_size") for axis, _ in pair))
        self._order = order
        self._fewest = 0
        """No pair that tokamake accepts is in fewer compositions."""

    def draw(self, times: int = TIMES) -> Composition:
        """The next composition, of a few ranks once each pair is in `times` compositions."""
        composition = self._filled(*self._base(times))
        self._add(composition)
        return composition

    def complete(self, times: int) -> None:
        """Draw until each pair is in `times` compositions, except refused pairs.

        Then until each three and all four of `KINDS` are together in as many that do not divide
        experts: pairs with divided experts already need three.
        """
        while True:
            base, kept = self._base(times)
            if not kept:
                break
            self._add(self._filled(base, kept))
        for number in (4, 3):
            for kinds in combinations(KINDS, number):
                while sum(map(partial(together, kinds), self.drawn)) < times:
                    self._add_kinds(kinds)

    def _add_kinds(self, kinds: Iterable[str]) -> None:
        """Draw a composition of a random learner that has kinds of parallelism together."""
        while True:
            composition = self._new(*self._generator.choice(learners()))
            sizes = dict.fromkeys(kinds, 2) | {EXPERTS: 1}
            kept = {kind: size for kind, size in sizes.items() if kind in composition.axes}
            for kind, size in kept.items():
                composition = changed(composition, kind, size)
            if together(kinds, composition) and not composition.refusal:
                self._add(self._filled(composition, kept))
                return

    def _add(self, composition: Composition) -> None:
        self.drawn.append(composition)
        is_fp32 = composition.value("precision") == "fp32"
        for pair in pairs(composition.facts):
            self.counts[pair] += is_fp32 or any(axis in OF_16_BITS for axis, _ in pair)

    def _base(self, times: int) -> tuple[Composition, dict[str, Any]]:
        """A composition with a missing pair, and the facts that must stay: none if none misses."""
        while self._fewest < times:
            for pair in self._order:
                if self.counts[pair] != self._fewest or pair in self.refused:
                    continue
                if placed := self._placed(pair):
                    return placed, dict(pair)
            self._fewest += 1
        family, objective = self._generator.choice(learners())
        return self._new(family, objective), {}

    def _new(self, family: str, objective: str) -> Composition:
        return Composition(family, objective, {}, self._generator.randrange(10_000))

    def _placed(self, pair: Pair) -> Composition | None:
        """A composition with a pair; None: tokamake refuses it in all contexts."""
        of_pair = learners_of_pairs()[pair]
        reason = ""
        for start in self._contexts(pair, of_pair):
            first, second = _with(pair, start), _with(pair[::-1], start)
            # The order matters if one value brings others with it.
            for composition in (first,) if first == second else (first, second):
                if dict(pair).items() <= composition.facts.items():
                    if not (refusal := composition.refusal):
                        return composition
                    reason = reason or refusal
        self.refused[pair] = reason
        return None

    def _contexts(self, pair: Pair, of_pair: list[tuple[str, str]]) -> Iterator[Composition]:
        """Compositions to place a pair in: defaults of each learner, then drawn ones."""
        for learner in self._generator.sample(of_pair, len(of_pair)):
            yield self._new(*learner)
        known = {*of_pair}
        others = [
            each
            for each in self.drawn
            if (each.family, each.objective) in known and each.value("precision") == "fp32"
        ]
        with_one = [each for each in others if {*pair} & {*each.facts.items()}]
        yield from self._generator.sample(with_one, min(_CONTEXTS, len(with_one)))

    def _filled(self, composition: Composition, kept: dict[str, Any]) -> Composition:
        """Choose the other axes one after the other, with the pairs that are still needed."""
        most = max(self._generator.choice(USUAL_RANKS), composition.world_size)
        decided = {**kept, "family": composition.family, "objective": composition.objective}
        rest = [axis for axis in composition.axes if axis not in decided]
        for axis in self._generator.sample(rest, len(rest)):
            values = composition.axes[axis]
            if not composition.has_effect(axis) or len(values) == 1 or axis == "precision":
                continue
            for value in self._best(axis, values, decided=decided):
                new = changed(composition, axis, value)
                fits = new.world_size <= most and kept.items() <= new.facts.items()
                if new == composition or (fits and not new.refusal):
                    composition = new
                    break
            decided[axis] = composition.value(axis)
        return composition

    def _best(self, axis: str, values: Iterable[Any], *, decided: dict[str, Any]) -> list[Any]:
        """Values of an axis, the one with most missing pairs first; else at random."""
        generator, (default, *_) = self._generator, values
        gains = {value: self._gain((axis, value), decided) for value in values}
        if not any(gains.values()) and generator.random() > _CHANGED:
            return [default]
        return sorted(gains, key=lambda value: (-gains[value], generator.random()))

    def _gain(self, fact: Fact, decided: dict[str, Any]) -> int:
        """Compositions that pairs of a fact with decided ones still need: rare pairs count more."""
        counts = self.counts
        others = decided.items()
        ordered = ((fact, each) if fact[0] < each[0] else (each, fact) for each in others)
        return sum(max(0, TIMES - counts.get(pair, TIMES)) for pair in ordered)


def _with(facts: Iterable[Fact], composition: Composition) -> Composition:
    """The composition with some values, and with those that give them an effect."""
    for axis, value in facts:
        if axis not in ("family", "objective"):
            composition = changed(_with_effect(composition, axis), axis, value)
    return composition


def _with_effect(composition: Composition, axis: str) -> Composition:
    """The composition with a value of another axis that gives this one an effect."""
    if composition.has_effect(axis):
        return composition
    other, without = next(iter(EFFECTS[axis].items()))
    value = next(each for each in composition.axes[other] if each not in without)
    return changed(composition, other, value)


def drawing(least: int, times: int = 0) -> Drawing:
    """At least `least` compositions, and so many that each pair is in `times` of them."""
    with known_plug_ins():
        made = Drawing()
        made.complete(times)
        while len(made.drawn) < least:
            made.draw(times or TIMES)
    return made
