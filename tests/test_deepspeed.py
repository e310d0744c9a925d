"""The DeepSpeed back end: equal to one process at any layout, its checkpoints to native ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeeds import Move, move_all, train_all, whole
from hypothesis import given
from hypothesis import strategies as st
from layouts import Found, Layout, laid_out, parallel
from ranks import spawn
from runs import ARCHITECTURE, make_run, prepare
from test_layouts import SHAPE, STARTS, plain_training

from tokamake.checkpoint import latest, megatron_deepspeed, tensors
from tokamake.checkpoint.fragments import boxes
from tokamake.config import read_run
from tokamake.errors import UserError
from tokamake.train.backends import _deepspeed_setup as setup

Changes = dict[str, Any]


def zero(stage: int, **more: Any) -> Changes:
    """Changes of the section `train`: ZeRO's stage, and others."""
    return {"backend": "deepspeed", "zero_stage": stage, **more}


FULL = {"recompute_granularity": "full"}
GROWING = {"rampup_batch_size": (4, 4, 20), "micro_batch_size": 1}
BF16 = {"precision": "bf16"}

PROVED: dict[int, list[tuple[str, Changes]]] = {
    2: [
        *[("untied", zero(stage)) for stage in range(4)],
        *[("untied", zero(stage, **GROWING)) for stage in (0, 2, 3)],
        *[("untied", zero(stage, **FULL)) for stage in (1, 3)],
        ("untied", zero(1) | parallel(tp=2)),
        *[("tied", zero(stage) | parallel(tp=2, sp=True)) for stage in range(4)],
        ("mqa", zero(2) | parallel(tp=2, sp=True)),
        *[("untied", zero(stage) | parallel(cp=2)) for stage in (1, 3)],
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
        *[("untied", zero(stage) | parallel(tp=2)) for stage in (0, 2)],
        *[("tied", zero(stage) | parallel(tp=2, sp=True)) for stage in (1, 3)],
        ("untied", zero(2) | parallel(cp=2, method="ulysses")),
        ("tied", zero(3) | parallel(tp=2, cp=2, sp=True)),
        *[("tied", zero(stage) | parallel(pp=2)) for stage in (0, 1)],
        ("untied", zero(1) | parallel(pp=2, tp=2, sp=True, schedule="interleaved_1f1b", vpp=2)),
    ],
}
"""Layouts by number of ranks: which start, and which settings."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run.yaml for each start."""
    found = {}
    for name, changes in STARTS.items():
        root = prepare(tmp_path_factory.mktemp(name), train_samples=200)
        architecture = ARCHITECTURE.model_copy(update=SHAPE | changes)
        (root / "start").rename(root / "other")
        weights = tensors.random(architecture, 5)
        megatron_deepspeed.write(root / "start", architecture, weights)
        found[name] = make_run(root, "run", train_steps=24)
    return found


@pytest.fixture(scope="module")
def expected(runs: dict[str, Path]) -> dict[tuple[str, bool], Found]:
    """What transformers and torch make of each start, with full batches and with growing ones."""
    return {
        (name, grows): plain_training(config, grows=grows)
        for name, config in runs.items()
        for grows in (False, True)
        if not grows or name == "untied"
    }


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", PROVED)
def test_layouts_equal_one_process(
    world_size: int, runs: dict[str, Path], expected: dict[tuple[str, bool], Found]
) -> None:
    layouts = [Layout(runs[start], changes) for start, changes in PROVED[world_size]]
    of_ranks = spawn(train_all, world_size, layouts, timeout=900)
    problems = []
    for number, (start, changes) in enumerate(PROVED[world_size]):
        founds = [found[number] for found in of_ranks]
        if problem := difference(founds, expected[start, "rampup_batch_size" in changes]):
            problems.append(f"{start} {changes}: {problem}")
    assert not problems, "\n".join(problems)


def difference(founds: list[Found], theirs: Found) -> str:
    """What differs between the ranks' training and the expected; empty: nothing does."""
    for key in ("losses", "norms", "validation"):
        for found in founds:
            if not np.allclose(found[key], theirs[key], rtol=1e-5, atol=0):
                return f"{key} {found[key]}, expected {theirs[key]}"
    for key, most in (("gradients", 1e-5), ("weights", 1e-4)):
        try:
            ours = whole(founds, key, theirs["shapes"])
        except AssertionError as error:
            return f"{key}: {error}"
        for name, tensor in theirs[key].items():
            largest = (ours[name] - tensor).abs().max() / tensor.abs().max()
            if not largest <= most:
                return f"{key}: {name} differs by {largest:.1e} of its largest"
    return ""


