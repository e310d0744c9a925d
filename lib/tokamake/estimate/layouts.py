"""`estimate --suggest`: layouts of a run that fit the memory of a device, the fastest first."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from math import gcd, log
from typing import Any, NamedTuple

from tokamake.config.architecture import Architecture
from tokamake.config.parallel import ParallelSettings
from tokamake.config.resolved_run import Run
from tokamake.config.root import Config
from tokamake.errors import UserError
from tokamake.estimate.parameters import stage_sizes
from tokamake.estimate.run import Allocation, planned_precision, planned_run
from tokamake.estimate.step_time import Layout, RankParameters, StepTime, step_time
from tokamake.estimate.text import table
from tokamake.preflight.model import check_layout
from tokamake.preflight.run import check_ranks
from tokamake.runtime.accelerators import Accelerator
from tokamake.runtime.console import counted
from tokamake.runtime.device_types import ASSUMED
from tokamake.train import memory
from tokamake.train.metrics import model_flops_per_token
from tokamake.units import in_bytes

USABLE_MEMORY = 0.9
"""Share of a device's memory for a run: libraries and unused gaps take the rest."""
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_VIRTUAL = (1, 2, 3, 4, 5, 6)
_TIE = 1.02
"""Quotient of times that count as the same: the cost model is no better."""
_SHORT_STEP = 0.01
"""Seconds of a step below which kernels take about as long to start as to run."""
_NOTE = "such short steps take longer: the cost model does not know how long kernels take to start"
_MOST = 10
"""Layouts that are shown."""
_SHORTEST_PART = 4096
"""Tokens of a rank below which context parallelism is not tried."""


class Suggestion(NamedTuple):
    """A layout that fits, with its memory and its times."""

    layout: Layout
    memory_bytes: float
    step: StepTime
    tokens_per_second: float
    mfu: float
    """Share of the peak, without recomputed operations."""
    precision: str

    def as_json(self) -> dict[str, Any]:
        """All numbers, with the names of the fields."""
        return {
            **self._asdict(),
            "layout": asdict(self.layout),
            "step": {**self.step._asdict(), "total": self.step.total},
            "settings": settings(self.layout),
        }


def settings(layout: Layout) -> dict[str, Any]:
    """Settings of `train` that make a layout."""
    parallel: dict[str, Any] = {
        "tensor_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_parallel_size": layout.expert,
    }
    if layout.virtual > 1:
        parallel |= {
            "pipeline_schedule": "interleaved_1f1b",
            "virtual_pipeline_size": layout.virtual,
        }
    default = ParallelSettings()
    return {
        "micro_batch_size": layout.micro_batch,
        "recompute_granularity": layout.recompute,
        "zero_stage": layout.zero,
        "parallel": {k: v for k, v in parallel.items() if v != getattr(default, k)},
    }


def suggested(
    config: Config, architecture: Architecture, *, allocation: Allocation
) -> list[Suggestion]:
    """The fastest layouts that fit, one for each division of the ranks.

    Raises:
        UserError: the model has several stacks of layers, or nothing fits.
    """
    device = allocation.accelerator
    assert device is not None, "the caller checks it"
    if architecture.several_stacks:
        raise UserError(
            f"run {config.run}: --suggest: {architecture.family} has "
            f"{architecture.several_stacks}, and the cost model has one stack of layers; set "
            "train.parallel by hand"
        )
    run = planned_run(config, architecture, steps=config.train.num_steps or 1, has_device=True)
    time_of = _Times(run, device)
    timed = sorted(
        ((time_of(layout), layout) for layout in _candidates(run, allocation)),
        key=lambda pair: (_tied(pair[0].total), *_complexity(pair[1]), pair[0].total),
    )
    found: dict[tuple[int, ...], Suggestion] = {}
    for step, layout in timed:
        division = (layout.tensor, layout.pipeline, layout.context, layout.expert)
        if division in found:
            continue
        most = USABLE_MEMORY * device.memory_bytes
        if needed := _memory(run, layout, ranks=allocation.ranks, most=most):
            found[division] = _suggestion(run, layout, step=step, needed=needed, device=device)
        if len(found) == _MOST:
            break
    if not found:
        raise UserError(
            f"run {config.run}: no layout fits {allocation.ranks:,} ranks of "
            f"{allocation.device}; give more with --nodes, or a device with more memory"
        )
    return [*found.values()]


def _tied(seconds: float) -> int:
    """Equal for times that differ by less than about 2 %, as far as the cost model knows."""
    return round(log(seconds) / log(_TIE))


def _complexity(layout: Layout) -> tuple[int, ...]:
    """Sort key of equally fast layouts: the simpler one has the smaller value."""
    division = layout.tensor * layout.pipeline * layout.context * layout.expert
    return division, max(1, layout.zero), layout.recompute != "none", layout.virtual


