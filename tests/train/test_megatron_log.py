"""Lines and tags of Megatron-LM."""

import math
from datetime import datetime

import pytest

from tests.support.megatron_logs import megatron_lines
from tokamake.train.megatron_log import IntervalMeans, scalars, training_line, validation_lines
from tokamake.train.metrics import Record

NOW = datetime(2026, 8, 9, 1, 2, 3, 45)
RECORD: Record = {
    "step": 120,
    "consumed_samples": 30720,
    "batch_size": 256,
    "loss": 2.5,
    "learning_rate": 9.1e-5,
    "grad_norm": 0.8123,
    "loss_scale": 65536.0,
    "tokens_per_second": 10240.4,
    "model_flops_per_second": 8e14,
    "step_seconds": 1.2345,
}


def line_of(record: Record, interval: IntervalMeans) -> str:
    return training_line(record, interval, train_steps=500000, num_devices=4, now=NOW)


def test_a_training_line_is_megatrons() -> None:
    assert line_of(RECORD, IntervalMeans(2.4375, 1, 2)) == (
        " [2026-08-09 01:02:03.000045] iteration      120/  500000 | consumed samples:        30720"
        " | elapsed time per iteration (ms): 1234.5 | learning rate: 9.100000E-05"
        " | global batch size:   256 | lm loss: 2.437500E+00 | loss scale: 65536.0"
        " | grad norm: 0.812 | number of skipped iterations:   1"
        " | number of nan iterations:   2 | throughput per GPU (TFLOP/s/GPU): 200.0 |"
    )


def test_what_is_not_known_is_left_out() -> None:
    record = {name: RECORD[name] for name in RECORD if name not in ("grad_norm", "loss_scale")}
    (line,) = megatron_lines(line_of(record, IntervalMeans(math.nan, 3, 0)))
    assert not {"lm loss", "grad norm"} & line.keys()
    assert (line["loss scale"], line["number of skipped iterations"]) == (1.0, 3)


def test_validation_lines_are_megatrons() -> None:
    line = " validation-hard loss at iteration 7 | lm loss value: 2.000000E+00 | "
    line += "lm loss PPL: 7.389056E+00 | "
    rule = "-" * (len(line) + 1)
    assert validation_lines(7, {"hard": 2.0}) == [rule, line, rule]
    assert megatron_lines("\n".join(validation_lines(7, {"valid": 2.0}))) == [
        {"split": "", "iteration": 7, "lm loss value": 2.0, "lm loss PPL": 7.389056}
    ]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"step": 2, "consumed_samples": 16, "loss": 2.0, "step_seconds": 0.5},
            {
                ("lm loss", 2): 2.0,
                ("lm loss vs samples", 16): 2.0,
                ("loss-scale", 2): 1.0,
                ("loss-scale vs samples", 16): 1.0,
                ("iteration-time", 2): 0.5,
            },
        ),
        (
            {
                "step": 3,
                "consumed_samples": 24,
                "validation_loss": 1.0,
                "mtp_loss/1": 1.5,
                "grad_norm/others": 2.0,
            },
            {
                ("lm loss validation", 3): 1.0,
                ("lm loss validation vs samples", 24): 1.0,
                ("mtp_1 loss", 3): 1.5,
                ("mtp_1 loss vs samples", 24): 1.5,
                ("grad-norm/others", 3): 2.0,
                ("grad-norm/others vs samples", 24): 2.0,
            },
        ),
        (
            {"step": 3, "validation_loss": 1.0, "validation_loss/hard": 2.0},
            {("lm loss validation", 3): 1.0, ("lm loss validation-hard", 3): 2.0},
        ),
    ],
)
def test_scalars_have_the_steps_of_iterations_and_of_samples(
    record: Record, expected: dict[tuple[str, int], float]
) -> None:
    assert scalars(record) == expected
