"""Speed of training steps: times, tokens, floating-point operations, memory.

Measures `TrialSteps` for the tool `benchmark-train`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tokamake.config.resolved_run import Run
from tokamake.runtime.accelerators import known_peak
from tokamake.runtime.device import device_name, peak_memory, synchronize
from tokamake.runtime.ranks import Ranks
from tokamake.train.metrics import model_flops_per_token
from tokamake.train.numerics import precision_of
from tokamake.train.pipeline_stages import DTYPES
from tokamake.train.trials.trial_steps import TrialSteps

Measurements = dict[str, Any]


def num_timed_steps(steps: int) -> int:
    """Number of additional steps whose parts are timed."""
    return max(1, steps // 4)


def measure(
    trial: TrialSteps, ranks: Ranks, *, device: torch.device, steps: int, warmup_steps: int
) -> Measurements:
    """Train and measure times; all ranks call this together.

    Returns:
        `step_seconds` (median, p10, p90), `tokens_per_second` over all measured steps,
        `rows_per_sample`, below 1 if samples share rows, `split_seconds` of each part of a step,
        `peak_memory_bytes` of the rank that needed most.
    """
    batches = trial.batches()

    def step() -> int:
        settings = trial.run.train.optimizer
        rates = {"learning_rate": settings.learning_rate, "weight_decay": 0.0}
        return trial.train_step(next(batches), **rates).num_rows

    for _ in range(warmup_steps):
        step()
    synchronize(device)
    times, num_rows = [time.perf_counter()], 0
    for _ in range(steps):
        num_rows += step()
        times.append(time.perf_counter())
    synchronize(device)
    seconds = time.perf_counter() - times[0]
    train = trial.run.train
    tokens = steps * train.global_batch_size * train.sequence_length
    p10, median, p90 = np.percentile(np.diff(times), (10, 50, 90)).tolist()
    return {
        "steps": steps,
        "world_size": ranks.world_size,
        "tokens_per_step": tokens // steps,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_rank": tokens / seconds / ranks.world_size,
        "rows_per_sample": num_rows / (steps * train.global_batch_size),
        "step_seconds": {"median": median, "p10": p10, "p90": p90},
        "split_seconds": _split(trial, step, device, steps=num_timed_steps(steps)),
        "peak_memory_bytes": _max_over_ranks(peak_memory(device)),
    }


def _split(
    trial: TrialSteps, step: Callable[[], int], device: torch.device, *, steps: int
) -> dict[str, float]:
    """Mean seconds of the parts of a step.

    The device is synchronized between parts, so these steps are slower than the measured ones.
    """
    spent = {"forward_backward": 0.0, "optimizer": 0.0}
    begin = time.perf_counter()
    with (
        _timed(trial.engine.stages, "forward_backward", spent=spent, device=device),
        _timed(trial.engine.optimizer, "step", spent=spent, device=device, name="optimizer"),
    ):
        for _ in range(steps):
            step()
        synchronize(device)
    total = time.perf_counter() - begin
    parts = {**spent, "rest": total - sum(spent.values())}
    return {name: seconds / steps for name, seconds in parts.items()}


@contextmanager
def _timed(
    owner: Any, method: str, *, spent: dict[str, float], device: torch.device, name: str = ""
) -> Iterator[None]:
    """Add up the time of an object's method until the block ends."""
    original = getattr(owner, method)

    def timed(*arguments: Any, **options: Any) -> Any:
        synchronize(device)
        begin = time.perf_counter()
        result = original(*arguments, **options)
        synchronize(device)
        spent[name or method] += time.perf_counter() - begin
        return result

    setattr(owner, method, timed)
    try:
        yield
    finally:
        setattr(owner, method, original)


def _max_over_ranks(value: float) -> float:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def utilization(
    measured: Measurements,
    run: Run,
    *,
    ranks: Ranks,
    device: torch.device,
    peak_tflops: float | None,
) -> Measurements:
    """FLOP/s of a rank, and their share of the peak (MFU), which is looked up or measured if None.

    Counts the model's operations, without recomputation. All ranks call this together.
    """
    per_token = model_flops_per_token(run)
    computed = measured["tokens_per_second_per_rank"] * measured["rows_per_sample"]
    tflops = computed * per_token / 1e12
    precision, source = precision_of(run), "stated"
    peak = peak_tflops
    if peak is None:
        peak, source = known_peak(device_name(device), precision), "data sheet"
    if peak is None:
        # All ranks at the same time, because they may share cores.
        dist.barrier()
        peak, source = gemm_tflops(DTYPES[precision], device), "matrix product"
    return {
        "device": device_name(device),
        "precision": precision,
        "flops_per_token": per_token,
        "model_tflops_per_rank": tflops,
        "peak_tflops": peak,
        "peak_source": source,
        "mfu": tflops / peak,
    }


def gemm_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """TFLOP/s of the fastest of ten matrix products."""
    size = 1024 if device.type == "cpu" else 8192
    # Random numbers: some devices multiply equal ones faster.
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        begin = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return float(2 * size**3 / best / 1e12)


def report(measured: Measurements) -> str:
    """The numbers as lines for people."""
    times, parts = measured["step_seconds"], measured["split_seconds"]
    total = sum(parts.values())
    shares = ", ".join(
        f"{name.replace('_', ' and ')} {seconds / total:.1%}" for name, seconds in parts.items()
    )
    return "\n".join(
        f"{title:9} {text}"
        for title, text in (
            (
                "speed",
                f"{measured['tokens_per_second']:,.0f} tokens/s, "
                f"{measured['tokens_per_second_per_rank']:,.0f} a rank",
            ),
            (
                "compute",
                f"{measured['model_tflops_per_rank']:.3f} TFLOP/s a rank, {measured['mfu']:.1%} of "
                f"{measured['peak_tflops']:.3f} ({measured['peak_source']})",
            ),
            (
                "step",
                f"{times['median']:.4f} s (median), {times['p10']:.4f} to {times['p90']:.4f} "
                "(10 % to 90 %)",
            ),
            ("split", shares),
            ("peak", f"{measured['peak_memory_bytes'] / 1e9:.2f} GB of memory"),
        )
    )
