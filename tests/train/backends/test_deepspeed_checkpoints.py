"""Checkpoints move between the DeepSpeed and the native back end, and between layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import native_weights
from tests.support.deepspeed_runs import BF16, Move, move_all, zero
from tests.support.engines import assert_equal, whole
from tests.support.layouts import RankResults, parallel
from tests.support.proofs import make_start
from tests.support.ranks import spawn

Settings = dict[str, Any]
Ways = tuple[Settings, Settings, Settings]

MOVES: list[Ways] = [
    # Layouts of saving on two ranks, loading on one rank, loading on two ranks.
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


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("start", "moves"),
    [
        pytest.param("tied", MOVES, id="tied"),
        # Only stages of a pipeline hold untied embeddings otherwise than tied ones.
        pytest.param("untied", MOVES[3:6], id="untied"),
    ],
)
def test_checkpoints_move_between_back_ends_and_layouts(
    start: str, moves: list[Ways], tmp_path: Path
) -> None:
    config = make_start(tmp_path / start, start)
    same_layout = [
        Move(config, tmp_path / str(n), save=a, load=a) for n, (a, _, _) in enumerate(moves)
    ]
    saved = spawn(move_all, 2, same_layout, timeout=900)
    one_rank = [Move(config, tmp_path / str(n), load=a) for n, (_, a, _) in enumerate(moves)]
    two_ranks = [Move(config, tmp_path / str(n), load=a) for n, (_, _, a) in enumerate(moves)]
    elsewhere = (
        spawn(move_all, 1, one_rank, timeout=900),
        spawn(move_all, 2, two_ranks, timeout=900),
    )
    for number, ways in enumerate(moves):
        originals = [result[number] for result in saved]
        states = joined(originals, "saved")
        assert {key.split(".")[0] for key in states} == {"model", "step", "exp_avg", "exp_avg_sq"}
        # At the same layout, training resumes bit by bit; saving beside training changes nothing.
        assert_equal(joined(originals, "loaded"), states, ways[0])
        assert originals[0]["losses after loading"] == originals[0]["losses after saving"]
        assert_equal(
            joined(originals, "end after loading"), joined(originals, "end after saving"), ways[0]
        )
        for place, of_ranks in enumerate(elsewhere):
            loaded = [result[number] for result in of_ranks]
            assert_equal(joined(loaded, "loaded"), states, ways[1 + place])
            result = loaded[0]["losses after loading"]
            assert result == pytest.approx(originals[0]["losses after saving"], rel=1e-4)
        # Evaluation and export read whole weights.
        _, weights, step = native_weights.read(tmp_path / str(number))
        assert step == 3
        for name, weight in weights.items():
            assert torch.equal(weight, states[f"model.{name}"])


def joined(results: list[RankResults], key: str) -> dict[str, torch.Tensor]:
    """States of all ranks, joined."""
    return whole(result[key] for result in results)
