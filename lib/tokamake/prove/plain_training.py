"""Training in one process: no back end, mesh, shards, pipeline, recomputation or accumulated means.

It shares the model, the losses and the update rule of the optimizer with a run, and nothing that
divides a run among ranks. Where a layout differs from it, the layout is wrong.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.tensors.extents import whole_slices
from tokamake.config.resolved_run import Run
from tokamake.models.common.language_model import DropoutRates, Predictions, predictions
from tokamake.models.common.multi_token_prediction import MTPLosses
from tokamake.models.common.router_losses import LayerRouting, RouterLosses
from tokamake.optim._extra_pass import ExtraPass, Relabel
from tokamake.optim._groups import parameter_groups, set_rates
from tokamake.optim._sharded_parameters import WholeParameters
from tokamake.parallel.loss import NO_LABEL
from tokamake.parallel.mesh import SINGLE_RANK
from tokamake.parallel.placement import placements
from tokamake.prove.random_samples import NUM_CORPORA, rank_ids, step_samples
from tokamake.train.batch import MicroBatch
from tokamake.train.numerics import precision_of
from tokamake.train.objectives._base import Labels, ObjectiveBase, objective_class
from tokamake.train.pipeline_stages import DTYPES


class PlainStep(NamedTuple):
    """A step of training."""

    loss: float
    """Mean over the labels of the global batch, plus the mean over its samples with labels."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    gradients: dict[str, Tensor]
    """Clipped gradient of each tensor, fp32, by its name in checkpoints."""
    weights: dict[str, Tensor]
    """Weights after the update, fp32."""
    extra: dict[str, Tensor]
    """Gradients of the extra pass of an optimizer, fp32; empty: it made none."""
    corpora: tuple[tuple[float, float], ...] = ()
    """Sum of the losses of tokens, and number of labels, of each corpus; empty: not measured."""
    layer_norms: tuple[float, ...] = ()
    """Norms of unclipped gradients of layers, then of other parameters; empty: not measured."""
    sample_loss: float | None = None
    """Part of `loss` of whole samples; None: they have none."""
    num_rows: int = 0
    """Rows of the step."""
    routers: tuple[LayerRouting, ...] = ()
    """Measurements of the router of each layer; empty: the family has none."""
    further_losses: tuple[float, ...] = ()
    """Mean loss of each layer that predicts further tokens; empty: the model has none."""


class PlainTraining(NamedTuple):
    """Steps of training."""

    validations: list[float | None]
    """Loss of the samples after the last step, before the first step and after the last one."""
    steps: list[PlainStep]
    initial: dict[str, Tensor]
    """Weights before the first step, fp32."""


class Update(NamedTuple):
    """Gradients and choices that change weights after the passes of a step."""

    gradients: Mapping[str, Tensor]
    """Clipped gradient of each tensor, fp32, by its name in checkpoints."""
    extra: Mapping[str, Tensor]
    """Gradients of the extra pass of an optimizer."""
    routers: Sequence[LayerRouting]
    """Choices of experts, which move the biases of routers."""


def rates(run: Run, step: int) -> dict[str, float]:
    """Learning rate and weight decay of a step; the rate grows."""
    optimizer = run.train.optimizer
    return {
        "learning_rate": optimizer.used("learning_rate") * (step + 1) / 2,
        "weight_decay": optimizer.used("weight_decay"),
    }


def train_plainly(
    run: Run, *, num_steps: int, updates: Sequence[Update] | None = None
) -> PlainTraining:
    """Train a run's model from its random weights on random samples.

    Args:
        run: a run with its precision; see `with_precision`. Its index and its data are not read.
        updates: of another training, whose weights it keeps; default: none, and no validation.
    """
    return _PlainTrainer(run).train(updates or [None] * num_steps, validates=updates is not None)


