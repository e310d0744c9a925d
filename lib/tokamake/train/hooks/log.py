"""Records of training and validation, written and printed by rank 0."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean
from typing import TYPE_CHECKING

from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.objective import objective_data
from tokamake.config.resolved_run import Run
from tokamake.models.common.router_losses import LayerRouting
from tokamake.runtime.accelerators import known_peak
from tokamake.runtime.device import device_name, peak_memory
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train import megatron_log, metrics
from tokamake.train.hooks import FinishedStep, Hook, Training
from tokamake.train.metrics import Metrics, Record, TextSample, Validation
from tokamake.train.step_result import StepResult

if TYPE_CHECKING:
    import torch

_LINE = 160
"""Characters of a line with a sample."""


@dataclass
class _Interval:
    """Steps since the last record, or the last line."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    rows: int = 0
    """Rows of tokens: fewer than samples if these share rows."""
    batch_size: int = 0
    """Samples of the last step."""
    losses: float = 0.0
    """Sum of the losses of the steps that updated the weights."""
    updates: int = 0
    skipped: int = 0
    nans: int = 0
    corpora: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Sum of the losses in nats, and number of tokens, of each corpus."""

    def count(
        self,
        result: StepResult,
        samples: int,
        *,
        seconds: float,
        corpora: Sequence[str],
    ) -> None:
        """Add a step."""
        self.steps += 1
        self.samples += samples
        self.rows += result.num_rows
        self.seconds += seconds
        self.batch_size = samples
        self.skipped += result.skipped
        self.nans += not math.isfinite(result.loss)
        if math.isfinite(result.loss) and result.has_labels and not result.skipped:
            self.losses += result.loss
            self.updates += 1
            for corpus, (nats, tokens) in zip(corpora, result.corpus_losses, strict=False):
                before = self.corpora.get(corpus, (0.0, 0.0))
                self.corpora[corpus] = before[0] + nats, before[1] + tokens

    def for_megatron(self) -> megatron_log.IntervalMeans:
        mean = self.losses / self.updates if self.updates else math.nan
        return megatron_log.IntervalMeans(mean, self.skipped, self.nans)


class TrainingLog(Hook):
    """Metrics of a run: all ranks call its methods, rank 0 writes and prints.

    Args:
        done: finished steps; records of later steps, from before a restart, are dropped.
        corpora: names of the corpora of `StepResult.corpus_losses`.
        recorded: takes each record.
        device: of this rank, whose memory and utilization are recorded; None: they are not.
    """

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        *,
        done: int,
        corpora: Sequence[str] = (),
        recorded: Callable[[Record], None] = lambda _: None,
        device: "torch.device | None" = None,
    ) -> None:
        self._corpora, self._recorded = corpora, recorded
        self._train, self._ranks = run.train, ranks
        self._device = device
        name, precision = device_name(device) if device else "", run.train.precision or "bf16"
        self._peak_tflops = known_peak(name, precision)
        self._flops_per_token = metrics.model_flops_per_token(run)
        self._interval = _Interval()
        # Megatron's lines come also at steps that have no record.
        self._since_line = _Interval()
        self._is_megatron = run.train.log_style == "megatron"
        scalars = megatron_log.scalars if self._is_megatron else metrics.record_scalars
        with raise_on_all_ranks():
            self._metrics = None if ranks.rank else Metrics(run.output, done=done, scalars=scalars)
        if self._metrics and done > run.step and not self._metrics.has_records:
            print(f"{self._metrics.path}: has no records of the {done} steps before", flush=True)

    def end_step(self, finished: FinishedStep) -> None:
        """Add a step to the interval since the last record; if one is due, write it.

        A step whose loss is not finite has no record; Megatron has a line for it.
        """
        result, state, rate = finished.result, finished.state, finished.learning_rate
        if finished.seconds:
            for interval in (self._interval, self._since_line):
                samples, seconds = finished.num_samples, finished.seconds
                interval.count(result, samples, seconds=seconds, corpora=self._corpora)
        if not finished.is_logged:
            return
        if math.isfinite(result.loss):
            self._add_record(state, result, learning_rate=rate)
        if self._is_megatron and self._since_line.steps:
            # Megatron's lines have the rate of the next step.
            self._print_as_megatron(state, result, learning_rate=finished.next_rate)

    def _add_record(self, state: ResumeState, result: StepResult, *, learning_rate: float) -> None:
        interval, self._interval = self._interval, _Interval()
        if not self._metrics:
            return
        record = self._record(state, result, learning_rate=learning_rate, interval=interval)
        self._add(record)
        if self._is_megatron:
            return
        train_steps = self._train.train_steps
        seconds_left = (train_steps - state.step) * record["step_seconds"]
        self._ranks.print_once(
            metrics.console_line(record, train_steps=train_steps, seconds_left=seconds_left)
        )

    def _print_as_megatron(
        self, state: ResumeState, result: StepResult, *, learning_rate: float
    ) -> None:
        interval, self._since_line = self._since_line, _Interval()
        line = megatron_log.training_line(
            self._record(state, result, learning_rate=learning_rate, interval=interval),
            interval.for_megatron(),
            train_steps=self._train.train_steps,
            num_devices=self._ranks.world_size,
            now=datetime.now(),
        )
        self._ranks.print_once(line)

    def _record(
        self, state: ResumeState, result: StepResult, *, learning_rate: float, interval: _Interval
    ) -> Record:
        sequence_length = self._train.sequence_length
        tokens_per_second = interval.samples * sequence_length / interval.seconds
        # Of rows, which are fewer than samples if these share them.
        flops = interval.rows * sequence_length * self._flops_per_token
        flops_per_second = flops / interval.seconds
        return {
            "step": state.step,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_samples * sequence_length,
            "batch_size": interval.batch_size,
            "loss": result.loss if result.has_labels else None,
            "learning_rate": learning_rate,
            **({"grad_norm": result.grad_norm} if math.isfinite(result.grad_norm) else {}),
            **_parts_of_loss(result),
            **_layer_norms(result),
            **_further_losses(result.further_losses),
            **_routers(result.routers, drops=self._train.router.capacity_factor is not None),
            **_corpus_losses(interval),
            **({"loss_scale": result.loss_scale} if self._train.precision == "fp16" else {}),
            "tokens_per_second": tokens_per_second,
            "model_flops_per_second": flops_per_second,
            **self._utilization(flops_per_second),
            "step_seconds": interval.seconds / interval.steps,
        }

    def _utilization(self, flops_per_second: float) -> Record:
        """Memory of this rank, and the share of the peak of all devices, if it is known (MFU)."""
        if self._device is None:
            return {}
        memory: Record = {"peak_memory_bytes": peak_memory(self._device)}
        if self._peak_tflops is None:
            return memory
        peak = self._ranks.world_size * self._peak_tflops * 1e12
        return {**memory, "mfu": flops_per_second / peak}

    def validated(self, state: ResumeState, measured: dict[str, Validation]) -> None:
        """Record the measurement of each validation split."""
        step = state.step
        if self._metrics:
            # Megatron shows these losses against samples, too.
            samples = {"consumed_samples": state.consumed_samples} if self._is_megatron else {}
            self._add({"step": step, **samples, **metrics.validation(measured)})
        if self._is_megatron:
            losses = {n: each.loss for n, each in measured.items() if each.loss is not None}
            for line in megatron_log.validation_lines(step, losses):
                self._ranks.print_once(line)
            return
        parts = (metrics.validation_text(name, each) for name, each in measured.items())
        self._ranks.print_once(f"step {step}/{self._train.train_steps} | {' | '.join(parts)}")

    def wrote(self, step: int, texts: Sequence[TextSample]) -> None:
        """Add texts to TensorBoard, and print the first one."""
        if self._metrics:
            self._metrics.add_texts(step, texts)
            first = " ".join(f"{texts[0].prompt}{texts[0].text}".split())
            print(f"step {step}/{self._train.train_steps} | sample: {first}"[:_LINE], flush=True)

    def sync(self) -> None:
        """Bring all records to disk."""
        with raise_on_all_ranks():
            if self._metrics:
                self._metrics.sync()

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()

    def _add(self, record: Record) -> None:
        assert self._metrics
        self._metrics.add(record)
        self._recorded(record)


class StepLines(Hook):
    """Prints the loss of steps of a run without records."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self._train, self._ranks = run.train, ranks

    def end_step(self, finished: FinishedStep) -> None:
        """Print a line, if one is due."""
        step, result = finished.state.step, finished.result
        if step % self._train.log_interval == 0:
            self._ranks.print_once(
                f"step {step}/{self._train.train_steps}: loss {result.loss:.4f}, learning rate "
                f"{finished.learning_rate:.3g}, gradient norm {result.grad_norm:.3g}"
            )


