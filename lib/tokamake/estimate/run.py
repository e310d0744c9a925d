"""A run before it starts: steps, epochs, parameters, memory, operations, time, checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import ResolvedTrainSettings, Run
from tokamake.config.root import Config
from tokamake.config.training import TrainSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.mixture.shares import MANY_EPOCHS, seen_tokens, shares
from tokamake.errors import UserError
from tokamake.estimate.parameters import num_parameters, num_tensors, stage_sizes
from tokamake.preflight.model import check_layout
from tokamake.preflight.run import check_ranks
from tokamake.runtime.accelerators import Accelerator, accelerator
from tokamake.runtime.console import shortened
from tokamake.runtime.device_types import ASSUMED
from tokamake.train import memory
from tokamake.train.metrics import model_flops_per_token

_FP32_BYTES = 4
_ENTRY_BYTES = 2000
"""Bytes of a checkpoint for each tensor and each rank that keeps a part of it, beside its values.
"""


class Allocation(NamedTuple):
    """Nodes and ranks that a profile gives to a training."""

    nodes: int = 1
    ranks: int = 1
    minutes: float | None = None
    """Time limit of a job; None: none is stated."""
    device: str = ""
    """Name in `accelerators`; empty: not stated."""

    @property
    def accelerator(self) -> Accelerator | None:
        """Facts of the device; None: it is not stated."""
        where = "device: the resource of the rule train, or --device"
        return accelerator(self.device, where=where) if self.device else None


def allocation_of(resources: dict[str, Any], *, nodes: int | None = None) -> Allocation:
    """An allocation from resources of the rule train; expressions count as not stated."""

    def number(name: str) -> int:
        text = str(resources.get(name) or "")
        return int(text) if text.isdecimal() else 0

    allocated, ranks = number("nodes") or 1, number("tasks") or 1
    if nodes is not None:
        ranks, allocated = max(1, ranks // allocated) * nodes, nodes
    device = str(resources.get("device") or "").strip("'\"")
    found = Allocation(allocated, ranks, number("runtime") or None, device)
    _ = found.accelerator  # an unknown one is the user's mistake
    return found


class Assumptions(NamedTuple):
    """Numbers that no file of the project states."""

    mfu: float = 0.4
    """Share of the device's peak that training reaches (MFU)."""
    price_per_node_hour: float | None = None


class RunEstimate(NamedTuple):
    """A run that pretrains. Sizes in bytes."""

    run: str
    family: str
    parameters: int
    steps: int
    tokens: int
    epochs: dict[str, float]
    """Corpus → passes over its training documents."""
    jobs: int
    """Jobs that train, one after the other."""
    checkpoints: int
    """Checkpoints that stay."""
    checkpoint_bytes: float
    memory: memory.Estimate | None
    """Memory of a rank; None: the layout does not fit the ranks."""
    flops: float
    precision: str
    hours: float | None
    """Time of the training; None: the device is not stated."""
    node_hours: float | None
    price: float | None
    warnings: list[str]

    @property
    def checkpoints_bytes(self) -> float:
        return self.checkpoints * self.checkpoint_bytes


def estimate_run(
    config: Config,
    table: list[Corpus],
    *,
    architecture: Architecture,
    tokens: Mapping[str, float],
    allocation: Allocation,
    assumptions: Assumptions,
) -> RunEstimate:
    """Estimate a run from its config; `tokens` has the tokens of each corpus.

    `architecture` has its vocab_size.
    """
    train, warnings = config.train, list[str]()
    rows = [row for row in table if row.trains]
    seen = seen_tokens(rows, {name: round(n) for name, n in tokens.items()}, split=train.split)
    steps = train.num_steps or _steps_of_epochs(rows, seen, train=train)
    samples = train.batch_sizes.samples(steps)
    num_tokens = samples * train.sequence_length
    epochs = _epochs(rows, seen, tokens=num_tokens, warnings=warnings)
    run = planned_run(config, architecture, steps=steps, has_device=bool(allocation.device))
    needed = None
    try:
        check_layout(run.train, architecture)
        check_ranks(run.train, allocation.ranks)
        kind = ASSUMED if allocation.device else "cpu"
        needed = memory.estimate(run, allocation.ranks, kind, stages=stage_sizes)
    except UserError as error:
        warnings.append(str(error))
    flops = float(model_flops_per_token(run)) * num_tokens
    hours = _hours(run, flops, allocation=allocation, mfu=assumptions.mfu)
    node_hours = None if hours is None else hours * allocation.nodes
    price = assumptions.price_per_node_hour
    states = [*train.optimizer.facts.state.values()].count("like_parameter")
    parameters = num_parameters(architecture)
    if needed and (device := allocation.accelerator) and needed.total > device.memory_bytes:
        warnings.append(
            f"a rank needs {needed.total / 1e9:.1f} GB, and {allocation.device} has "
            f"{device.memory_bytes / 1e9:.0f} GB; `tokamake estimate --suggest` lists layouts that "
            "fit"
        )
    warnings += _walltime(train, steps, hours=hours, minutes=allocation.minutes)
    return RunEstimate(
        config.run,
        architecture.family,
        parameters,
        steps,
        num_tokens,
        epochs,
        jobs=len(train.segments()) + 1,
        checkpoints=_num_checkpoints(train, steps),
        checkpoint_bytes=parameters * (_FP32_BYTES + train.optimizer.facts.state_bytes * states)
        + _ENTRY_BYTES * num_tensors(architecture) * (1 + states) * allocation.ranks,
        memory=needed,
        flops=flops,
        precision=planned_precision(run),
        hours=hours,
        node_hours=node_hours,
        price=price * node_hours if price is not None and node_hours is not None else None,
        warnings=warnings,
    )