class _PlainTrainer:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.objective: ObjectiveBase = objective_class(run.train.objective)(run)
        with torch.device("meta"):
            self.model: Any = plugins.load("models/*/model", run.architecture.family).Model(
                run.architecture
            )
        self.model.to_empty(device="cpu")
        dropout = run.train.dropout.rates
        if any(dropout) or self.model.has_own_dropout:
            self.model.dropout_rates = DropoutRates(*dropout, run.seed)
        self.routers = self._watch_routers() if run.architecture.has_routers else None
        self.further = self._watch_further() if run.architecture.num_mtp_layers else None
        self._sample_loss: Tensor | None = None
        self.masters = self._initial_weights()
        self.optimizer = self._build_optimizer()

    def _watch_routers(self) -> RouterLosses:
        architecture, settings = self.run.architecture, self.run.train.router
        routers = RouterLosses(
            balance=settings.balance_coefficient,
            z=settings.z_coefficient,
            layers=architecture.expert_layers,
            num_experts=architecture.setting("num_experts"),
            device=torch.device("cpu"),
        )
        self.model.watch_routers(routers, capacity_factor=settings.capacity_factor)
        return routers

    def _watch_further(self) -> MTPLosses:
        architecture = self.run.architecture
        assert architecture.vocab_size is not None
        losses = MTPLosses(
            scaling_factor=self.run.train.mtp.loss_scaling_factor,
            num_layers=architecture.num_mtp_layers,
            vocab_size=architecture.vocab_size,
            device=torch.device("cpu"),
        )
        self.model.further_losses = losses
        return losses

    def _initial_weights(self) -> dict[str, nn.Parameter]:
        weights = model_tensors.random_weights(self.run.architecture, self.run.seed)
        masters = {}
        for name, parameter in self.model.named_parameters():
            saved, shape = self.model.tensor_name(name), parameter.shape
            values = torch.empty(shape)
            for at, drawn in weights.tiles(saved, shape, place=whole_slices(shape)):
                values[at] = torch.from_numpy(drawn)
            masters[name] = nn.Parameter(values)
        self.buffers = dict(self.model.named_buffers())
        for buffer in self.buffers.values():
            buffer.zero_()  # biases of routers
        return masters

    def _build_optimizer(self) -> torch.optim.Optimizer:
        settings = self.run.train.optimizer
        groups = parameter_groups(
            self.masters.items(), settings.used("weight_decay"), placements=placements(self.model)
        )
        optimizer: torch.optim.Optimizer = plugins.load("optim", settings.name).build(
            groups, settings, whole=WholeParameters()
        )
        return optimizer

    def train(self, updates: Sequence[Update | None], *, validates: bool) -> PlainTraining:
        """Train a step for each update, whose gradients it takes; validate before and after."""
        initial, last = self._saved(self.masters | self.buffers), len(updates)
        validations = [self._validate(last)] if validates else []
        steps = [self._step(step, update) for step, update in enumerate(updates)]
        validations += [self._validate(last)] if validates else []
        return PlainTraining(validations, steps, initial)

    @torch.no_grad()
    def _validate(self, step: int) -> float | None:
        self._set_mode("eval")
        loss = self._loss(step, numbers=False)
        return None if loss is None else loss.item()

    def _step(self, step: int, update: Update | None) -> PlainStep:
        self._set_mode("train")
        extra = self._make_extra_pass(step, update) if hasattr(self.optimizer, "prepare") else {}
        self.corpora = torch.zeros(NUM_CORPORA, 2, dtype=torch.float64)
        self._sample_loss = None
        loss = self._loss(step, numbers=True)
        corpora = tuple((losses, labels) for losses, labels in self.corpora.tolist())
        routers: tuple[LayerRouting, ...] = ()
        if self.routers is not None:
            routers = self.routers.read(self.routers.take().tolist(), self._num_rows)
        further: tuple[float, ...] = ()
        if self.further is not None:
            sums = zip(self.further.take().tolist(), self._further_labels, strict=True)
            further = tuple(total / max(1, labels) for total, labels in sums)
        layer_norms = self._layer_norms()
        limit = self.run.train.gradient_clipping or torch.inf
        norm = nn.utils.clip_grad_norm_(self.masters.values(), limit)
        gradients = self._gradients()
        if update is not None:
            self._take(update.gradients)
        self._balance(routers if update is None else update.routers)
        set_rates(self.optimizer, **rates(self.run, step))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._set_mode("eval")
        return PlainStep(
            0.0 if loss is None else loss.item(),
            norm.item(),
            gradients,
            self._saved(self.masters | self.buffers),
            extra,
            corpora=corpora,
            layer_norms=layer_norms,
            sample_loss=None if self._sample_loss is None else self._sample_loss.item(),
            num_rows=self._num_rows,
            routers=routers,
            further_losses=further,
        )

    def _layer_norms(self) -> tuple[float, ...]:
        if not self.run.train.log_layer_norms:
            return ()
        number = self.run.architecture.num_layers
        squares = [0.0] * (number + 1)
        for name, master in self.masters.items():
            if master.grad is not None:
                layer = self.model.layer_number(name)
                squares[number if layer is None else layer] += master.grad.square().sum().item()
        return tuple(map(math.sqrt, squares))

    def _balance(self, routers: Sequence[LayerRouting]) -> None:
        """Change the biases of routers by the choices of the step."""
        for each in routers:
            bias = self.buffers.get(f"layers.{each.layer}.mlp.gate.e_score_correction_bias")
            if bias is not None:
                mean = sum(each.counts) / len(each.counts)
                rate = self.run.train.router.bias_update_rate
                bias += torch.tensor([rate * ((n < mean) - (n > mean)) for n in each.counts])

    def _take(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace these gradients; a parameter without a gradient is not updated."""
        for name, master in self.masters.items():
            taken = gradients.get(self.model.tensor_name(name))
            if taken is not None and master.grad is not None:
                master.grad.copy_(taken)

    def _set_mode(self, mode: str) -> None:
        getattr(self.model, mode)()
        if hasattr(self.optimizer, mode):
            getattr(self.optimizer, mode)()

    def _loss(self, step: int, *, numbers: bool) -> Tensor | None:
        """Loss of a step's samples; adds up gradients in fp32 if torch records them."""
        batches = self._batches(step, numbers=numbers)
        if self.objective.compares_samples:
            self.objective.look_ahead(self._predict, batches)
        num_labels = _num_labels(batches)
        num_samples = _num_samples(batches)
        self._num_rows = sum(len(batch.inputs) for batch in batches)
        if self.routers is not None:
            self.routers.factor = self._scale / self._num_rows
        if self.further is not None:
            labels_NK = [each.further_inputs["further_labels"].flatten(0, 1) for each in batches]
            self._further_labels = (torch.cat(labels_NK) != NO_LABEL).sum(0).tolist()
            self.further.factors = [self._scale / max(1, n) for n in self._further_labels]
        total = torch.zeros(())
        for batch in batches:
            loss = self._mean(batch, num_labels=max(1, num_labels), num_samples=max(1, num_samples))
            if loss.requires_grad:
                self._add_gradients(loss)
            total += loss.detach()
        if self.routers is not None:
            self.routers.factor = None
        if self.further is not None:
            self.further.factors = ()
        # Without labels, gradients are 0, and the optimizer still decays weights and uses momentum.
        return total if num_labels + num_samples else None

    def _batches(self, step: int, *, numbers: bool) -> list[MicroBatch]:
        """Micro batches of a step, with the weights rounded for its passes."""
        self._round()
        ids = rank_ids(self.objective, SINGLE_RANK, step=step)
        assert ids.corpora is not None
        self._corpora = ids.corpora.flatten().tolist()
        return [
            self.objective.to_batch(rows, sample_numbers=numbers_B if numbers else None)
            for rows, numbers_B in zip(
                step_samples(self.objective, step=step), ids.numbers, strict=True
            )
        ]

    def _make_extra_pass(self, step: int, update: Update | None) -> dict[str, Tensor]:
        """Give the optimizer gradients of drawn labels, and return them; empty: none are due."""
        batches = self._batches(step, numbers=True)
        num_labels, rows = max(1, _num_labels(batches)), step_samples(self.objective, step=step)[0]
        vocab_size = self.run.architecture.vocab_size
        assert vocab_size is not None
        made: dict[str, Tensor] = {}

        def gradients(relabel: Relabel) -> int:
            for number, batch in enumerate(batches):
                logits = self._predict(batch).logits
                labels = Labels(relabel(number, logits))
                losses = self.objective.losses(Predictions(logits), labels)
                self._add_gradients(losses.tokens / num_labels)
            made.update(self._gradients())
            if update is not None:
                self._take(update.extra)
            return num_labels

        self.optimizer.prepare(  # type: ignore[attr-defined]  # of optimizers with an extra pass
            ExtraPass(
                gradients=gradients,
                labels=[batch.labels for batch in batches],
                label_numbers=[batch.label_numbers for batch in batches],
                label_shape=lambda: self.objective.label_shape(rows),
                vocab_size=vocab_size,
                seed=self.run.seed,
            )
        )
        self.optimizer.zero_grad()
        return made

    def _mean(self, batch: MicroBatch, *, num_labels: int, num_samples: int) -> Tensor:
        """Part of a micro batch in the mean over the labels, and over the samples, of the step."""
        predicted = self._predict(batch)
        if self.run.train.log_corpus_losses and self.model.training:
            self._measure_corpora(predicted.logits, batch.labels)
        losses = self.objective.losses(predicted, Labels(batch.labels, batch.sample_labels))
        mean = losses.tokens / num_labels
        if losses.samples is not None:
            part = losses.samples / num_samples
            before = self._sample_loss
            self._sample_loss = part.detach() + (0.0 if before is None else before)
            mean = mean + part
        return mean

    @torch.no_grad()
    def _measure_corpora(self, logits_BLV: Tensor, labels_BL: Tensor) -> None:
        """Add the losses and the labels of each row to the sums of its corpus."""
        losses_BL = nn.functional.cross_entropy(
            logits_BLV.double().movedim(-1, 1), labels_BL, ignore_index=NO_LABEL, reduction="none"
        )
        for losses_L, labels_L in zip(losses_BL, labels_BL, strict=True):
            corpus = self._corpora.pop(0)
            self.corpora[corpus, 0] += losses_L.sum()
            self.corpora[corpus, 1] += (labels_L != NO_LABEL).sum()

    def _predict(self, batch: MicroBatch) -> Predictions:
        return predictions(self.model(batch.inputs, **batch.further_inputs))

    @property
    def _scale(self) -> float:
        """Scale of losses while gradients are computed."""
        is_fp16 = precision_of(self.run) == "fp16"
        return self.run.train.loss_scaling.initial_scale if is_fp16 else 1.0

    @torch.no_grad()
    def _round(self) -> None:
        """Give the model the weights in the precision of the run."""
        dtype = DTYPES[precision_of(self.run)]
        for name, parameter in self.model.named_parameters():
            parameter.data = self.masters[name].detach().to(dtype)
            parameter.grad = None

    def _add_gradients(self, loss: Tensor) -> None:
        """Add the gradients of the loss of a micro batch in fp32."""
        scale = self._scale
        (loss * scale).backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            gradient, master = parameter.grad.float() / scale, self.masters[name]
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    def _gradients(self) -> dict[str, Tensor]:
        """Copies of gradients; 0 for a parameter that has none."""
        pairs = ((name, own, own.grad) for name, own in self.masters.items())
        return self._saved({n: torch.zeros_like(own) if g is None else g for n, own, g in pairs})

    def _saved(self, named: "dict[str, Any]") -> dict[str, Tensor]:
        """Copies of tensors by their names in checkpoints."""
        rename = self.model.tensor_name
        return {rename(name): tensor.detach().clone() for name, tensor in named.items()}


def _num_labels(batches: Sequence[MicroBatch]) -> int:
    """Tokens of a step that have a label."""
    return sum(int((batch.labels != NO_LABEL).sum()) for batch in batches)


def _num_samples(batches: Sequence[MicroBatch]) -> int:
    """Samples of a step that have a label."""
    if batches[0].num_sample_labels is not None:
        return batches[0].num_sample_labels
    return sum(len(each.sample_labels) for each in batches if each.sample_labels is not None)
