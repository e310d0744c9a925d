"""Checkpoints of the DeepSpeed back end: its own, native ones, at this layout and at others."""

from pathlib import Path

import pytest
import torch

from tests.support.deepspeed_runs import BF16, Move, move_all, zero
from tests.support.engines import assert_equal, whole
from tests.support.layouts import Found, parallel
from tests.support.proofs import make_start
from tests.support.ranks import spawn
from tokamake.checkpoint.native import training_state

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
def test_checkpoints_move_between_back_ends_and_layouts(start: str, tmp_path: Path) -> None:
    config = make_start(tmp_path / start, start)
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
        _, weights, step = training_state.read(tmp_path / str(number))
        assert step == 3
        for name, weight in weights.items():
            assert torch.equal(weight, states[f"model.{name}"])


def joined(founds: list[Found], key: str) -> dict[str, torch.Tensor]:
    """States of all ranks, put together."""
    return whole(found[key] for found in founds)