OPTIMIZERS = {
    # Weights kept apart for training and evaluation, even where ZeRO cuts them.
    "schedule_free_adamw": [zero(stage) for stage in range(4)],
    # Whole parameters, with what tensor parallelism cuts put together.
    "lamb": [zero(0), zero(0) | parallel(tp=2)],
}


@pytest.mark.ranks
def test_precisions_and_optimizers_equal_native(
    runs: dict[str, Path], expected: dict[tuple[str, bool], Found]
) -> None:
    changes: list[Changes] = [zero(stage, **BF16) for stage in (1, 2, 3)]
    changes += [zero(1, **BF16) | parallel(pp=2), zero(2, **BF16) | parallel(tp=2, sp=True)]
    changes += [zero(stage, offload_optimizer="cpu", **BF16) for stage in (1, 2, 3)]
    num_bf16 = len(changes)
    native: Changes = {"backend": "native", "zero_stage": 1}
    of_optimizer = {}
    for name, layouts in OPTIMIZERS.items():
        more = {
            "optimizer": {"name": name, "learning_rate": 0.01},
            "schedule": {"name": "constant"},
        }
        begin = len(changes)
        changes += [one | more for one in (native, *layouts)]
        of_optimizer[name] = range(begin, len(changes))
    found = spawn(train_all, 2, [Layout(runs["untied"], one) for one in changes], timeout=900)[0]
    exact = expected["untied", False]
    for number in range(num_bf16):
        losses = found[number]["losses"]
        assert losses == pytest.approx(exact["losses"], rel=3e-3), changes[number]
        assert found[number]["norms"] == pytest.approx(exact["norms"], rel=5e-2), changes[number]
        assert losses != pytest.approx(exact["losses"], rel=1e-6)
    for numbers in of_optimizer.values():
        theirs = found[numbers[0]]
        for number in numbers[1:]:
            for key in ("losses", "norms", "validation", "after"):
                message = f"{key} of {changes[number]}"
                assert found[number][key] == pytest.approx(theirs[key], rel=1e-5), message


MOVES = [
    # Saved on two ranks; loaded on one, and on two again.
    (zero(1), {"backend": "native"}, parallel(tp=2) | {"backend": "native"}),
    ({"backend": "native", "zero_stage": 2}, zero(1), zero(3)),
    (zero(2) | parallel(tp=2), {"backend": "native"}, zero(1)),
    (
        zero(3) | parallel(tp=2, sp=True),
        zero(3, offload_optimizer="cpu"),
        zero(1) | parallel(pp=2, schedule="zbv", vpp=2),
    ),
    (zero(1) | parallel(pp=2), {"backend": "native"}, zero(0)),
    (zero(0), zero(2), {"backend": "native"} | parallel(pp=2)),
    (zero(3), {"backend": "native"}, zero(2) | parallel(cp=2)),
    (zero(1, **BF16), {"backend": "native", **BF16}, zero(2, **BF16)),
    (zero(3, **BF16), zero(1, **BF16), zero(1, **BF16) | parallel(tp=2)),
    (zero(2, **BF16), {"backend": "native", **BF16}, zero(3, offload_param="cpu", **BF16)),
]


@pytest.mark.ranks
@pytest.mark.parametrize("start", ["untied", "tied"])
def test_checkpoints_move(start: str, runs: dict[str, Path], tmp_path: Path) -> None:
    config = runs[start]
    there = [Move(config, tmp_path / str(n), save=a, load=a) for n, (a, _, _) in enumerate(MOVES)]
    saved = spawn(move_all, 2, there, timeout=900)
    alone = [Move(config, tmp_path / str(n), load=a) for n, (_, a, _) in enumerate(MOVES)]
    both = [Move(config, tmp_path / str(n), load=a) for n, (_, _, a) in enumerate(MOVES)]
    others = spawn(move_all, 1, alone, timeout=900), spawn(move_all, 2, both, timeout=900)
    for number, ways in enumerate(MOVES):
        ours = [found[number] for found in saved]
        states = joined(ours, "saved")
        assert {key.split(".")[0] for key in states} == {"model", "step", "exp_avg", "exp_avg_sq"}
        # At the same layout, the run goes on bit by bit, training and saving at once or not.
        assert_equal(joined(ours, "loaded"), states, ways[0])
        assert ours[0]["losses after loading"] == ours[0]["losses after saving"]
        assert_equal(joined(ours, "end after loading"), joined(ours, "end after saving"), ways[0])
        for place, of_ranks in enumerate(others):
            theirs = [found[number] for found in of_ranks]
            assert_equal(joined(theirs, "loaded"), states, ways[1 + place])
            found = theirs[0]["losses after loading"]
            assert found == pytest.approx(ours[0]["losses after saving"], rel=1e-4)
        # Evaluation and export read whole weights.
        _, weights, step = latest.native.read(tmp_path / str(number))
        assert step == 3
        for name, weight in weights.items():
            assert torch.equal(weight, states[f"model.{name}"])


