"""The DeepSpeed back end equals one process at every layout; in bf16 it stays close to fp32.

docs/reference/parallelism.md lists these layouts; test_layout_table.py checks the list.
"""

from pathlib import Path

import pytest

from tests.support.deepspeed_runs import BF16, zero
from tests.support.grids import split_layouts
from tests.support.layouts import Layout, parallel, train_all
from tests.support.proofs import Changes, Proved, check, plain_training
from tests.support.ranks import spawn

FULL = {"recompute_granularity": "full"}
WIDE = {"micro_batch_size": 4}
GROWING = {"rampup_batch_size": (4, 4, 20), "micro_batch_size": 1}

PROVED: Proved = {
    2: [
        *[("untied", zero(stage)) for stage in range(4)],
        *[("untied", zero(stage, **GROWING)) for stage in (0, 2, 3)],
        *[("untied", zero(stage, **FULL)) for stage in (1, 3)],
        ("untied", zero(2, recompute_granularity="selective")),
        ("untied", zero(1) | parallel(tp=2) | WIDE),
        *[("tied", zero(stage) | parallel(tp=2, sp=True) | WIDE) for stage in range(4)],
        ("mqa", zero(2) | parallel(tp=2, sp=True) | WIDE),
        *[("untied", zero(stage) | parallel(cp=2) | WIDE) for stage in (1, 3)],
        *[("untied", zero(stage) | parallel(pp=2)) for stage in (0, 1)],
        ("tied", zero(1) | parallel(pp=2, schedule="gpipe")),
        ("tied", zero(1) | parallel(pp=2)),
        ("tied", zero(1) | parallel(pp=2, schedule="interleaved_1f1b", vpp=2)),
        ("tied", zero(1) | parallel(pp=2, schedule="interleaved_zero_bubble", vpp=2)),
        ("tied", zero(0) | parallel(pp=2, schedule="zbv", vpp=2)),
        *[("untied", zero(stage, offload_optimizer="cpu", **GROWING)) for stage in (1, 2)],
        ("untied", zero(3, offload_optimizer="cpu", offload_param="cpu")),
        ("tied", zero(1, offload_optimizer="cpu") | parallel(pp=2)),
    ],
    4: [
        *[("untied", zero(stage, micro_batch_size=1)) for stage in (1, 3)],
        *[("untied", zero(stage) | parallel(tp=2) | WIDE) for stage in (0, 2)],
        *[("tied", zero(stage) | parallel(tp=2, sp=True) | WIDE) for stage in (1, 3)],
        ("untied", zero(2) | parallel(cp=2, method="ulysses")),
        ("tied", zero(3) | parallel(tp=2, cp=2, sp=True) | WIDE),
        ("untied", zero(3) | parallel(cp=2)),
        *[("tied", zero(stage) | parallel(pp=2)) for stage in (0, 1)],
        ("tied", zero(1) | parallel(pp=2, schedule="gpipe")),
        ("tied", zero(1) | parallel(pp=2, schedule="interleaved_zero_bubble", vpp=2)),
        ("tied", zero(0) | parallel(pp=2, schedule="zbv", vpp=2)),
        ("untied", zero(1) | parallel(pp=2, tp=2, sp=True, schedule="interleaved_1f1b", vpp=2)),
    ],
    8: [
        ("tied", zero(1) | parallel(pp=2, tp=2, sp=True)),
        ("untied", zero(3) | parallel(tp=2, cp=2) | WIDE),
    ],
}
"""Layouts by number of ranks: name of the initial checkpoint, settings."""


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "layouts"), split_layouts(PROVED, most_ranks=2))
def test_layouts_equal_one_process(
    world_size: int, layouts: list[tuple[str, Changes]], runs: dict[str, Path]
) -> None:
    check(world_size, layouts, runs)


OPTIMIZERS = {
    # It keeps separate weights for training and evaluation, which ZeRO partitions, too.
    "schedule_free_adamw": [zero(stage) for stage in range(4)],
    # It needs norms of whole parameters, also under tensor parallelism.
    "lamb": [zero(0), zero(0) | parallel(tp=2)],
}


@pytest.mark.grid
@pytest.mark.ranks
def test_bf16_is_close_to_fp32_and_optimizers_equal_native(runs: dict[str, Path]) -> None:
    changes: list[Changes] = [zero(stage, **BF16) for stage in (1, 2, 3)]
    changes += [zero(1, **BF16) | parallel(pp=2), zero(2, **BF16) | parallel(tp=2, sp=True)]
    changes += [zero(stage, offload_optimizer="cpu", **BF16) for stage in (1, 2, 3)]
    num_bf16 = len(changes)
    native: Changes = {"backend": "native", "zero_stage": 1}
    of_optimizer = {}
    for name, layouts in OPTIMIZERS.items():
        settings = {
            "optimizer": {"name": name, "learning_rate": 0.01},
            "schedule": {"name": "constant"},
        }
        begin = len(changes)
        changes += [layout | settings for layout in (native, *layouts)]
        of_optimizer[name] = range(begin, len(changes))
    results = spawn(
        train_all, 2, [Layout(runs["untied"], layout) for layout in changes], timeout=900
    )[0]
    exact = plain_training(runs["untied"], grows=False)
    for number in range(num_bf16):
        losses = results[number]["losses"]
        assert losses == pytest.approx(exact["losses"], rel=3e-3), changes[number]
        assert results[number]["norms"] == pytest.approx(exact["norms"], rel=5e-2), changes[number]
        assert losses != pytest.approx(exact["losses"], rel=1e-6)
    for numbers in of_optimizer.values():
        reference = results[numbers[0]]
        for number in numbers[1:]:
            for key in ("losses", "norms", "validation", "after"):
                message = f"{key} of {changes[number]}"
                assert results[number][key] == pytest.approx(reference[key], rel=1e-5), message
