"""How fast training steps are: times, tokens, floating-point operations, memory.

Steps come from a `TrialSteps`; numbers go to `benchmark-train`.
"""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.runtime.ranks import Ranks
from tokamake.train.numerics import precision_of
from tokamake.train.pipeline_stages import DTYPES
from tokamake.train.trial_steps import TrialSteps

KNOWN_PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "A100": 312.0,
    "MI250X": 191.5,  # of a die, which torch takes for a device
    "MI250": 181.0,  # of a die
    "MI300X": 1307.4,
    "Max 1550": 419.4,  # of a stack, which torch takes for a device unless told otherwise
}
"""Dense bf16 or fp16 TFLOP/s, from makers' data sheets, by part of the device's name as torch
tells it; the first that fits counts."""

Report = dict[str, Any]


def split_steps(steps: int) -> int:
    """Steps more, of which parts are timed."""
    return max(1, steps // 4)


def measure(
    trial: TrialSteps, ranks: Ranks, device: torch.device, *, steps: int, warmup_steps: int
) -> Report:
    """Do steps and time them; all ranks call this together.

    Returns:
        `step_seconds` (median, p10, p90), `tokens_per_second` over all measured steps,
        `seconds` of each part of a step, `peak_memory_bytes` of the rank that needed most.
    """
    coming = trial.batches()

    def step() -> None:
        settings = trial.run.train.optimizer
        rates = {"learning_rate": settings.learning_rate, "weight_decay": 0.0}
        trial.engine.train_step(next(coming), **rates)

    for _ in range(warmup_steps):
        step()
    _finish(device)
    times = [time.perf_counter()]
    for _ in range(steps):
        step()
        times.append(time.perf_counter())
    _finish(device)
    seconds = time.perf_counter() - times[0]
    train = trial.run.train
    tokens = steps * train.global_batch_size * train.sequence_length
    low, middle, high = np.percentile(np.diff(times), (10, 50, 90)).tolist()
    return {
        "steps": steps,
        "world_size": ranks.world_size,
        "tokens_per_step": tokens // steps,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_rank": tokens / seconds / ranks.world_size,
        "step_seconds": {"median": middle, "p10": low, "p90": high},
        "split_seconds": _split(trial, step, device, steps=split_steps(steps)),
        "peak_memory_bytes": _most(_peak_memory(device)),
    }


def _finish(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def _split(
    trial: TrialSteps, step: Callable[[], None], device: torch.device, *, steps: int
) -> dict[str, float]:
    """Mean seconds of a step's parts; the device is waited for between them."""
    spent = {"forward_backward": 0.0, "optimizer": 0.0}
    begin = time.perf_counter()
    with (
        _timed(trial.engine._stages, "forward_backward", spent, device),
        _timed(trial.engine._optimizer, "step", spent, device, name="optimizer"),
    ):
        for _ in range(steps):
            step()
        _finish(device)
    whole = time.perf_counter() - begin
    found = {**spent, "rest": whole - sum(spent.values())}
    return {name: seconds / steps for name, seconds in found.items()}


@contextmanager
def _timed(
    owner: Any, method: str, spent: dict[str, float], device: torch.device, *, name: str = ""
) -> Iterator[None]:
    """Add up the time of an object's method while in here."""
    plain = getattr(owner, method)

    def timed(*arguments: Any, **options: Any) -> Any:
        _finish(device)
        begin = time.perf_counter()
        found = plain(*arguments, **options)
        _finish(device)
        spent[name or method] += time.perf_counter() - begin
        return found

    setattr(owner, method, timed)
    try:
        yield
    finally:
        setattr(owner, method, plain)


def _peak_memory(device: torch.device) -> float:
    if device.type != "cpu":
        return float(getattr(torch, device.type).max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _most(value: float) -> float:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def utilization(
    found: Report, run: Run, ranks: Ranks, device: torch.device, *, peak_tflops: float | None
) -> Report:
    """Floating-point operations per second of a rank, and their share of the peak (MFU).

    Counts what the model needs, whatever is computed again; all ranks call this together.

    Args:
        found: by `measure`.
        run: the run that was measured.
        ranks: this process among its peers.
        device: of this rank.
        peak_tflops: of a rank's device; None: look it up or measure it.
    """
    family = plugins.load("models/*/memory", run.architecture.family)
    per_token = family.flops_per_token(run.architecture, run.train.sequence_length)
    tflops = found["tokens_per_second_per_rank"] * per_token / 1e12
    precision, source = precision_of(run.train, device), "stated"
    peak = peak_tflops
    if peak is None:
        peak, source = known_peak(_name(device), precision), "data sheet"
    if peak is None:
        # At the same time on all ranks, which may share cores.
        dist.barrier()
        peak, source = gemm_tflops(DTYPES[precision], device), "matrix product"
    return {
        "device": _name(device),
        "precision": precision,
        "flops_per_token": per_token,
        "model_tflops_per_rank": tflops,
        "peak_tflops": peak,
        "peak_source": source,
        "mfu": tflops / peak,
    }


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else getattr(torch, device.type).get_device_name(device)


def known_peak(name: str, precision: str) -> float | None:
    """TFLOP/s of a device in a 16-bit format, from its name; None where that is not known."""
    if precision == "fp32":
        return None
    return next((peak for part, peak in KNOWN_PEAKS.items() if part in name), None)


def gemm_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """TFLOP/s of the best of some matrix products."""
    size = 1024 if device.type == "cpu" else 8192
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        _finish(device)
        begin = time.perf_counter()
        torch.mm(left, right)
        _finish(device)
        best = min(best, time.perf_counter() - begin)
    return float(2 * size**3 / best / 1e12)


def report(found: Report) -> str:
    """The numbers for people."""
    times, parts = found["step_seconds"], found["split_seconds"]
    whole = sum(parts.values())
    shares = ", ".join(
        f"{name.replace('_', ' and ')} {seconds / whole:.1%}" for name, seconds in parts.items()
    )
    return "\n".join(
        f"{title:9} {text}"
        for title, text in (
            (
                "speed",
                f"{found['tokens_per_second']:,.0f} tokens/s, "
                f"{found['tokens_per_second_per_rank']:,.0f} a rank",
            ),
            (
                "compute",
                f"{found['model_tflops_per_rank']:.3f} TFLOP/s a rank, {found['mfu']:.1%} of "
                f"{found['peak_tflops']:.3f} ({found['peak_source']})",
            ),
            (
                "step",
                f"{times['median']:.4f} s (median), {times['p10']:.4f} to {times['p90']:.4f} "
                "(10 % to 90 %)",
            ),
            ("split", shares),
            ("peak", f"{found['peak_memory_bytes'] / 1e9:.2f} GB of memory"),
        )
    )
