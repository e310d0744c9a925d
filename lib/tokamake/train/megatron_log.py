"""Log lines and TensorBoard tags of Megatron-LM, for programs that read its logs.

Lines follow megatron/training/training.py in NVIDIA/Megatron-LM, August 2026, with the throughput
at the end.
"""

import math
from datetime import datetime
from typing import NamedTuple

from tokamake.train.metrics import Record, Scalars

_TAGS = {
    "learning_rate": "learning-rate",
    "batch_size": "batch-size",
    "loss": "lm loss",
    "loss_scale": "loss-scale",
    "grad_norm": "grad-norm",
    "step_seconds": "iteration-time",
}
"""Megatron's tag for an entry of a record."""
_NOT_AGAINST_SAMPLES = {"step_seconds"}
_VALIDATION = "validation_loss"


class IntervalMeans(NamedTuple):
    """Means over the steps since the line before."""

    mean_loss: float
    """Mean loss of the steps that updated the weights; NaN: there is none."""
    skipped: int
    """Steps without an update, because gradients overflowed in fp16."""
    nans: int
    """Steps whose loss is not finite."""


def training_line(
    record: Record, interval: IntervalMeans, *, train_steps: int, num_devices: int, now: datetime
) -> str:
    """Return the line of a training record.

    Args:
        record: `step`, `consumed_samples`, `batch_size`, `step_seconds`, `learning_rate`,
            `model_flops_per_second` and, where they are known, `loss_scale` and `grad_norm`.
    """
    tflops = record["model_flops_per_second"] / num_devices / 1e12
    has_loss, norm = not math.isnan(interval.mean_loss), record.get("grad_norm")
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {record['step']:8d}/{train_steps:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {record['step_seconds'] * 1000:.1f}",
        f"learning rate: {record['learning_rate']:.6E}",
        f"global batch size: {record['batch_size']:5d}",
        *([f"lm loss: {interval.mean_loss:.6E}"] if has_loss else []),
        f"loss scale: {record.get('loss_scale', 1.0):.1f}",
        *([f"grad norm: {norm:.3f}"] if norm is not None else []),
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nans:3d}",
        f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}",
    ]
    return " | ".join(parts) + " |"


def validation_lines(step: int, losses: dict[str, float]) -> list[str]:
    """Return the lines of the losses of validation splits."""
    lines = []
    for name, loss in losses.items():
        line = (
            f" validation{_suffix(name)} loss at iteration {step} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {math.exp(min(20.0, loss)):.6E} | "
        )
        rule = "-" * (len(line) + 1)
        lines += [rule, line, rule]
    return lines


def scalars(record: Record) -> Scalars:
    """Return the value of each TensorBoard tag and step: of iterations, and of samples."""
    step, samples = int(record["step"]), record.get("consumed_samples")
    values: Scalars = {}
    if "loss" in record:  # Megatron records the scale of every precision
        record = {"loss_scale": 1.0, **record}
    for name, value in record.items():
        tag = _TAGS.get(name)
        if name.startswith(_VALIDATION):
            tag = f"lm loss validation{_suffix(name.removeprefix(_VALIDATION).lstrip('/'))}"
        if name.startswith("loss/"):  # Megatron has no losses of corpora
            tag = f"lm {name}"
        if name.startswith("mtp_loss/"):
            tag = f"mtp_{name.partition('/')[2]} loss"
        if name.startswith("grad_norm/"):  # nor norms of layers
            tag = f"grad-norm/{name.partition('/')[2]}"
        if tag:
            values[tag, step] = value
            if samples is not None and name not in _NOT_AGAINST_SAMPLES:
                values[f"{tag} vs samples", int(samples)] = value
    return values


def _suffix(split: str) -> str:
    return "" if split in ("", "valid") else f"-{split}"
