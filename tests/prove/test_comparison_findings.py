"""Silently wrong gradients that other trainers had: the same combinations train right here.

docs/explanation/silent-errors.md has a row for each, with the thread and its symptom.
"""

import ast
import re
import warnings

import pytest

from tests.support.composition_axes import Values
from tests.support.compositions import Composition
from tests.support.paths import ROOT
from tests.support.proved_compositions import assert_proved, prove_all
from tests.support.ranks import spawn
from tests.support.wrong_factors import FAULTS

PAGE = ROOT / "docs/explanation/silent-errors.md"
HERE = "tests/prove/test_comparison_findings.py::test_findings_of_other_trainers"


def composition(values: Values, family: str = "llama", objective: str = "causal") -> Composition:
    return Composition(family, objective, values, 11)


DATA = {"data_parallel_size": 2}
TENSOR = {"parallel.tensor_parallel_size": 2}
SEQUENCE = TENSOR | {"parallel.sequence_parallel": True}
CONTEXT = {"parallel.context_parallel_size": 2}
PIPELINE = {"parallel.pipeline_parallel_size": 2}
TIED = {"architecture.tie_word_embeddings": True}
UNEQUAL = {"eod_mask_loss": True, "reset_attention_mask": True}
"""Rows, micro batches and ranks have unequal numbers of labels."""
MTP = {"architecture.num_nextn_predict_layers": 2}

FINDINGS: dict[str, list[Composition]] = {
    "labels_differ_by_rank": [
        composition(UNEQUAL | {"data_parallel_size": 4}),
        composition(UNEQUAL | DATA | TENSOR),
    ],
    "labels_differ_by_micro_batch": [
        composition(UNEQUAL | DATA | {"num_micro_batches": 4, "micro_batch_size": 1})
    ],
    "labels_of_further_tokens_differ": [
        composition(UNEQUAL | MTP | each, "deepseek_v3")
        for each in (
            {"data_parallel_size": 4},
            CONTEXT | TENSOR,
            PIPELINE | {"num_micro_batches": 4},
        )
    ],
    "recomputed_further_tokens": [
        composition(SEQUENCE | DATA | MTP | {"recompute_granularity": "full"}, "deepseek_v3")
    ],
    "masks_of_routers": [
        composition(UNEQUAL | layout, "qwen3_moe")
        for layout in (SEQUENCE | DATA, SEQUENCE | PIPELINE, SEQUENCE | CONTEXT)
    ],
    "pipeline_with_unequal_labels": [composition(UNEQUAL | PIPELINE | {"num_micro_batches": 4})],
    "pipeline_with_accumulation": [
        composition(PIPELINE | DATA | {"num_micro_batches": 4, "zero_stage": 2})
    ],
    "norm_over_pipeline_stages": [
        composition(PIPELINE | {"gradient_clipping": 0.05, "optimizer.name": "sgd"}),
        composition(PIPELINE | TENSOR | TIED | {"optimizer.name": "sgd"}, "gpt"),
    ],
    "tied_embeddings_of_sharded_states": [
        composition(PIPELINE | DATA | TIED | {"zero_stage": stage}) for stage in (1, 2)
    ],
    "context_parallel_labels": [
        composition(UNEQUAL | CONTEXT),
        composition(UNEQUAL | CONTEXT | DATA | {"num_micro_batches": 1}),
    ],
    "context_parallel_attention": [
        composition(CONTEXT | {"parallel.context_parallel_method": method})
        for method in ("ring", "ulysses")
    ],
    "norms_in_sequence_parallel": [composition(SEQUENCE), composition(SEQUENCE, "gpt")],
    "cross_attention_in_sequence_parallel": [
        composition(SEQUENCE | DATA, "t5", "span_corruption"),
        composition(SEQUENCE | DATA, "retro", "retro"),
    ],
    "norms_of_heads_without_sequence_parallel": [
        composition(TENSOR, "qwen3"),
        composition(TENSOR | {"architecture.num_key_value_heads": 1}, "qwen3"),
    ],
    "divided_parameters_in_the_norm": [
        composition(TENSOR | {"optimizer.name": "sgd"}, family) for family in ("gpt", "gpt_oss")
    ],
    "replicated_parameters_in_the_norm": [
        composition(TENSOR | {"architecture.num_key_value_heads": 1, "optimizer.name": "sgd"}),
    ],
    "heads_of_samples": [
        composition(DATA | TENSOR, "bert", "masked"),
        composition(DATA | TENSOR, "bert", "cola"),
    ],
}


@pytest.mark.ranks
def test_selective_recomputation_is_right_after_another_run_with_zero_3() -> None:
    """In the same process: DeepSpeed replaces torch's linear layer for all that follow."""
    deepspeed = DATA | {"backend": "deepspeed"}
    recompute = {"recompute_granularity": "selective", "optimizer.name": "lion"}
    assert_proved(
        composition(values, "gpt_neox")
        for values in (deepspeed | {"zero_stage": 3}, deepspeed | recompute, DATA | recompute)
    )


@pytest.mark.ranks
def test_no_layer_returns_a_view() -> None:
    """An operation in place on the view would lose gradients: FSDP2 warns of it."""
    spawn(prove_without_views, 4)


def prove_without_views() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view tensor")
        assert prove_all([composition(DATA | TENSOR, "retro", "retro")]) == [[]]


@pytest.mark.ranks
@pytest.mark.grid
@pytest.mark.parametrize("name", FINDINGS)
def test_findings_of_other_trainers(name: str) -> None:
    assert_proved(FINDINGS[name])


PLANTED = "tests/prove/test_comparison.py::test_wrong_factors_are_found"


def test_the_page_names_each_test() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"{len(FAULTS)} wrong factors, planted one by one" in page
    named = re.findall(r"`(tests/\S+)`", page)
    assert {*named} >= {f"{HERE}[{name}]" for name in FINDINGS}
    for each in named:
        test, _, case = each.partition("[")
        path, _, function = test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        assert not case or (test == HERE and case.removesuffix("]") in FINDINGS), each
    faults = re.findall(rf"`{PLANTED}` \((`[^)]+`)\)", page)
    assert faults
    assert {name.strip("`") for each in faults for name in each.split(", ")} <= {*FAULTS}