def planned_run(config: Config, architecture: Architecture, *, steps: int, has_device: bool) -> Run:
    """The run that `resolve` would write, as far as memory and operations depend on it."""
    precision = config.train.precision or ("bf16" if has_device else "fp32")
    length = {"train_steps": steps, "train_samples": None, "train_tokens": None}
    settings = {**config.train.model_dump(), **length, "precision": precision}
    none = Path()
    return Run(
        run=config.run,
        seed=config.seed,
        index=none,
        data_root=none,
        output=none,
        architecture=architecture,
        train=ResolvedTrainSettings.model_validate(settings),
    )


def planned_precision(run: Run) -> str:
    """Precision of a run of `planned_run`, which states one."""
    assert run.train.precision is not None
    return run.train.precision


def _steps_of_epochs(rows: list[Corpus], seen: Mapping[str, int], *, train: TrainSettings) -> int:
    """Steps of a run whose length the epochs of its corpora give."""
    total = sum((row.epochs or 0) * seen[row.corpus] for row in rows)
    return max(1, train.batch_sizes.whole_steps(int(total // train.sequence_length)))


def _epochs(
    rows: list[Corpus], seen: Mapping[str, int], *, tokens: int, warnings: list[str]
) -> dict[str, float]:
    """Passes over each corpus; adds warnings where the table states other ones."""
    table = Path(rows[0].where.rpartition(":")[0] or rows[0].where)
    try:
        found = shares(rows, {**seen}, train_tokens=tokens, table=table)
    except UserError as error:
        warnings.append(str(error).replace(" (--train-tokens)", ""))
        return {}
    epochs = {row.corpus: found[row.corpus] * tokens / seen[row.corpus] for row in rows}
    more = {row.corpus: row.epochs for row in rows if row.epochs}
    more = {name: stated for name, stated in more.items() if epochs[name] > 1.01 * stated}
    warnings += [
        f"corpus {name}: {epochs[name]:.2f} epochs, the table states {stated:g}; shorten the "
        "training or raise epochs"
        for name, stated in more.items()
    ]
    many = [f"{n} {e:,.1f}" for n, e in epochs.items() if e > MANY_EPOCHS and n not in more]
    if many:
        warnings.append(
            f"epochs: {shortened(many)}: beyond about {MANY_EPOCHS}, repeated tokens are worth "
            "clearly less: add data, lower weights or shorten the training"
        )
    return epochs


def _hours(run: Run, flops: float, *, allocation: Allocation, mfu: float) -> float | None:
    device = allocation.accelerator
    if device is None:
        return None
    return flops / (allocation.ranks * device.peak(planned_precision(run)) * mfu) / 3600


def _num_checkpoints(train: TrainSettings, steps: int) -> int:
    """Checkpoints that stay when the run ends."""
    every = -(-steps // train.save_interval)
    if not train.keep_last:
        return every
    kept = train.keep_last + (train.keep_best or 0) + len(train.segments())
    kept += steps // train.keep_every if train.keep_every else 0
    return min(every, kept)


def _walltime(
    train: TrainSettings, steps: int, *, hours: float | None, minutes: float | None
) -> list[str]:
    if hours is None or minutes is None:
        return []
    interval = 60 * hours * min(train.save_interval, steps) / steps
    if interval <= minutes:
        return []
    return [
        f"train.save_interval: {train.save_interval}: about {interval:.0f} minutes of training, "
        f"and a job has {minutes:g}: it would end before it saves; lower save_interval or raise "
        "runtime"
    ]
