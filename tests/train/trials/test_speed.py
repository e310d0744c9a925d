"""Speed of training steps, by a clock of its own, and its share of a device's peak."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokamake.runtime.accelerators import known_peak
from tokamake.runtime.ranks import Ranks
from tokamake.train.trials import speed
from tokamake.train.trials.speed import gemm_tflops, measure, report, utilization

CPU = torch.device("cpu")
SOLE = Ranks(0, 1, 0, 1)


class Trial:
    """Steps that take no time, except by the test's clock."""

    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []
        optimizer = SimpleNamespace(learning_rate=0.5)
        train = SimpleNamespace(optimizer=optimizer, global_batch_size=4, sequence_length=8)
        self.run = SimpleNamespace(train=train)
        self.stages = SimpleNamespace(forward_backward=lambda _: None)
        self.optimizer = SimpleNamespace(step=lambda: None)
        self.engine = self

    def batches(self) -> Any:
        return iter(range(100))

    def train_step(self, batch: int, **rates: float) -> Any:
        self.calls.append({"batch": batch, **rates})
        self.stages.forward_backward(batch)
        self.optimizer.step()
        return SimpleNamespace(num_rows=3)


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock take a second."""
    clock = itertools.count(0.0).__next__
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=clock))


@pytest.mark.usefixtures("_clock", "lone_rank")
def test_warm_up_and_parts_of_steps_are_not_counted_in_the_speed() -> None:
    trial: Any = Trial()
    stages, step = trial.stages.forward_backward, trial.optimizer.step
    measured = measure(trial, SOLE, device=CPU, steps=8, warmup_steps=3)
    assert [call["batch"] for call in trial.calls] == [*range(3 + 8 + 2)]
    assert trial.calls[0] == {"batch": 0, "learning_rate": 0.5, "weight_decay": 0.0}
    # 8 steps of a second, and a last look at the clock.
    assert measured["tokens_per_second"] == 8 * 32 / 9
    assert (measured["steps"], measured["tokens_per_step"]) == (8, 32)
    assert measured["rows_per_sample"] == 3 / 4
    assert measured["step_seconds"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    # In 2 steps: 1 s for each part of a step, 10 looks at the clock for all.
    parts = {"forward_backward": 1.0, "optimizer": 1.0, "rest": 2.5}
    assert measured["split_seconds"] == parts
    assert measured["peak_memory_bytes"] > 1e6
    assert (trial.stages.forward_backward, trial.optimizer.step) == (stages, step)


@pytest.mark.usefixtures("_clock", "lone_rank")
def test_the_speed_of_a_rank_is_its_share() -> None:
    trial: Any = Trial()
    measured = measure(trial, Ranks(0, 4, 0, 4), device=CPU, steps=4, warmup_steps=0)
    assert measured["tokens_per_second_per_rank"] == measured["tokens_per_second"] / 4


def test_a_quarter_of_the_steps_is_timed_in_parts() -> None:
    assert [speed.num_timed_steps(steps) for steps in (1, 4, 7, 8)] == [1, 1, 1, 2]


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize(
    ("stated", "device", "peak", "source"),
    [
        (8.0, "NVIDIA H100", 8.0, "stated"),
        (None, "NVIDIA H100", 989.4, "data sheet"),
        (None, "cpu", 0.5, "matrix product"),
    ],
)
def test_the_peak_is_stated_or_known_or_measured(
    monkeypatch: pytest.MonkeyPatch, stated: float | None, device: str, peak: float, source: str
) -> None:
    monkeypatch.setattr(speed, "model_flops_per_token", lambda _: 2 * 10**9)
    monkeypatch.setattr(speed, "precision_of", lambda _: "bf16")
    monkeypatch.setattr(speed, "device_name", lambda _: device)
    monkeypatch.setattr(speed, "gemm_tflops", lambda *_: 0.5)
    run = SimpleNamespace()
    measured = {"tokens_per_second_per_rank": 2000.0, "rows_per_sample": 0.5}
    found = utilization(measured, run, ranks=SOLE, device=CPU, peak_tflops=stated)  # type: ignore[arg-type]
    assert (found["peak_tflops"], found["peak_source"]) == (peak, source)
    assert found["model_tflops_per_rank"] == 2.0
    assert found["mfu"] == 2.0 / peak


def test_peaks_are_known_by_device_name() -> None:
    assert known_peak("NVIDIA H100 80GB HBM3", "bf16") == 989.4
    assert known_peak("NVIDIA H100 PCIe", "bf16") == 756.0
    assert known_peak("NVIDIA A100-SXM4-40GB", "fp16") == 312.0
    assert known_peak("Intel(R) Data Center GPU Max 1550", "bf16") == 419.4
    assert known_peak("NVIDIA H100 80GB HBM3", "fp32") == 66.9
    assert known_peak("cpu", "bf16") is None


def test_a_matrix_product_measures_the_peak() -> None:
    assert 0 < gemm_tflops(torch.float32, CPU) < 100


def test_the_report_has_a_line_for_each_subject() -> None:
    lines = report(
        {
            "tokens_per_second": 4000.4,
            "tokens_per_second_per_rank": 1000.1,
            "model_tflops_per_rank": 2.0,
            "peak_tflops": 8.0,
            "peak_source": "stated",
            "mfu": 0.25,
            "step_seconds": {"median": 1.0, "p10": 0.5, "p90": 2.0},
            "split_seconds": {"forward_backward": 3.0, "optimizer": 0.5, "rest": 0.5},
            "peak_memory_bytes": 2.5e9,
        }
    )
    assert lines.splitlines() == [
        "speed     4,000 tokens/s, 1,000 a rank",
        "compute   2.000 TFLOP/s a rank, 25.0% of 8.000 (stated)",
        "step      1.0000 s (median), 0.5000 to 2.0000 (10 % to 90 %)",
        "split     forward and backward 75.0%, optimizer 12.5%, rest 12.5%",
        "peak      2.50 GB of memory",
    ]