def _candidates(run: Run, allocation: Allocation) -> Iterator[Layout]:
    """Layouts that divide ranks, batch, heads and layers."""
    train, shape, ranks = run.train, run.architecture, allocation.ranks
    per_node = max(1, ranks // allocation.nodes)
    tensors = [n for n in _divisors(per_node) if shape.num_attention_heads % n == 0]
    parts = train.sequence_length // _SHORTEST_PART
    for tensor in tensors:
        for context in [n for n in _divisors(ranks // tensor) if n == 1 or n <= parts]:
            for pipeline in _divisors(ranks // (tensor * context)):
                if pipeline > shape.num_hidden_layers:
                    continue
                data = ranks // (tensor * context * pipeline)
                for micro in _MICRO_BATCHES:
                    if train.global_batch_size % (micro * data):
                        continue
                    division = Layout(
                        tensor=tensor,
                        context=context,
                        pipeline=pipeline,
                        data=data,
                        micro_batch=micro,
                        sequence_parallel=tensor > 1,
                    )
                    yield from _variants(shape, division)


def _variants(shape: Architecture, division: Layout) -> Iterator[Layout]:
    """Layouts of the same division: ranks of experts, virtual stages, recomputation, ZeRO."""
    pipeline, experts = division.pipeline, [1]
    if shape.has_routers:
        experts = _divisors(gcd(division.data * division.context, shape.setting("num_experts")))
    has_sharers = division.data * division.context > 1
    # In a pipeline, weights stay whole, and gradients until the end of a step.
    stages = (1, 2, 3) if has_sharers and pipeline == 1 else (1,)
    for virtual in _VIRTUAL if pipeline > 1 else (1,):
        if virtual > 1 and shape.num_hidden_layers % (pipeline * virtual):
            continue
        for recompute, zero, ranks in product(("none", "selective", "full"), stages, experts):
            yield replace(division, virtual=virtual, recompute=recompute, zero=zero, expert=ranks)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class _Times:
    """Step times of layouts; the sizes of stages are computed once for a division."""

    def __init__(self, run: Run, device: Accelerator) -> None:
        self._run, self._device = run, device
        self._parameters: dict[tuple[int, ...], RankParameters] = {}

    def __call__(self, layout: Layout) -> StepTime:
        train = self._run.train
        division = layout.tensor, layout.pipeline, layout.virtual, layout.expert
        if division not in self._parameters:
            self._parameters[division] = self._largest(layout)
        return step_time(
            self._run.architecture,
            layout,
            device=self._device,
            global_batch=train.global_batch_size,
            sequence_length=train.sequence_length,
            parameters=self._parameters[division],
            precision=planned_precision(self._run),
        )

    def _largest(self, layout: Layout) -> RankParameters:
        """Parameters of the largest pipeline rank."""
        parallel = ParallelSettings.model_validate(settings(layout)["parallel"])
        train = self._run.train.model_copy(update={"parallel": parallel})
        run = self._run.model_copy(update={"train": train})
        ranks = {0, layout.pipeline // 2, layout.pipeline - 1}
        stages = [stage_sizes(run, rank) for rank in ranks]
        return max(
            RankParameters(sum(s.total for s in each), sum(s.experts for s in each))
            for each in stages
        )


def _memory(run: Run, layout: Layout, *, ranks: int, most: float) -> float | None:
    """Bytes of a rank; None: more than `most`, or the trainer would refuse the layout."""
    changes = settings(layout)
    parallel = ParallelSettings.model_validate(changes["parallel"])
    train = run.train.model_copy(update={**changes, "parallel": parallel})
    laid = run.model_copy(update={"train": train})
    needed = memory.estimate(laid, ranks, ASSUMED, stages=stage_sizes).total
    if needed > most:
        return None
    try:
        check_layout(train, run.architecture)
        check_ranks(train, ranks)
        type(run.train).model_validate({**run.train.model_dump(), **changes})
    except (UserError, ValueError):
        return None
    return needed


def _suggestion(
    run: Run, layout: Layout, *, step: StepTime, needed: float, device: Accelerator
) -> Suggestion:
    tokens = run.train.global_batch_size * run.train.sequence_length
    flops, precision = model_flops_per_token(run) * tokens, planned_precision(run)
    mfu = flops / step.total / layout.ranks / device.peak(precision)
    return Suggestion(layout, needed, step, tokens / step.total, mfu, precision)


def lines(name: str, found: list[Suggestion], *, allocation: Allocation) -> list[str]:
    """Layouts as a table, and the settings of the fastest one."""
    titles = [
        "TP",
        "PP",
        "CP",
        "EP",
        "DP",
        "micro",
        "recompute",
        "ZeRO",
        "memory",
        "step",
        "tokens/s",
        "MFU",
    ]
    rows: list[tuple[str, ...]] = [(*titles, "largest other cost")]
    for each in found:
        layout = each.layout
        stages = f"{layout.pipeline}" + f"x{layout.virtual}" * (layout.virtual > 1)
        parts = each.step._asdict()
        del parts["products"]
        largest = max(parts, key=lambda part: parts[part])
        rows.append(
            (
                *(str(n) for n in (layout.tensor, stages, layout.context)),
                *(str(n) for n in (layout.expert, layout.data)),
                *(str(layout.micro_batch), layout.recompute, str(layout.zero)),
                in_bytes(round(each.memory_bytes)),
                _seconds(each.step.total),
                f"{each.tokens_per_second:,.0f}",
                f"{each.mfu:.0%}",
                f"{largest} {parts[largest] / each.step.total:.0%}",
            )
        )
    best = settings(found[0].layout)
    parallel = ", ".join(f"{key}: {_yaml(value)}" for key, value in best["parallel"].items())
    return [
        f"run {name}: {allocation.ranks:,} ranks of {allocation.device} on "
        f"{counted(allocation.nodes, 'node')} in "
        f"{found[0].precision}, predicted by docs/explanation/cost-model.md",
        *table(rows, left=(6, 12)),
        *[_NOTE] * (found[0].step.total < _SHORT_STEP),
        "settings of the first, in the section train:",
        *(f"  {key}: {value}" for key, value in best.items() if key != "parallel"),
        f"  parallel: {{{parallel}}}",
    ]


def _seconds(seconds: float) -> str:
    """A time in a unit that fits: 47.29 s, 12.30 ms, 49.83 µs."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:,.2f} ms"
    return f"{seconds * 1e6:,.2f} µs"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
