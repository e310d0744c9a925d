"""Comparison of training on ranks with training in one process, tensor by tensor."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake import plugins
from tokamake.checkpoint.model_tensors import WITHOUT_GRADIENT
from tokamake.config.finetune import TaskRun
from tokamake.config.optimization import optimizer_facts
from tokamake.config.resolved_run import Run
from tokamake.models.common.router_losses import LayerRouting
from tokamake.preflight.finetune import check_settings
from tokamake.preflight.run import check_on_ranks, check_run
from tokamake.prove.engine_tensors import NamedChunk, watch_updates, weights
from tokamake.prove.plain_training import PlainTraining, rates, train_plainly
from tokamake.prove.random_samples import rank_ids, rank_samples, step_samples
from tokamake.runtime.device import group_device
from tokamake.runtime.ranks import Ranks
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
    updates: float
    """For the change of a tensor by all updates."""


TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-4, 1e-3),
    "bf16": Tolerance(5e-2, 3e-1, 5e-1),
    "fp16": Tolerance(2e-2, 1e-1, 3e-1),
}
"""By the precision of a run."""
_AFTER_UPDATES = {
    "fp32": Tolerance(1e-3, 1e-2, 1e-3),
    "bf16": Tolerance(0.2, 0.8, 0.5),
    "fp16": Tolerance(5e-2, 0.2, 0.3),
}
"""After the first update: its gradients were rounded, so values of later steps differ by more. In
bf16, norms of gradients of right layouts differed by 11 %, and a gradient by 55 %."""
_KINK = 0.5
"""Largest difference of gradients and updates after the first update in models with ReLU. Its
derivative jumps: rounding decides about inputs near 0, and one token may have most of a tensor's
gradient."""
_KINK_IN_NUMBERS = 0.2
"""Largest difference of losses and norms there, in 16 bits."""
_AFTER_JUMPS = {
    "fp32": Tolerance(1e-2, 0.5, math.inf),
    "bf16": Tolerance(0.2, math.inf, math.inf),
    "fp16": Tolerance(5e-2, math.inf, math.inf),
}
"""Once weights differ as in `_JUMPS`."""
_JUMPS = {"fp32": 0.1, "bf16": 0.6, "fp16": 0.4}
"""Largest difference of all updates together, relative to them, that rounding explains: optimizers
that look at signs or directions turn rounding of a small gradient into a large update."""
_FEW = 0.3
"""Largest share of elements that rounding of gradients changes in fp32, if the update of an element
depends on that element alone; a wrong rate of learning or decay changes nearly all."""
_OTHER_CHOICES = Tolerance(5e-2, 0.5, 0.5)
"""In 16 bits, in a step where rounding has changed how many tokens choose an expert. Few tokens
decide the gradient of a tiny expert."""
_FEW_CHOICES = 0.05
"""Share of the choices of experts that rounding may change in the first step."""
_SAME_NORM = 1e-2
"""Largest relative difference of the norms of all updates in fp32 by other optimizers, which turn
the update of a whole tensor."""
_ALONG_WEIGHTS = 0.2
"""Largest cosine between differences of matrices and the weights before the update, in fp32, for
optimizers that update whole tensors. A wrong weight decay points along the weights; rounding points
nowhere."""
_FLOOR = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}
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
    if isinstance(run, TaskRun):
        check_settings(run.train)
        check_on_ranks(run, world_size=ranks.world_size, device=device)
    else:
        check_run(run, index=None, world_size=ranks.world_size, device=device)
    own = train_plainly(run, num_steps=NUM_STEPS) if ranks.rank == 0 else None
    comparison = _Comparison(run, ranks, plain=_of_rank_0(own), device=device)
    comparison.compare()
    # Numbers of whole steps first: there may be many tensors.
    return [*comparison.numbers, *comparison.tensors]


def _of_rank_0(plain: PlainTraining | None) -> PlainTraining:
    """The training in one process, on all ranks; arrays travel faster than tensors."""
    values: list[Any] = [plain and plain.converted(Tensor.numpy)]
    dist.broadcast_object_list(values, src=0)
    of_arrays: PlainTraining = values[0]
    return of_arrays.converted(torch.from_numpy)


def _total(values: Tensor) -> Tensor:
    """The sum over all ranks; ranks with accelerators add up no tensors of the host."""
    of_ranks = values.to(group_device())
    dist.all_reduce(of_ranks)
    return of_ranks.cpu()


class _Comparison:
    def __init__(
        self, run: Run, ranks: Ranks, *, plain: PlainTraining, device: torch.device
    ) -> None:
        self._run, self._plain = run, plain
        self._tolerance = TOLERANCES[precision_of(run)]
        backend = plugins.load("train/backends", run.train.backend)
        self._engine: Any = backend.Engine(run, ranks, device=device)
        self.numbers: list[str] = []
        self.tensors: list[str] = []
        self._updates = 0
        self._gradients: list[_Difference] = []
        self._has_jumped = False
        self._biases = {
            name: each.clone()
            for name, each in plain.initial.items()
            if name.endswith(WITHOUT_GRADIENT)
        }

    def compare(self) -> None:
        """Train, and compare validation, steps and weights."""
        plain, engine = self._plain, self._engine
        of_one = plain.initial
        self._add(
            "initial weights", self._differences(weights(engine), of_one, scales=of_one), most=0.0
        )
        objective = engine.stages.objective
        held_out = rank_samples(step_samples(objective, step=NUM_STEPS), engine.mesh)
        validation = engine.validate(iter(held_out)).loss
        self._compare_number("validation loss", validation, expected=plain.validation)
        watch_updates(engine, self._watch)
        for number, step in enumerate(plain.steps):
            rows = rank_samples(step_samples(objective, step=number), engine.mesh)
            ids = rank_ids(objective, engine.mesh, step=number)
            self._gradients = []
            done = engine.train_step(rows, samples=ids, **rates(self._run, number))
            of_step = f"of step {number + 1}"
            self._allow_other_choices(done.routers, step.routers)
            self._add(f"gradients {of_step}", self._gradients, most=self._tolerance.gradients)
            self._compare_number(f"loss {of_step}", done.loss, expected=step.loss)
            norm = f"gradient norm {of_step}"
            self._compare_number(norm, done.grad_norm, expected=step.grad_norm)
            self._compare_layers(of_step, done.layer_norms, expected=step.layer_norms)
            self._compare_number(f"rows {of_step}", done.num_rows, expected=step.num_rows)
            if done.sample_loss is not None:
                what = f"loss of samples {of_step}"
                self._compare_number(what, done.sample_loss, expected=step.sample_loss)
            if self._run.train.log_corpus_losses:
                self._compare_corpora(of_step, done.corpus_losses, expected=step.corpora)
            self._compare_routers(of_step, done.routers, expected=step.routers)
            further = zip(done.further_losses, step.further_losses, strict=True)
            for layer, (own, right) in enumerate(further, 1):
                self._compare_number(f"loss of MTP layer {layer} {of_step}", own, expected=right)
            engine._set_mode("eval")
            self._compare_weights(number)
            self._compare_biases(of_step, done.routers)
        if self._updates != len(plain.steps):
            self.numbers.append(f"updates: {self._updates}, expected {len(plain.steps)}")

    def _watch(self, gradients: list[NamedChunk]) -> None:
        expected = self._plain.steps[self._updates].gradients
        self._updates += 1
        self._gradients = self._differences(gradients, expected, scales=expected)

    def _allow_other_choices(
        self, routers: Iterable[LayerRouting], expected: Iterable[LayerRouting]
    ) -> None:
        """Widen the limits if rounding in 16 bits has changed choices of experts."""
        pairs = zip(routers, expected, strict=True)
        if precision_of(self._run) != "fp32" and any(a.counts != b.counts for a, b in pairs):
            widest = map(max, zip(self._tolerance, _OTHER_CHOICES, strict=True))
            self._tolerance = Tolerance(*widest)

    def _compare_weights(self, number: int) -> None:
        steps, initial = self._plain.steps, self._plain.initial
        expected, before = steps[number].weights, steps[number - 1].weights if number else initial
        # A step without labels changes less than the one before it was rounded.
        changes = {
            name: max(each - before[name], each - initial[name], key=torch.linalg.vector_norm)
            for name, each in expected.items()
        }
        found = self._differences(weights(self._engine), expected, scales=changes)
        precision = precision_of(self._run)
        if all(each.apart <= self._tolerance.updates for each in found):
            if not self._has_jumped:
                self._tolerance = self._after_updates()
            return
        total = math.hypot(*(each.apart * each.scale for each in found))
        most = _JUMPS[precision] * math.hypot(*(each.scale for each in found))
        # In 16 bits, rounding changes all elements.
        if total <= most and (precision != "fp32" or self._are_jumps(found, expected, old=before)):
            self._tolerance, self._has_jumped = _AFTER_JUMPS[precision], True
        else:
            self._add(f"weights after step {number + 1}", found, most=self._tolerance.updates)

    def _after_updates(self) -> Tolerance:
        tolerance = _AFTER_UPDATES[precision_of(self._run)]
        shape = self._run.architecture
        activations = {shape.hidden_act, (shape.model_extra or {}).get("head_act")}
        if "relu" not in activations:
            return tolerance
        numbers = tolerance.numbers if precision_of(self._run) == "fp32" else _KINK_IN_NUMBERS
        return Tolerance(numbers, gradients=max(_KINK, tolerance.gradients), updates=_KINK)

    def _are_jumps(
        self, found: Iterable["_Difference"], expected: Tensors, *, old: Tensors
    ) -> bool:
        """Whether updates differ as `_FEW`, or `_SAME_NORM` and `_ALONG_WEIGHTS`, allow."""
        limits = {
            each.name: self._tolerance.updates * each.scale / math.sqrt(expected[each.name].numel())
            for each in found
        }
        sums = torch.zeros(7, dtype=torch.float64)
        for name, place, values in weights(self._engine):
            own, whole = values.double().cpu(), expected[name][place].double()
            before = old[name][place].double()
            sums[0] += ((own - whole).abs() > limits[name]).sum()
            sums[1] += own.numel()
            sums[2] += (own - before).square().sum()
            sums[3] += (whole - before).square().sum()
            if old[name].dim() > 1:
                sums[4] += ((own - whole) * before).sum()
                sums[5] += (own - whole).square().sum()
                sums[6] += before.square().sum()
        num_apart, number, *squares, product, apart, size = _total(sums).tolist()
        if optimizer_facts(self._run.train.optimizer.name).elementwise:
            return num_apart <= _FEW * number
        own_norm, norm = map(math.sqrt, squares)
        has_same_norm = abs(own_norm - norm) <= _SAME_NORM * norm
        return has_same_norm and abs(product) <= _ALONG_WEIGHTS * math.sqrt(apart * size)

    def _compare_number(self, what: str, value: float | None, *, expected: float | None) -> None:
        if value is None or expected is None:
            if value is not expected:
                self.numbers.append(f"{what}: {value}, expected {expected}")
        elif not abs(value - expected) <= self._tolerance.numbers * max(abs(expected), 1e-6):
            times = f" ({value / expected:.7g} times)" if expected else ""
            self.numbers.append(f"{what}: {value:.7g}, expected {expected:.7g}{times}")

    def _compare_layers(
        self, of_step: str, norms: Sequence[float], *, expected: Sequence[float]
    ) -> None:
        """Compare norms of layers' gradients, relative to the whole norm if they are small."""
        least = _FLOOR[precision_of(self._run)] * math.hypot(*expected)
        for number, (own, right) in enumerate(zip(norms, expected, strict=True)):
            if not abs(own - right) <= self._tolerance.gradients * max(right, least):
                name = f"layer {number}" if number < len(expected) - 1 else "other parameters"
                self.numbers.append(
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
            # Later weights differ, so that experts drop other choices.
            if self._updates <= 1 and not abs(own.dropped - right.dropped) <= _FEW_CHOICES:
                self.numbers.append(
                    f"dropped share of router {own.layer} {of_step}: {own.dropped:.4g}, expected "
                    f"{right.dropped:.4g}"
                )

    def _compare_biases(self, of_step: str, routers: Iterable[LayerRouting]) -> None:
        """Compare biases of routers with those that follow from the choices on all ranks.

        Not with the ones in one process: rounding may change a choice, and a bias by a whole step.
        """
        rate = self._run.train.router.bias_update_rate
        if not self._biases:
            return
        for each in routers:
            counts, mean = each.counts, sum(each.counts) / len(each.counts)
            change = torch.tensor([rate * ((n < mean) - (n > mean)) for n in counts])
            self._biases[f"model.layers.{each.layer}.mlp.gate{WITHOUT_GRADIENT}"] += change
        own = [chunk for chunk in weights(self._engine) if chunk.name in self._biases]
        # Not relative to the biases: two steps may have changed them up and down again.
        steps = {name: torch.full_like(each, rate) for name, each in self._biases.items()}
        found = self._differences(own, self._biases, scales=steps)
        self._add(f"biases {of_step}", found, most=1e-5)

    def _add(self, what: str, found: Iterable["_Difference"], *, most: float) -> None:
        self.tensors += [
            f"{what}: {each.name}: {each.text}" for each in found if not each.apart <= most
        ]

    def _differences(
        self, own: Iterable[NamedChunk], expected: Tensors, *, scales: Tensors
    ) -> list["_Difference"]:
        """Compare the chunks of all ranks with whole tensors, relative to the norms of `scales`."""
        names = [*expected]
        sums = torch.zeros(2, len(names), dtype=torch.float64)
        copies = {name: torch.zeros(expected[name].shape) for name in names}
        for name, place, values in own:
            number, whole = names.index(name), expected[name][place].double()
            local = values.double().cpu()
            sums[0, number] += (local - whole).square().sum()
            sums[1, number] += (local * whole).sum()
            copies[name][place] += 1
        of_ranks = _total(torch.cat([copies[name].flatten() for name in names]))
        sums = _total(sums)
        norms = {name: float(each.norm()) for name, each in scales.items()}
        least = max(_FLOOR[precision_of(self._run)] * math.hypot(*norms.values()), 1e-30)
        found = []
        cut = of_ranks.split([expected[name].numel() for name in names])
        for name, counts, (square, product) in zip(names, cut, sums.T.tolist(), strict=True):
            scale = max(norms[name], least)
            if not counts.all():
                found.append(_Difference(name, math.inf, scale, "no rank has all of it"))
                continue
            num_copies = float(counts.mean())  # each copy of an element counts
            apart = math.sqrt(square / num_copies) / scale
            text = f"differs by {apart:.1e} of its norm"
            if expected is scales:
                text += f", {product / num_copies / scale**2:.4g} times the expected one"
            found.append(_Difference(name, apart, scale, text))
        return found


class _Difference(NamedTuple):
    """A tensor on the ranks, compared with the one in one process."""

    name: str
    apart: float
    """Norm of the difference, relative to `scale`."""
    scale: float
    """Norm of the tensor, or of its change, but not of less than rounding."""
    text: str
