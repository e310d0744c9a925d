"""Comparison of training on ranks with training in one process, tensor by tensor.

The process takes the gradients of the ranks for its own updates. So each step is compared from the
same weights, and updates from the same gradients: nothing that rounding has changed adds up.
"""

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake.config.finetune import TaskRun
from tokamake.config.optimization import optimizer_facts
from tokamake.config.resolved_run import Run
from tokamake.models.common.router_losses import LayerRouting
from tokamake.preflight.finetune import check_settings
from tokamake.preflight.run import check_on_ranks, check_run
from tokamake.prove.engine_tensors import WholeTensors, tensor_shapes
from tokamake.prove.plain_training import PlainStep, PlainTraining, train_plainly
from tokamake.prove.rank_training import RankStep, RankTraining, train_on_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.torch_internals import restore_linear
from tokamake.train.numerics import precision_of, with_precision

Tensors = Mapping[str, Tensor]
"""Whole tensors by name."""
Sums = tuple[float, float]
"""Losses and labels of a corpus."""
NUM_STEPS = 2
"""Steps of a proof: the second one begins with weights that the first one has changed."""


class Tolerance(NamedTuple):
    """Largest differences that rounding explains, relative to the compared value."""

    numbers: float
    """For losses and norms of gradients."""
    gradients: float
    """For gradients of a tensor."""


TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-4),
    "bf16": Tolerance(2e-2, 3e-1),
    "fp16": Tolerance(1e-2, 1e-1),
}
"""By the precision of a run."""
_UPDATES = 1e-4
"""For the change of a tensor by an update, from the same gradients, in any precision: weights and
states of optimizers are fp32."""
_UPDATES_OF_MATRICES = 5e-2
"""On an accelerator, for optimizers that multiply matrices: its kernels round products in bf16
otherwise than those of a CPU."""
_UPDATES_OF_ROUNDED_STATES = 0.1
"""For optimizers that round their states: by other parts of a tensor on ranks than in one
process."""
_ROUNDED_WEIGHTS = 2e-3
"""Share of a tensor's weights that counts with its change: their last bits are rounded."""
_OTHER_CHOICES = Tolerance(5e-2, 0.5)
"""In 16 bits, in a step where rounding has changed how many tokens choose an expert, and for
gradients of labels that are drawn. Few tokens decide the gradient of a tiny expert."""
_FEW_CHOICES = {"fp32": 0.01, "bf16": 0.1, "fp16": 0.05}
"""Share of the choices of experts that rounding may change."""
_FLOOR = {"fp32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}
"""Share of the whole gradient's norm below which a tensor's gradient may be rounding. A softmax
does not change with biases of keys, or with a bias that all choices of a question share. In fp32,
this share times the limit of gradients is eight units of the last place."""


def differences(run: Run, ranks: Ranks, *, device: torch.device) -> list[str]:
    """Train `NUM_STEPS` steps on these ranks, and rank 0 alone; all ranks call this together.

    Returns:
        One line for each value that differs more than rounding explains, the same on all ranks.

    Raises:
        UserError: the run cannot start on these ranks.
    """
    run = with_precision(run, device)
    if isinstance(run, TaskRun):
        check_settings(run.train)
        check_on_ranks(run, world_size=ranks.world_size, device=device)
    else:
        check_run(run, index=None, world_size=ranks.world_size, device=device)
    shapes = tensor_shapes(run)
    untouched: list[PlainStep] = []
    _on_rank_0(ranks, lambda: untouched.extend(train_plainly(run, num_steps=1).steps))
    of_ranks = train_on_ranks(run, ranks, num_steps=NUM_STEPS, shapes=shapes, device=device)

    def compare() -> list[str]:
        restore_linear()
        updates = [step.update for step in of_ranks.steps]
        plain = train_plainly(run, num_steps=NUM_STEPS, updates=updates)
        comparison = _Comparison(run, device)
        changed = _changes_of_process(untouched[0], plain.steps[0])
        return [*changed, *comparison.lines(of_ranks, plain)]

    return _on_rank_0(ranks, compare) or []


def _on_rank_0(ranks: Ranks, work: Callable[[], list[str] | None]) -> list[str] | None:
    """Call a function on rank 0 and return its lines on all ranks, which wait for it.

    Raises:
        RuntimeError: it failed; the message is its traceback.
    """
    results: list[list[str] | str | None] = [None]
    if ranks.rank == 0:
        try:
            results = [work()]
        except Exception:
            results = [traceback.format_exc()]
    dist.broadcast_object_list(results, src=0)
    if isinstance(results[0], str):
        raise RuntimeError(results[0])
    return results[0]


def _changes_of_process(before: PlainStep, after: PlainStep) -> list[str]:
    """Gradients of the process alone that an engine has changed, which it may leave a hook in."""
    own, later = before.gradients, after.gradients
    return [
        f"gradients of the process alone: {name}: not the same after the training on ranks"
        for name in own
        if not torch.equal(own[name], later[name])
    ]


class _Comparison:
    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device
        self._numbers: list[str] = []
        self._tensors: list[tuple[float, str]] = []
        self._tolerance = TOLERANCES[precision_of(run)]

    def lines(self, of_ranks: RankTraining, plain: PlainTraining) -> list[str]:
        """All differences: numbers of whole steps, then tensors, those that differ most first."""
        initial = plain.initial
        scales = _norms(initial)
        self._add("initial weights", of_ranks.initial, expected=initial, scales=scales, most=0.0)
        pairs = zip(of_ranks.steps, plain.steps, strict=True)
        old, old_plain = of_ranks.initial.tensors, initial
        for number, (own, right) in enumerate(pairs, 1):
            self._compare_step(f"of step {number}", own, right=right)
            change = own.weights._replace(tensors=_changes(own.weights.tensors, old))
            expected = _changes(right.weights, old_plain)
            # Weights are rounded, however small their change is.
            scales = {
                name: self._of_update(expected[name]) * norm
                + _UPDATES * _ROUNDED_WEIGHTS * float(right.weights[name].norm())
                for name, norm in _norms(expected).items()
            }
            what = f"change of weights in step {number}"
            self._add(what, change, expected=expected, scales=scales, most=1.0)
            old, old_plain = own.weights.tensors, right.weights
        validations = zip(of_ranks.validations, plain.validations, strict=True)
        for when, (loss, expected_loss) in zip(("first", "last"), validations, strict=True):
            self._compare_number(f"{when} validation loss", loss, expected=expected_loss)
        tensors = sorted(self._tensors, key=itemgetter(0), reverse=True)
        return [*self._numbers, *(line for _, line in tensors)]

    def _compare_step(self, of_step: str, own: RankStep, *, right: PlainStep) -> None:
        done = own.result
        self._tolerance = self._tolerance_of(done.routers, right.routers)
        if len(own.updates) != 1:
            self._numbers.append(f"updates {of_step}: {len(own.updates)}, expected 1")
        if len(own.extra) != bool(right.extra):
            expected = int(bool(right.extra))
            self._numbers.append(f"extra passes {of_step}: {len(own.extra)}, expected {expected}")
        most = self._tolerance.gradients
        what = f"gradients {of_step}"
        self._compare_gradients(what, own.updates, expected=right.gradients, most=most)
        if precision_of(self._run) != "fp32":
            most = max(most, _OTHER_CHOICES.gradients)  # rounding may draw another label
        what = f"gradients of the extra pass {of_step}"
        self._compare_gradients(what, own.extra, expected=right.extra, most=most)
        self._compare_number(f"loss {of_step}", done.loss, expected=right.loss)
        norm = f"gradient norm {of_step}"
        self._compare_number(norm, done.grad_norm, expected=right.grad_norm)
        self._compare_layers(of_step, done.layer_norms, expected=right.layer_norms)
        self._compare_number(f"rows {of_step}", done.num_rows, expected=right.num_rows)
        if done.sample_loss is not None:
            what = f"loss of samples {of_step}"
            self._compare_number(what, done.sample_loss, expected=right.sample_loss)
        if self._run.train.log_corpus_losses:
            self._compare_corpora(of_step, done.corpus_losses, expected=right.corpora)
        self._compare_routers(of_step, done.routers, expected=right.routers)
        further = zip(done.further_losses, right.further_losses, strict=True)
        for layer, (value, expected_loss) in enumerate(further, 1):
            what = f"loss of MTP layer {layer} {of_step}"
            self._compare_number(what, value, expected=expected_loss)

    def _tolerance_of(
        self, routers: Iterable[LayerRouting], expected: Iterable[LayerRouting]
    ) -> Tolerance:
        """Limits of a step, wider if rounding in 16 bits has changed choices of experts."""
        precision = precision_of(self._run)
        tolerance = TOLERANCES[precision]
        pairs = zip(routers, expected, strict=True)
        if precision == "fp32" or all(own.counts == right.counts for own, right in pairs):
            return tolerance
        return Tolerance(*map(max, zip(tolerance, _OTHER_CHOICES, strict=True)))

    def _compare_gradients(
        self, what: str, values: Iterable[WholeTensors], *, expected: Tensors, most: float
    ) -> None:
        """Compare gradients of tensors, relative to the whole gradient if they are small."""
        norms = _norms(expected)
        least = max(_FLOOR[precision_of(self._run)] * math.hypot(*norms.values()), 1e-30)
        scales = {name: max(norm, least) for name, norm in norms.items()}
        for gradients in values:
            self._add(what, gradients, expected=expected, scales=scales, most=most)

    def _of_update(self, tensor: Tensor) -> float:
        """Largest difference of the change of a tensor by the same gradients."""
        facts = optimizer_facts(self._run.train.optimizer.name)
        if facts.state_bytes < 4:
            return _UPDATES_OF_ROUNDED_STATES
        # Optimizers that need the shapes of matrices multiply them.
        multiplies = not facts.flat_buffers and tensor.dim() > 1
        return _UPDATES_OF_MATRICES if multiplies and self._device.type != "cpu" else _UPDATES

    def _compare_number(self, what: str, value: float | None, *, expected: float | None) -> None:
        if value is None or expected is None:
            if value is not expected:
                self._numbers.append(f"{what}: {value}, expected {expected}")
        elif not abs(value - expected) <= self._tolerance.numbers * max(abs(expected), 1e-6):
            times = f" ({value / expected:.7g} times)" if expected else ""
            self._numbers.append(f"{what}: {value:.7g}, expected {expected:.7g}{times}")

    def _compare_layers(
        self, of_step: str, norms: Sequence[float], *, expected: Sequence[float]
    ) -> None:
        """Compare norms of layers' gradients, relative to the whole norm if they are small."""
        least = _FLOOR[precision_of(self._run)] * math.hypot(*expected)
        for number, (own, right) in enumerate(zip(norms, expected, strict=True)):
            if not abs(own - right) <= self._tolerance.gradients * max(right, least):
                name = f"layer {number}" if number < len(expected) - 1 else "other parameters"
                self._numbers.append(
                    f"gradient norm of {name} {of_step}: {own:.7g}, expected {right:.7g}"
                )

    def _compare_corpora(
        self, of_step: str, values: Iterable[Sums], *, expected: Iterable[Sums]
    ) -> None:
        for corpus, pairs in enumerate(zip(values, expected, strict=True)):
            for unit, value, right in zip(("losses", "labels"), *pairs, strict=True):
                what = f"{unit} of corpus {corpus} {of_step}"
                self._compare_number(what, value, expected=right)

    def _compare_routers(
        self, of_step: str, values: Iterable[LayerRouting], *, expected: Iterable[LayerRouting]
    ) -> None:
        for own, right in zip(values, expected, strict=True):
            for name in ("balance", "z", "entropy"):
                what = f"{name} of router {own.layer} {of_step}"
                self._compare_number(what, getattr(own, name), expected=getattr(right, name))
            # Rounding may change a choice, but not how many there are.
            what = f"choices of router {own.layer} {of_step}"
            self._compare_number(what, sum(own.counts), expected=sum(right.counts))
            few, number = _FEW_CHOICES[precision_of(self._run)], sum(right.counts)
            apart = sum(abs(a - b) for a, b in zip(own.counts, right.counts, strict=True))
            if not apart <= few * number:
                self._numbers.append(f"{what} by expert: {own.counts}, expected {right.counts}")
            if not abs(own.dropped - right.dropped) <= few:
                self._numbers.append(
                    f"dropped share of router {own.layer} {of_step}: {own.dropped:.4g}, expected "
                    f"{right.dropped:.4g}"
                )

    def _add(
        self,
        what: str,
        own: WholeTensors,
        *,
        expected: Tensors,
        scales: Mapping[str, float],
        most: float,
    ) -> None:
        """Add a line for each tensor whose distance is larger than `most` times its scale."""
        for name, whole in expected.items():
            if name in own.missing:
                self._tensors.append((math.inf, f"{what}: {name}: no rank has all of it"))
                continue
            found, right = own.tensors[name].double(), whole.double()
            distance = math.hypot(float((found - right).norm()), own.spreads[name])
            if not distance <= most * scales[name]:
                apart = distance / max(float(right.norm()), 1e-30)
                line = f"{what}: {name}: differs by {apart:.1e} of its norm"
                if square := float(right.square().sum()):
                    line += f", {float((found * right).sum()) / square:.4g} times the expected one"
                self._tensors.append((apart, line))


def _norms(tensors: Tensors) -> dict[str, float]:
    return {name: float(each.norm()) for name, each in tensors.items()}


def _changes(new: Tensors, old: Tensors) -> dict[str, Tensor]:
    return {name: each - old[name] for name, each in new.items()}
