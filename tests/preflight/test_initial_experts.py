"""Upcycling: a mixture of experts that starts from a dense model has its logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support import hf_folder
from tests.support.dense import dense
from tests.support.engines import build, parts, whole
from tests.support.layouts import laid_out, parallel
from tests.support.objective_training import template
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.initial_checkpoint import check_start, initial_architecture
from tokamake.preflight.other_family import start_note

DENSE = dense("qwen3", intermediate_size=96)
LLAMA = dense("llama", intermediate_size=96, head_dim=None, num_key_value_heads=6)
RENORMALIZED: dict[str, Any] = {"norm_topk_prob": True}
SLICES = dense(
    "qwen3_moe", moe_intermediate_size=32, num_experts=6, num_experts_per_tok=3, **RENORMALIZED
)
"""Two copies of three slices, and a token uses one copy."""
COPIES = dense("qwen3_moe", moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2)
COPIES = COPIES.model_copy(update=RENORMALIZED)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": parallel(tp=2),
    "expert": parallel(ep=2),
    "zero 3": {"zero_stage": 3},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that starts from a dense model."""
    root = tmp_path_factory.mktemp("dense")
    hf_folder.write(root / "hf", DENSE, weights_of_dense())
    convert(source=root / "hf", target=root / "native", format="native")
    return template(root).model_copy(update={"checkpoint": root / "native"})


def weights_of_dense() -> dict[str, torch.Tensor]:
    return {
        name: 5 * each if each.dim() > 1 else each
        for name, each in random_tensors(DENSE, 5).items()
    }


def first_weights(runs: list[Run]) -> list[Any]:
    """Chunks of this rank's weights before the first step of each run."""
    return [[part for pair in _fragments(build(run)) for part in parts(*pair)] for run in runs]


def _fragments(engine: Any) -> list[Any]:
    if hasattr(engine, "_fragments"):
        return [(each, each.flat) for each in engine._fragments]
    return [(each, each.local) for each in engine._chunks]


@pytest.mark.ranks
def test_the_first_logits_are_those_of_the_dense_model(run: Run) -> None:
    cases = [
        (shape, changes)
        for shape, names in ((SLICES, [*LAYOUTS]), (COPIES, ["zero 3"]))
        for changes in (LAYOUTS[name] for name in names)
    ]
    runs = [
        laid_out(run, changes).model_copy(update={"architecture": shape})
        for shape, changes in cases
    ]
    tokens = torch.arange(120).view(3, 40)
    with torch.no_grad():
        expected = to_model(DENSE, weights_of_dense())(tokens)
        for (shape, _), *of_ranks in zip(cases, *spawn(first_weights, 2, runs), strict=True):
            weights = whole(of_ranks)
            logits = to_model(shape, weights)(tokens)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            routers = weights["model.layers.1.mlp.gate.weight"]
            assert len(routers.unique(dim=0)) == (2 if shape == SLICES else 4)


def stated(folder: Path, shape: Architecture, **changes: Any) -> Path:
    """File of an architecture."""
    values = {key: value for key, value in shape.model_dump().items() if value is not None}
    (folder / "shape.yaml").write_text(yaml.safe_dump(values | changes))
    return folder / "shape.yaml"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 72}, "hidden_size: checkpoint 60, config 72"),
        ({"rope_theta": 1.0}, "rope_theta: checkpoint 5000.0, config 1.0"),
        ({"vocab_size": 99}, "vocab_size: checkpoint 131, config 99"),
        ({"moe_intermediate_size": 36}, "moe_intermediate_size: 36: .* is not a multiple"),
        ({"num_experts": 8}, "num_experts: 8: experts are 3 slices .* give a multiple of 3"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok: 4: .* give a multiple of 3"),
        ({"norm_topk_prob": False}, "norm_topk_prob: false: .* set it to true"),
    ],
)
def test_experts_that_would_not_equal_the_mlp_are_one_error(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = stated(tmp_path, SLICES, **changes)
    with pytest.raises(UserError, match=text) as error:
        initial_architecture(DENSE, path, source="start")
    assert "\n" not in str(error.value)


def test_the_vocabulary_is_the_checkpoints(tmp_path: Path) -> None:
    path = stated(tmp_path, SLICES, vocab_size=None, initializer_range=0.01)
    found = initial_architecture(DENSE, path, source="start")
    assert found == SLICES.model_copy(update={"initializer_range": 0.01})


def test_a_mixtral_starts_from_a_llama_without_biases(tmp_path: Path) -> None:
    values = {"head_dim": None, "num_key_value_heads": 6, "num_experts": 4}
    mixtral = dense("mixtral", intermediate_size=96, num_experts_per_tok=2, **values)
    path = stated(tmp_path, mixtral)
    assert initial_architecture(LLAMA, path, source="start") == mixtral
    assert start_note(LLAMA, mixtral, source="start") == (
        "start: its llama starts the experts: each layer has 4 copies of the MLP, and a new router"
    )
    biased = LLAMA.model_copy(update={"attention_bias": True})
    with pytest.raises(UserError, match="attention_bias: checkpoint True, config False"):
        initial_architecture(biased, path, source="start")
    with pytest.raises(UserError, match="or a llama or mistral for its experts"):
        initial_architecture(DENSE, path, source="start")


def test_experts_do_not_continue_a_training(run: Run) -> None:
    assert run.checkpoint is not None
    lengths = {"train_steps": 6, "sequence_length": 16, "global_batch_size": 8}
    settings = TrainSettings.model_validate({"finetune": False, "micro_batch_size": 2, **lengths})
    with pytest.raises(UserError, match="a qwen3 gives a qwen3_moe its weights alone"):
        check_start(open_any(run.checkpoint), settings, architecture=SLICES)
