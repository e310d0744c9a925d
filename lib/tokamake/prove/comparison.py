"""Comparison of training on ranks with training in one process, tensor by tensor."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.preflight.run import check_run
from tokamake.prove.engine_tensors import NamedChunk, watch_updates, weights
from tokamake.prove.plain_training import PlainTraining, rates, train_plainly
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples
from tokamake.runtime.ranks import Ranks
from tokamake.train.numerics import precision_of, with_precision

Tensors = Mapping[str, Tensor]
"""Whole tensors by name."""
Sums = tuple[float, float]
"""Losses and labels of a corpus."""
INITIAL, FINAL = "initial weights", "weights"
NUM_STEPS = 2
"""Steps of a proof: the second one begins with weights that the first one has changed."""


class Difference(NamedTuple):
    """A value on the ranks that differs from the one in one process."""

    what: str
    """Such as "loss of step 1", or "gradients of step 1" of the tensor `name`."""
    text: str
    """How much it differs."""
    name: str = ""
    apart: float = math.inf
    """Difference, relative to the norm of the tensor."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.what, self.name, self.text)))


class Tolerance(NamedTuple):
    """Largest differences that rounding explains, relative to the compared value."""

    numbers: float
    """For losses and norms of gradients."""
    gradients: float
    """For gradients of a tensor."""
    updates: float
    """For the change of a tensor by all updates."""


TOLERANCES = {
    "fp32": Tolerance(1e-5, 3e-5, 1e-3),
    "bf16": Tolerance(2e-2, 1e-1, 3e-1),
    "fp16": Tolerance(5e-3, 3e-2, 1e-1),
}
"""By the precision of a run."""
_MARGIN = 20
"""Differences are at most this many times what random rounding does to the same tensor. Optimizers
that look at signs or directions turn rounding into large steps."""
_FLOOR = 1e-3
"""Share of the whole gradient's norm below which a tensor's gradient is rounding: biases of keys do
not change a softmax."""


def differences(run: Run, ranks: Ranks, *, device: torch.device) -> list[str]:
    """Train `NUM_STEPS` steps on these ranks, and rank 0 alone; all ranks call this together.

    Returns:
        One line for each value that differs more than rounding explains, the same on all ranks.

    Raises:
        UserError: the run cannot start on these ranks.
    """
    run = with_precision(run, device)
    check_run(run, index=None, world_size=ranks.world_size, device=device)
    plain = _of_rank_0(ranks, lambda: train_plainly(run, num_steps=NUM_STEPS))
    found = _Comparison(run, ranks, plain=plain, device=device).compare()
    tensors = [each for each in found if each.name and math.isfinite(each.apart)]
    if tensors:
        rounded = _of_rank_0(ranks, lambda: train_plainly(run, num_steps=NUM_STEPS, rounds=True))
        explained = {
            each for each in tensors if each.apart <= _MARGIN * _apart(each, plain, rounded=rounded)
        }
        found = [each for each in found if each not in explained]
    # Numbers of whole steps first: there may be many tensors.
    return [*map(str, sorted(found, key=lambda each: bool(each.name)))]


def _of_rank_0(ranks: Ranks, compute: Callable[[], PlainTraining]) -> PlainTraining:
    computed: list[Any] = [compute() if ranks.rank == 0 else None]
    dist.broadcast_object_list(computed, src=0)
    result: PlainTraining = computed[0]
    return result


def _apart(difference: Difference, plain: PlainTraining, *, rounded: PlainTraining) -> float:
    """Difference of the same tensor in two trainings, relative as in `Difference`."""
    expected, scales = _expected(plain, difference.what)
    others, _ = _expected(rounded, difference.what)
    name = difference.name
    return float((others[name] - expected[name]).norm()) / _norms(scales)[name]


def _expected(plain: PlainTraining, what: str) -> tuple[Tensors, Tensors]:
    """Tensors of a training, and the tensors whose norms are the scales of differences."""
    if what == INITIAL:
        return plain.initial, plain.initial
    if what == FINAL:
        changes = {name: each - plain.initial[name] for name, each in plain.weights.items()}
        return plain.weights, changes
    gradients = plain.steps[int(what.rpartition(" ")[2]) - 1].gradients
    return gradients, gradients


def _norms(scales: Tensors) -> dict[str, float]:
    """Norm of each tensor, or of the smallest part of all tensors that is more than rounding."""
    norms = {name: float(each.norm()) for name, each in scales.items()}
    least = max(_FLOOR * math.hypot(*norms.values()), 1e-30)
    return {name: max(norm, least) for name, norm in norms.items()}


