"""Miniatures keep what divides a step among ranks, and fit the ranks of a machine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.composition_axes import SHAPE
from tests.support.layouts import parallel
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.preflight.run import check_run
from tokamake.prove.miniature import miniature, num_ranks, shortened, with_pipeline_alone

TRAIN = {"train_steps": 8, "sequence_length": 2048, "global_batch_size": 1536}


def large(model: str, **train: Any) -> Run:
    architecture = read_architecture(Path("config/models", f"{model}.yaml"))
    return Run(
        run="large",
        seed=1,
        index=Path("none"),
        data_root=Path("none"),
        output=Path("none"),
        eod=0,
        architecture=architecture,
        train={**TRAIN, **train},  # type: ignore[arg-type]  # validated
    )


@pytest.mark.parametrize(
    ("run", "world_size"),
    [
        (large("gpt3-175b", **parallel(tp=8, pp=4, sp=True), precision="bf16"), 64),
        (large("llama2-70b", **parallel(tp=8, cp=2, method="ulysses")), 32),
        (large("llama2-70b", **parallel(cp=4), zero_stage=3), 8),
        (large("llama3-8b", **parallel(pp=4, schedule="zbv", vpp=2)), 8),
        (large("llama3-8b", **parallel(replicas=4)), 4),
        (large("llama2-7b", **parallel(pp=2, layers=(15, 17))), 4),
        (large("qwen3-0.6b", **parallel(tp=2), micro_batch_size=8), 4),
        (large("smollm3-3b", **parallel(pp=2)), 4),
        (large("mistral-7b-v0.1", **parallel(cp=2)), 4),
        (large("qwen3-30b-a3b", **parallel(tp=4, pp=2)), 16),
        (large("qwen3-30b-a3b", **parallel(ep=8)), 16),
        (large("qwen3-30b-a3b", **parallel(ep=4, cp=4, replicas=8)), 16),
        (large("mixtral-8x7b", **parallel(tp=2, cp=2), zero_stage=3), 8),
        (large("bert-base", objective="masked", sequence_length=512), 2),
        (large("t5-220m", objective="span_corruption", sequence_length=512, **parallel(tp=4)), 8),
        (large("biencoder-base", objective="ict", sequence_length=256), 2),
        (large("retro-2b", objective="retro", retro={"embedder": "bert"}, **parallel(tp=4)), 8),
    ],
)
def test_a_miniature_has_the_layout_and_can_start(run: Run, world_size: int) -> None:
    assert num_ranks(run) == world_size
    tiny = miniature(run, world_size, precision="fp32")
    check_run(tiny, index=None, world_size=world_size, device=torch.device("cpu"))
    of_run, of_tiny = run.train.parallel.model_dump(), tiny.train.parallel.model_dump()
    for name in ("data_parallel_replicate_size", "pipeline_layers"):  # fewer replicas and layers
        del of_run[name], of_tiny[name]
    assert of_tiny == of_run
    assert tiny.architecture.family == run.architecture.family
    assert tiny.train.objective == run.train.objective
    assert tiny.architecture.hidden_size < 100
    assert layer_kinds(tiny.architecture) == layer_kinds(run.architecture)
    windows = map(tiny.architecture.window, range(tiny.architecture.num_hidden_layers))
    assert max(filter(None, windows), default=0) < tiny.train.sequence_length
    assert tiny.train.global_batch_size <= 64


def layer_kinds(architecture: Architecture) -> set[tuple[bool, bool]]:
    """Kinds of layers: with rotary positions, and with a window."""
    layers = range(architecture.num_hidden_layers)
    return {(architecture.rotates(n), architecture.window(n) is not None) for n in layers}


def test_batches_grow_as_in_the_run() -> None:
    layout = parallel(pp=4)
    for rampup, sizes in ((None, (8, 8)), ((512, 256, 100_000), (8, 16))):
        run = large("llama3-8b", rampup_batch_size=rampup, micro_batch_size=1, **layout)
        tiny = miniature(run, 8, precision="fp32")
        check_run(tiny, index=None, world_size=8, device=torch.device("cpu"))
        batches = tiny.train.batch_sizes
        assert (batches.at(0), batches.at(batches.samples(1))) == sizes, rampup


def test_a_model_without_kv_groups_keeps_its_kind() -> None:
    for model, tensor in (("llama2-70b", 8), ("starcoder-15b", 4), ("llama2-7b", 4)):
        run = large(model, **parallel(tp=tensor))
        tiny = miniature(run, num_ranks(run), precision="fp32").architecture
        for shape in (run.architecture, tiny):
            groups, heads = shape.num_key_value_heads, shape.num_attention_heads
            kind = (groups == 1, groups == heads, groups < tensor)
            assert kind == (
                model == "starcoder-15b",
                model == "llama2-7b",
                model == "starcoder-15b",
            )


def test_a_long_pipeline_is_shortened_to_the_ranks_of_a_machine() -> None:
    run = large("gpt3-175b", **parallel(tp=8, pp=16))
    assert shortened(run, 256) is run
    assert shortened(run, 64).train.parallel.pipeline_parallel_size == 4
    odd = large("llama3-8b", **parallel(tp=8, pp=3, schedule="interleaved_1f1b", vpp=2))
    assert shortened(odd, 32).train.parallel.pipeline_parallel_size == 2
    experts = shortened(large("qwen3-30b-a3b", **parallel(tp=2, pp=2, ep=16)), 32)
    assert experts.train.parallel.expert_parallel_size == 4
    with pytest.raises(UserError, match="needs 32 ranks, and 16 may run"):
        shortened(run, 16)
    assert SHAPE["vocab_size"] % 2


@pytest.mark.parametrize(
    ("run", "layers", "world_size"),
    [
        (large("llama3-8b", **parallel(tp=2, cp=2, pp=4, sp=True, layers=(7, 9, 9, 7))), 8, 8),
        (large("qwen3-30b-a3b", **parallel(pp=4, ep=4)), 4, 8),
        (large("llama3-8b", **parallel(tp=8, pp=4, schedule="zbv", vpp=2)), 8, 8),
        (large("llama3-8b", **parallel(tp=4, pp=4, replicas=4), zero_stage=1), 4, 16),
        (large("bert-base", objective="masked", sequence_length=512, **parallel(tp=2, pp=4)), 4, 8),
    ],
)
def test_a_pipeline_alone_keeps_its_layers_and_can_start(
    run: Run, layers: int, world_size: int
) -> None:
    alone = with_pipeline_alone(run)
    assert num_ranks(alone) == world_size
    tiny = miniature(alone, world_size, precision="fp32")
    check_run(tiny, index=None, world_size=world_size, device=torch.device("cpu"))
    own, of_run = tiny.train.parallel, run.train.parallel
    assert own.pipeline_parallel_size == 4
    for name in ("pipeline_schedule", "virtual_pipeline_size"):
        assert getattr(own, name) == getattr(of_run, name)
    assert tiny.architecture.num_hidden_layers == layers