def open_hook(training: Training) -> Hook:
    """Records; or lines alone, where epochs have scores in place of validation losses."""
    if objective_data(training.run.train.objective).has_epochs:
        return StepLines(training.run, training.ranks)
    return TrainingLog(
        training.run,
        training.ranks,
        done=training.state.step,
        corpora=training.corpora,
        recorded=training.record,
        device=training.device,
    )


def _corpus_losses(interval: _Interval) -> Record:
    """Mean loss per token of each corpus that had tokens."""
    return {
        f"loss/{corpus}": nats / tokens
        for corpus, (nats, tokens) in sorted(interval.corpora.items())
        if tokens
    }


def _parts_of_loss(result: StepResult) -> Record:
    """The two parts of the loss of masked samples."""
    if result.sample_loss is None:
        return {}
    return {"token_loss": result.loss - result.sample_loss, "sample_loss": result.sample_loss}


def _routers(layers: Sequence[LayerRouting], *, drops: bool) -> Record:
    """Losses of routers without their factors, entropy, and the load of experts.

    Args:
        drops: whether experts have a capacity: then also the share of choices that they drop.
    """
    if not layers:
        return {}
    loads = [max(each.counts) * len(each.counts) / max(1, sum(each.counts)) for each in layers]
    names = [f"layers.{each.layer}" for each in layers]
    of_layers = zip(names, layers, loads, strict=True)
    return {
        "balance_loss": fmean(each.balance for each in layers),
        "router_z_loss": fmean(each.z for each in layers),
        "router_entropy": fmean(each.entropy for each in layers),
        "busiest_expert": max(loads),
        "idle_experts": sum(each.counts.count(0) for each in layers),
        **{
            key: value
            for name, layer, load in of_layers
            for key, value in (
                (f"router_entropy/{name}", layer.entropy),
                (f"busiest_expert/{name}", load),
            )
        },
        **(_dropped_shares(layers) if drops else {}),
    }


def _further_losses(losses: Sequence[float]) -> Record:
    """Losses of layers that predict further tokens, without their factor."""
    if not losses or not all(map(math.isfinite, losses)):  # JSON has no NaN
        return {}
    of_layers = {f"mtp_loss/{number}": loss for number, loss in enumerate(losses, 1)}
    return {"mtp_loss": fmean(losses), **of_layers}


def _dropped_shares(layers: Sequence[LayerRouting]) -> Record:
    """Share of choices that experts drop: the mean of the layers, and of each layer."""
    of_layers = {f"dropped_share/layers.{each.layer}": each.dropped for each in layers}
    return {"dropped_share": fmean(of_layers.values()), **of_layers}


def _layer_norms(result: StepResult) -> Record:
    """Finite gradient norms of layers, if they are measured."""
    *layers, rest = result.layer_norms or [math.nan]
    names = [*(f"layers.{number}" for number in range(len(layers))), "others"]
    norms = zip(names, [*layers, rest], strict=True)
    return {f"grad_norm/{name}": norm for name, norm in norms if math.isfinite(norm)}
