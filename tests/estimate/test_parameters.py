"""Numbers of parameters from shapes equal the numbers in the modules that train."""

import math
from itertools import product
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tokamake.checkpoint.model_tensors import shapes
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.config.resolved_run import ResolvedTrainSettings, Run
from tokamake.errors import UserError
from tokamake.estimate.parameters import has_gated_mlp, num_parameters, stage_sizes
from tokamake.preflight.model import check_layout
from tokamake.train import memory

MODELS = {
    "tiny-gpt": "causal",
    "tiny-llama": "causal",
    "tiny-qwen3": "causal",
    "bert-base": "masked",
    "t5-v1.1-small": "span_corruption",
    "tiny-biencoder": "ict",
    "tiny-retro": "retro",
}
"""Architecture in config/models → its objective."""


EXPERTS = Architecture(
    family="mixtral",
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
)


def planned(
    architecture: Architecture, objective: str, *, tensor: int, pipeline: int, **parallel: int
) -> Run:
    train = {
        "train_steps": 1,
        "objective": objective,
        "masking": {"decoder_sequence_length": 64} if objective == "span_corruption" else {},
        "sequence_length": 128,
        "global_batch_size": 64,
        "micro_batch_size": 1,
        "precision": "bf16",
        "parallel": {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": pipeline,
            **parallel,
        },
    }
    run = {"run": "x", "seed": 1, "architecture": architecture}
    here = dict.fromkeys(("index", "data_root", "output"), Path())
    return Run(**run, **here, train=ResolvedTrainSettings.model_validate(train))


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_the_same_as_with_modules(name: str) -> None:
    architecture = read_architecture(ROOT / f"config/models/{name}.yaml")
    if architecture.vocab_size is None:
        architecture = architecture.model_copy(update={"vocab_size": 8192})
    compared = 0
    for tensor, pipeline in product((1, 2, 4), (1, 2, 4)):
        run = planned(architecture, MODELS[name], tensor=tensor, pipeline=pipeline)
        try:
            check_layout(run.train, architecture)
        except UserError:  # not a layout of this family
            continue
        world_size = 2 * tensor * pipeline
        by_shapes = memory.estimate(run, world_size, "cuda", stages=stage_sizes)
        assert by_shapes.total == pytest.approx(
            memory.estimate(run, world_size, "cuda").total, rel=0.002
        )
        compared += 1
    assert compared


@pytest.mark.parametrize("expert", [1, 2, 8])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_memory_of_divided_experts_is_the_same_as_with_modules(expert: int, zero: int) -> None:
    run = planned(EXPERTS, "causal", tensor=2, pipeline=1, expert_parallel_size=expert)
    run = run.model_copy(update={"train": run.train.model_copy(update={"zero_stage": zero})})
    by_shapes = memory.estimate(run, 32, "cuda", stages=stage_sizes)
    built = memory.estimate(run, 32, "cuda")
    for field in built._fields:
        assert getattr(by_shapes, field) == pytest.approx(getattr(built, field), rel=1e-6)
    # 16 ranks share each number once, whether as shards or as owners of experts.
    sizes = shapes(EXPERTS)
    experts = sum(math.prod(size) for name, size in sizes.items() if ".experts." in name)
    rest = num_parameters(EXPERTS) - experts
    norms = sum(math.prod(size) for name, size in sizes.items() if not is_divided(name))
    own = (rest - norms) / 2 + norms
    shards = 16 if zero else 1
    expected = 8 * (own / shards + experts / 2 / max(shards, expert))
    assert by_shapes.optimizer == pytest.approx(expected, rel=1e-6)


def is_divided(name: str) -> bool:
    """Whether tensor-parallel ranks divide a tensor."""
    return name.endswith("_proj.weight") or "embed_tokens" in name or "lm_head" in name


def test_models_have_the_published_sizes() -> None:
    sizes = {
        "gpt3-7.5b": 7.5e9,
        "gpt3-145.6b": 145.6e9,
        "llama2-7b": 6.74e9,
        "llama3-8b": 8.03e9,
        "qwen3-32b": 32.8e9,
    }
    for name, size in sizes.items():
        architecture = read_architecture(ROOT / f"config/models/{name}.yaml")
        assert num_parameters(architecture) == pytest.approx(size, rel=0.01)
        assert has_gated_mlp(architecture) == (not name.startswith("gpt3"))