def joined(founds: list[Found], key: str) -> dict[str, torch.Tensor]:
    """States of all ranks, put together; what is not cut must be alike."""
    result: dict[str, torch.Tensor] = {}
    for found in founds:
        for name, shape, place, part in found[key]:
            empty = torch.full(shape, torch.nan, dtype=part.dtype)
            before = result.setdefault(name, empty)[place]
            assert torch.equal(before.where(~before.isnan(), part), part), f"{name}: ranks differ"
            result[name][place] = part
    missing = [name for name, tensor in result.items() if tensor.isnan().any()]
    assert not missing, f"no rank has all of {missing}"
    return result


def assert_equal(
    found: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], changes: Changes
) -> None:
    assert found.keys() == theirs.keys(), changes
    for name, tensor in theirs.items():
        assert torch.equal(found[name], tensor), (name, changes)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_hold_a_run_of_elements(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    corner = [data.draw(st.integers(0, 3)) for _ in shape]
    place = [slice(at, at + length) for at, length in zip(corner, shape, strict=True)]
    run = torch.arange(start, stop)
    found = boxes(run, start, place)
    assert len(found) <= 2 * len(shape)
    whole = torch.full([at.stop for at in place], -1)
    for offset, box in found.items():
        region = tuple(slice(at, at + n) for at, n in zip(offset, box.shape, strict=True))
        assert (whole[region] == -1).all()
        whole[region] = box
    part = whole[tuple(place)].flatten()
    assert torch.equal(part[start:stop], run)
    assert (part[:start] == -1).all()
    assert (part[stop:] == -1).all()
    assert (whole >= 0).sum() == stop - start
    # They are views: what a checkpoint fills is what the optimizer has.
    for box in found.values():
        box.fill_(7)
    assert (run == 7).all()


LAMB = {"optimizer": {"name": "lamb", "learning_rate": 0.01}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (zero(2) | parallel(pp=2), "zero_stage: 2: reduces gradients while passes go on"),
        (zero(3) | parallel(pp=2), "zero_stage: 3: reduces gradients while passes go on"),
        (
            zero(1, **BF16) | parallel(pp=2, schedule="zbv", vpp=2),
            "pipeline_schedule: zbv: would add up gradients in bf16",
        ),
        (zero(3, recompute_granularity="selective"), "recompute_granularity: selective"),
        (zero(1) | parallel(replicas=2), "data_parallel_replicate_size: 2"),
        (zero(1) | LAMB, "optimizer.name: lamb: needs whole parameters, of which zero_stage: 1"),
        (zero(0, precision="fp16"), "precision: fp16: has no fp16 on the CPU"),
    ],
)
def test_what_would_be_wrong_is_refused(
    changes: Changes, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = prepare(tmp_path_factory.mktemp("refused"))
    run = read_run(make_run(root, "run"))
    precision = {"precision": changes.pop("precision", "fp32")} if "fp16" in message else {}
    run = laid_out(run, changes)
    run = run.model_copy(update={"train": run.train.model_copy(update=precision)})
    with pytest.raises(UserError, match=rf"^train\.backend: deepspeed: with train\..*{message}"):
        setup.check(run, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (zero(0, offload_optimizer="cpu"), "zero_stage 1 or more"),
        (zero(2, offload_param="cpu"), "zero_stage 3 or more"),
        ({"backend": "native", "zero_stage": 3, "offload_param": "cpu"}, "needs backend deepspeed"),
    ],
)
def test_offloading_needs_something_to_offload(
    changes: Changes, message: str, tmp_path: Path
) -> None:
    run = read_run(make_run(prepare(tmp_path), "run"))
    with pytest.raises(ValueError, match=message):
        laid_out(run, changes)
