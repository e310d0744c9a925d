"""docs/reference/parallelism.md lists the layouts that tests prove and that checks refuse."""

import pytest

from tests.support.layout_pairs import KINDS, kinds_of, pairs, proved_pairs, refusal
from tests.support.layout_table import COMMAND, DOCUMENT, all_proved, document
from tests.support.layouts import parallel
from tests.support.proofs import Changes


def test_the_tables_are_current() -> None:
    text = document(all_proved())
    assert text == DOCUMENT.read_text(encoding="utf-8"), f"rewrite it: {COMMAND}"


@pytest.mark.parametrize("name", KINDS)
def test_the_changes_of_a_kind_give_that_kind(name: str) -> None:
    changes = KINDS[name].changes
    sizes = changes.get("parallel", {})
    ranks = 4
    for key in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        ranks *= sizes.get(key, 1)
    assert name in kinds_of(ranks, {"micro_batch_size": 1, **changes})


@pytest.mark.parametrize(
    ("world_size", "changes", "kinds"),
    [
        (1, {"micro_batch_size": 8}, set()),
        (1, {}, {"accumulation"}),
        (4, {"zero_stage": 3}, {"data-parallel ranks", "ZeRO 3"}),
        (2, {"zero_stage": 2} | parallel(tp=2), {"tensor", "accumulation"}),
        (2, parallel(cp=2), {"ZeRO 1", "context, ring", "accumulation"}),
        (
            4,
            {"rampup_batch_size": (4, 4, 20)} | parallel(tp=2, sp=True),
            {"data-parallel ranks", "ZeRO 1", "tensor", "sequence", "accumulation"},
        ),
    ],
)
def test_a_layout_has_only_kinds_with_an_effect(
    world_size: int, changes: Changes, kinds: set[str]
) -> None:
    assert kinds_of(world_size, changes) == kinds


def test_pairs_come_from_one_layout() -> None:
    layouts = [("untied", parallel(tp=2)), ("untied", parallel(pp=2))]
    proved = proved_pairs({2: layouts})
    assert {("tensor", "tensor"), ("accumulation", "tensor")} <= proved
    assert not {("tensor", "pipeline, 1f1b"), ("pipeline, 1f1b", "tensor")} & proved


def test_refusals_name_the_reason() -> None:
    assert "gradients would be wrong" in refusal("native", "ZeRO 3", "pipeline, zbv")
    assert "shards nothing" in refusal("native", "HSDP", "ZeRO 0")
    assert not refusal("deepspeed", "ZeRO 1", "pipeline, zbv")
    assert "after each backward pass" in refusal("deepspeed", "pipeline, gpipe", "ZeRO 2")


def test_a_pair_cannot_be_both_proved_and_refused() -> None:
    changes: Changes = {"zero_stage": 2, "backend": "deepspeed"} | parallel(pp=2)
    with pytest.raises(AssertionError, match="proved, but refused"):
        pairs("deepspeed", {4: [("untied", changes)]})