class _Comparison:
    def __init__(
        self, run: Run, ranks: Ranks, *, plain: PlainTraining, device: torch.device
    ) -> None:
        self._run, self._plain = run, plain
        self._tolerance = TOLERANCES[precision_of(run)]
        backend = plugins.load("train/backends", run.train.backend)
        self._engine: Any = backend.Engine(run, ranks, device=device)
        self._found: list[Difference] = []
        self._updates = 0

    def compare(self) -> list[Difference]:
        """Train, compare, and return what differs."""
        plain, engine = self._plain, self._engine
        self._compare_tensors(INITIAL, weights(engine), tolerance=0.0)
        objective = engine.stages.objective
        held_out = rank_samples(step_samples(objective, step=NUM_STEPS), engine.mesh)
        validation = engine.validate(iter(held_out)).loss
        self._compare_number("validation loss", validation, expected=plain.validation)
        watch_updates(engine, self._watch)
        for number, step in enumerate(plain.steps):
            rows = rank_samples(step_samples(objective, step=number), engine.mesh)
            ids = rank_ids(self._run, engine.mesh, step=number)
            done = engine.train_step(rows, samples=ids, **rates(self._run, number))
            of_step = f"of step {number + 1}"
            self._compare_number(f"loss {of_step}", done.loss, expected=step.loss)
            norm = f"gradient norm {of_step}"
            self._compare_number(norm, done.grad_norm, expected=step.grad_norm)
            if self._run.train.log_corpus_losses:
                self._compare_corpora(of_step, done.corpus_losses, expected=step.corpora)
        if self._updates != len(plain.steps):
            text = f"{self._updates}, expected {len(plain.steps)}"
            self._found.append(Difference("updates", text))
        engine._set_mode("eval")
        self._compare_tensors(FINAL, weights(engine), tolerance=self._tolerance.updates)
        return self._found

    def _watch(self, gradients: list[NamedChunk]) -> None:
        self._updates += 1
        what = f"gradients of step {self._updates}"
        self._compare_tensors(what, gradients, tolerance=self._tolerance.gradients)

    def _compare_number(self, what: str, value: float | None, *, expected: float | None) -> None:
        text = f"{value}, expected {expected}"
        if value is not None and expected is not None:
            if abs(value - expected) <= self._tolerance.numbers * max(abs(expected), 1e-6):
                return
            text = f"{value:.7g}, expected {expected:.7g}" + (
                f" ({value / expected:.4g} times)" if expected else ""
            )
        elif value is expected:
            return
        self._found.append(Difference(what, text))

    def _compare_corpora(
        self, of_step: str, values: Iterable[Sums], *, expected: Iterable[Sums]
    ) -> None:
        for corpus, pairs in enumerate(zip(values, expected, strict=True)):
            for unit, value, right in zip(("losses", "labels"), *pairs, strict=True):
                what = f"{unit} of corpus {corpus} {of_step}"
                self._compare_number(what, value, expected=right)

    def _compare_tensors(self, what: str, own: Iterable[NamedChunk], *, tolerance: float) -> None:
        """Compare the chunks of all ranks with whole tensors, relative to the tensors' norms."""
        expected, scales = _expected(self._plain, what)
        names = [*expected]
        sums = torch.zeros(2, len(names), dtype=torch.float64)
        copies = {name: torch.zeros(expected[name].shape) for name in names}
        for name, place, values in own:
            number, whole = names.index(name), expected[name][place].double()
            local = values.double().cpu()
            sums[0, number] += (local - whole).square().sum()
            sums[1, number] += (local * whole).sum()
            copies[name][place] += 1
        of_ranks = torch.cat([copies[name].flatten() for name in names])
        dist.all_reduce(of_ranks)
        dist.all_reduce(sums)
        norms = _norms(scales)
        cut = of_ranks.split([expected[name].numel() for name in names])
        for name, counts, (square, product) in zip(names, cut, sums.T.tolist(), strict=True):
            if not counts.all():
                self._found.append(Difference(what, "no rank has all of it", name))
                continue
            # Each copy of an element counts.
            num_copies, scale = float(counts.mean()), norms[name]
            apart = math.sqrt(square / num_copies) / scale
            if not apart <= tolerance:
                text = f"differs by {apart:.1e} of its norm"
                if what not in (INITIAL, FINAL):
                    text += f", {product / num_copies / scale**2:.4g} times the expected one"
                self._found.append(Difference(what, text, name, apart))
