"""Every layout trains as one process does: losses, norms, gradients, weights, against transformers.

docs/reference/parallelism.md lists these layouts; test_layout_table.py checks the list.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.grids import split_layouts
from tests.support.layouts import parallel
from tests.support.proofs import Changes, Proved, check

SCHEDULES: dict[str, Changes] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved_1f1b": {"schedule": "interleaved_1f1b", "vpp": 2},
    "interleaved_zero_bubble": {"schedule": "interleaved_zero_bubble", "vpp": 2},
    "zbv": {"schedule": "zbv", "vpp": 2},
}

FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
WIDE = {"micro_batch_size": 4}
"""Half as many micro batches and messages; most layouts still have two micro batches a step."""


def with_schedules(**sizes: Any) -> list[Changes]:
    return [parallel(**sizes, **options) for options in SCHEDULES.values()]


PROVED: Proved = {
    1: [
        ("untied", {}),
        ("tied", {}),
        ("untied", {"micro_batch_size": 1}),
        ("untied", {"micro_batch_size": 8}),
        ("untied", {"recompute_granularity": "selective"}),
        ("untied", {"recompute_granularity": "full"}),
        ("deep", {"recompute_granularity": "full", "recompute_num_layers": 2}),
        ("untied", {"recompute_granularity": "full", "recompute_method": "block"}),
        ("untied", {"rampup_batch_size": (4, 4, 20)}),
        ("gpt", {}),
    ],
    2: [
        *[("untied", {"zero_stage": stage}) for stage in range(4)],
        ("untied", {"zero_stage": 1} | SELECTIVE),
        ("tied", {"zero_stage": 3} | FULL),
        ("untied", {"zero_stage": 2, "recompute_granularity": "full"}),
        ("untied", {"zero_stage": 1, "rampup_batch_size": (4, 4, 20)}),
        ("untied", parallel(tp=2) | WIDE),
        ("tied", parallel(tp=2) | WIDE),
        ("mqa", parallel(tp=2) | WIDE),
        ("untied", parallel(tp=2, sp=True) | WIDE),
        ("tied", parallel(tp=2, sp=True) | FULL | WIDE),
        ("mqa", parallel(tp=2, sp=True) | WIDE),
        ("untied", parallel(tp=2, sp=True) | SELECTIVE | WIDE),
        ("untied", parallel(cp=2) | WIDE),
        ("untied", parallel(cp=2, method="ulysses") | WIDE),
        ("tied", parallel(cp=2) | FULL | WIDE),
        *[("untied", changes) for changes in with_schedules(pp=2)],
        *[("tied", changes | FULL | WIDE) for changes in with_schedules(pp=2)],
        *[("untied", changes | SELECTIVE | WIDE) for changes in with_schedules(pp=2)[:3]],
        ("tied", parallel(pp=2)),
        ("untied", parallel(pp=2, layers=(1, 3))),
        ("untied", parallel(pp=2) | {"rampup_batch_size": (4, 4, 20)}),
        ("gpt", {"zero_stage": 3} | FULL),
        ("gpt", parallel(tp=2, sp=True) | WIDE),
        ("gpt", parallel(cp=2, method="ulysses") | WIDE),
        ("gpt", parallel(pp=2)),
    ],
    4: [
        *[("untied", {"zero_stage": stage, "micro_batch_size": 1}) for stage in (0, 3)],
        ("untied", parallel(replicas=2) | {"zero_stage": 3}),
        ("untied", parallel(tp=4) | WIDE),
        ("tied", parallel(tp=4, sp=True) | WIDE),
        ("untied", parallel(tp=2, sp=True) | {"zero_stage": 0}),
        ("untied", parallel(tp=2, sp=True) | {"zero_stage": 2} | SELECTIVE | WIDE),
        ("tied", parallel(tp=2, sp=True) | {"zero_stage": 3} | WIDE),
        ("untied", parallel(cp=4) | WIDE),
        ("untied", parallel(cp=2) | {"zero_stage": 3}),
        ("untied", parallel(cp=2) | {"zero_stage": 2} | SELECTIVE | WIDE),
        ("untied", parallel(cp=2, method="ulysses") | {"zero_stage": 0}),
        ("tied", parallel(cp=2, method="ulysses") | {"zero_stage": 3} | FULL | WIDE),
        ("untied", parallel(cp=2, replicas=2) | {"zero_stage": 1} | FULL),
        ("untied", parallel(tp=2, cp=2, sp=True, method="ulysses") | WIDE),
        *[("untied", changes | {"zero_stage": 2}) for changes in with_schedules(pp=2)],
        ("untied", parallel(pp=2) | {"zero_stage": 3}),
        ("untied", parallel(pp=2, schedule="interleaved_1f1b", vpp=2) | {"zero_stage": 3}),
        ("tied", parallel(pp=2, cp=2) | WIDE),
        ("untied", parallel(pp=2, cp=2, schedule="gpipe") | WIDE),
        ("untied", parallel(pp=2, cp=2, schedule="interleaved_zero_bubble", vpp=2) | WIDE),
        ("untied", parallel(pp=2, cp=2, method="ulysses") | WIDE),
        (
            "untied",
            parallel(pp=2, cp=2, method="ulysses", schedule="interleaved_1f1b", vpp=2) | WIDE,
        ),
        ("untied", parallel(pp=2, cp=2, method="ulysses", schedule="zbv", vpp=2) | WIDE),
        ("tied", parallel(pp=4)),
        ("tied", parallel(pp=4) | {"rampup_batch_size": (4, 4, 20)}),
        *[("deep", changes) for changes in with_schedules(pp=4)],
    ],
    8: [
        *[("untied", changes) for changes in with_schedules(pp=2, tp=2, sp=True)],
        ("tied", parallel(pp=2, tp=2, schedule="zbv", vpp=2)),
        ("gpt", parallel(pp=2, tp=2, sp=True)),
        ("untied", parallel(tp=2, cp=2, sp=True) | {"zero_stage": 3} | WIDE),
        ("untied", parallel(pp=2, cp=2, tp=2, sp=True) | WIDE),
        ("tied", parallel(pp=2, cp=2)),
        ("untied", parallel(pp=2, cp=2, method="ulysses", schedule="zbv", vpp=2)),
        ("untied", parallel(tp=2, replicas=2) | {"zero_stage": 3}),
        ("untied", parallel(pp=2, replicas=2) | {"zero_stage": 1, "micro_batch_size": 1}),
        ("untied", parallel(tp=2, cp=2, replicas=2, method="ulysses") | {"zero_stage": 2} | WIDE),
    ],
}
"""Layouts by number of ranks: name of the initial checkpoint, settings."""


@pytest.mark.ranks
@pytest.mark.grid  # `make test` has random compositions of the same settings
@pytest.mark.parametrize(("world_size", "layouts"), split_layouts(PROVED))
def test_layouts_equal_one_process(
    world_size: int, layouts: list[tuple[str, Changes]], runs: dict[str, Path]
) -> None:
    check(world_size, layouts, runs)
