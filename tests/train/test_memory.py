"""The estimate of memory against tensors that torch saves and memory that it allocates."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.allocated_memory import peak
from tests.support.layouts import laid_out, parallel
from tests.support.paths import ROOT
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.runs import ARCHITECTURE, make_run, prepare, write_start
from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run, read_run
from tokamake.estimate.parameters import stage_sizes
from tokamake.models.common.costs import saved_mask_bytes
from tokamake.models.common.positions import rotary
from tokamake.parallel import mesh
from tokamake.parallel.document_mask import PackedDocuments
from tokamake.runtime.ranks import Ranks
from tokamake.train.memory import estimate
from tokamake.train.numerics import with_precision
from tokamake.train.pipeline_stages import PipelineStages
from tokamake.train.startup_log import changed_settings, startup_log

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ONE = Ranks(0, 1, 0, 1)
SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
LARGER = Architecture(**SIZES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = read_run(make_run(prepare(tmp_path_factory.mktemp("memory")), "estimated"))
    return with_precision(run, CPU)


FEW_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
}
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**FEW_EXPERTS, "num_key_value_heads": 8},
    "deepseek_v3": {**FEW_EXPERTS, "num_key_value_heads": 8, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**FEW_EXPERTS, "use_qk_norm": True},
    "gpt_oss": {"num_experts": 8, "num_experts_per_tok": 3, "sliding_window": 0},
}
"""Settings whose defaults are too large or fit no small model."""


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.float32, 40),
        (torch.bfloat16, None),
        pytest.param(torch.float32, None, marks=pytest.mark.grid),
        pytest.param(torch.bfloat16, 40, marks=pytest.mark.grid),
    ],
)
@pytest.mark.parametrize("family", plugins.names("models/*/memory"))
def test_layer_formulas_equal_the_tensors_that_torch_saves(
    family: str, dtype: torch.dtype, head_dim: int | None
) -> None:
    sizes = SIZES | OF_FAMILIES.get(family, {})
    if head_dim and "q_lora_rank" in plugins.constant("models/*/model", family, "SETTINGS"):
        # Values as wide as keys, and queries without a latent vector.
        sizes |= {"v_head_dim": 192, "q_lora_rank": 0}
        head_dim = None
    architecture = Architecture(family=family, head_dim=head_dim, **sizes)
    plug_in = plugins.load("models/*/model", family)
    with torch.device("meta"):  # random weights of all layers and experts would take seconds
        model = plug_in.Model(architecture)
    layer = model.blocks[architecture.expert_layers.start].to_empty(device="cpu").to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    parameter_storages = {
        parameter.untyped_storage().data_ptr() for parameter in layer.parameters()
    }
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in parameter_storages:
            kept[storage] = tensor
        return tensor

    cos = sin = None
    if architecture.position_embedding == "rotary":
        cos, sin = rotary(torch.arange(16), architecture, dtype)
    x_BLD = torch.randn(8, 16, 256, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x_BLD, cos, sin)
    saved_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / (8 * 16)
    formula = plugins.load("models/*/memory", family).saved_activations(
        architecture, size=dtype.itemsize, fused_norm=False
    )
    assert formula.states + formula.gathered + formula.split == pytest.approx(saved_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_oss", {"sliding_window": 128}),
        ("gemma2", {"sliding_window": 256}),
        ("mistral", {"sliding_window": 128}),
        ("llama", {}),
    ],
)
def test_masks_of_documents_equal_those_that_torch_saves(
    family: str, changes: dict[str, int]
) -> None:
    """A CPU computes documents of a few tokens as a device without flash attention does."""
    length = 1024
    sizes = SIZES | OF_FAMILIES.get(family, {}) | changes | {"num_hidden_layers": 2}
    architecture = Architecture(family=family, **sizes)
    model = plugins.load("models/*/model", family).Model(architecture)
    documents = PackedDocuments(torch.arange(length).div(8).long()[None])
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 4 and tensor.shape[1] == 1:  # the same for all heads
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    cos, sin = rotary(torch.arange(length), architecture, torch.float32)
    x_BLD = torch.randn(1, length, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in model.blocks:
            x_BLD = layer(x_BLD, cos, sin, documents)
    own = sum(kept.values())
    estimated = 2 * saved_mask_bytes(architecture, length, size=4)
    assert 0.8 * estimated <= own <= estimated


def larger(run: Run, folder: Path, device: torch.device = CPU, **changes: Any) -> Run:
    """A run of some million parameters that needs no data, with its precision chosen."""
    if not folder.exists():
        write_start(folder, LARGER, random_tensors(LARGER, 1))
    sizes = {"sequence_length": 256, "micro_batch_size": 8, "global_batch_size": 8}
    run = run.model_copy(update={"architecture": LARGER, "checkpoint": folder})
    return with_precision(laid_out(run, {**sizes, **changes}), device)


@pytest.mark.grid
@pytest.mark.ranks
def test_estimates_are_close_to_allocated_memory(run: Run, tmp_path: Path) -> None:
    runs = {
        again: larger(run, tmp_path / "larger", recompute_granularity=again)
        for again in ("none", "full")
    }
    estimated = {again: estimate(run, 1, "cpu") for again, run in runs.items()}
    measured = {again: spawn(peak, 1, run, tmp_path)[0] for again, run in runs.items()}
    for again in runs:
        assert measured[again] == pytest.approx(estimated[again].total, rel=0.1)
    saved = measured["none"] - measured["full"]
    assert saved == pytest.approx(estimated["none"].total - estimated["full"].total, rel=0.15)


def test_each_kind_of_parallelism_reduces_memory(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "larger"
    alone = estimate(larger(run, folder, CUDA, micro_batch_size=4), 1, "cuda")
    stages = {
        stage: estimate(larger(run, folder, CUDA, zero_stage=stage, micro_batch_size=2), 2, "cuda")
        for stage in range(4)
    }
    assert stages[0].optimizer == alone.optimizer == 2 * stages[1].optimizer
    assert stages[2].gradients < stages[1].gradients
    assert stages[3].weights < stages[2].weights == stages[1].weights < stages[0].weights

    def shared(world_size: int, **sizes: Any) -> Any:
        return estimate(
            larger(run, folder, CUDA, micro_batch_size=4, **parallel(**sizes)), world_size, "cuda"
        )

    tensor, sequence = shared(2, tp=2), shared(2, tp=2, sp=True)
    context, pipeline = shared(2, cp=2), shared(2, pp=2)
    assert alone.activations / 2 < sequence.activations < tensor.activations < alone.activations
    assert context.activations == alone.activations / 2
    assert pipeline.optimizer < alone.optimizer
    assert shared(2, pp=2, schedule="gpipe").activations >= pipeline.activations


def test_a_rank_of_gpt3_175b_holds_its_part_alone(run: Run) -> None:
    """The layout of config/examples/gpt3-175b.yaml: tensor 8 × pipeline 16 × data 8."""
    settings = yaml.safe_load((ROOT / "config/examples/gpt3-175b.yaml").read_text())["train"]
    shape = yaml.safe_load((ROOT / "config/models/gpt3-175b.yaml").read_text())
    names = ("sequence_length", "micro_batch_size", "global_batch_size", "zero_stage", "parallel")
    changes = {name: settings[name] for name in (*names, "recompute_granularity", "precision")}
    large = run.model_copy(update={"architecture": Architecture(**shape), "checkpoint": None})
    parts = estimate(laid_out(large, changes), 1024, "cuda")
    own = 175e9 / (8 * 16)  # parameters
    assert parts.weights == pytest.approx(2 * own + 4 * own / 8, rel=0.15)
    assert parts.optimizer == pytest.approx(8 * own / 8, rel=0.15)
    assert parts.total < 30e9  # an A100 has 80 GB
    # Adam's states have twice the bytes of the fp32 weights that a rank of the largest stage holds.
    resolved = laid_out(large, changes)
    held = [spawn(held_bytes, 1, resolved, 1024, rank)[0] for rank in (0, 1023)]
    assert parts.optimizer == pytest.approx(2 * max(held), rel=0.01)


def held_bytes(run: Run, world_size: int, rank: int) -> int:
    """Bytes of the fp32 weights of a rank, whose tensors have no memory and whose peers answer."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    built = mesh.build(run.train.parallel, world_size, device=CPU, shard=True)
    stages = PipelineStages(run, built, device=torch.device("meta"))
    return 4 * sum(chunk.local.numel() for chunk in stages.chunks)


def test_optimizer_memory_follows_its_states(run: Run, tmp_path: Path) -> None:
    states = {
        name: estimate(
            larger(run, tmp_path / "larger", optimizer={"name": name}), 1, "cpu"
        ).optimizer
        for name in ("sgd", "lion", "adamw", "adamw_8bit")
    }
    assert states["adamw"] == 2 * states["lion"] == 2 * states["sgd"]
    assert states["adamw_8bit"] < 0.26 * states["adamw"]


def test_the_startup_log_names_all_settings_on_request(run: Run) -> None:
    train = run.train.model_copy(update={"log_settings": True})
    lines = startup_log(run.model_copy(update={"train": train}), ONE, device=CPU).splitlines()
    settings = [line.removeprefix("setting").strip() for line in lines if line[:7] == "setting"]
    assert {"zero_stage: 1", "optimizer.learning_rate: 0.01", "compile: False"} <= {*settings}


def test_the_startup_log_names_changed_settings(run: Run) -> None:
    job, *lines = startup_log(run, ONE, device=CPU).splitlines()
    assert re.fullmatch(r"job +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d on \S+(, \S+)?", job)
    assert [line.split()[0] for line in lines] == ["model", "start", "layout", "changed", "memory"]
    parameters = sum(math.prod(shape) for shape in model_tensors.shapes(ARCHITECTURE).values())
    assert f"{parameters:,} parameters; 6 steps of 128 tokens" in lines[0]
    assert f"{run.checkpoint}, weights alone, at step 0" in lines[1]
    assert "1 rank on cpu, fp32, native, ZeRO stage 1" in lines[2]
    assert "sequence_length 16" in lines[3]
    assert "optimizer.learning_rate 0.01" in lines[3]
    assert "zero_stage" not in lines[3]
    assert re.search(r" and \d+ more$", lines[3])
    assert re.search(
        r"at most about \S+ kB a rank at one time \(.*\); the device has \S+ GB$", lines[4]
    )
    shared = laid_out(run, {**parallel(tp=2), "zero_stage": 2})
    log = startup_log(shared, Ranks(0, 4, 0, 4), device=CPU)
    assert "4 ranks = data 2 × tensor 2 on cpu" in log
    assert "zero_stage 2" in log
    assert list(changed_settings(run.train, run.train)) == []
    sgd_run = laid_out(run, {"optimizer": {"name": "sgd", "momentum": 0.8}, "zero_stage": 1})
    changed = [
        line for line in changed_settings(sgd_run.train, run.train) if line.startswith("optimizer")
    ]
    assert changed == ["optimizer.name sgd", "optimizer.momentum 0.8"]
    keeps_two = laid_out(run, {"keep_last": 2}).train
    assert [*changed_settings(run.train, keeps_two)] == ["keep_last empty"]


def test_layers_that_predict_further_tokens_need_memory(run: Run) -> None:
    experts = {**SIZES, **OF_FAMILIES["deepseek_v3"], "num_hidden_layers": 4}
    sizes = {"sequence_length": 256, "micro_batch_size": 8, "global_batch_size": 16}
    for pp in (1, 2):
        laid = laid_out(run, {**sizes, **parallel(pp=pp)})
        parts = []
        for number in (0, 1):
            shape = Architecture(family="deepseek_v3", num_nextn_predict_layers=number, **experts)
            own = laid.model_copy(update={"architecture": shape, "checkpoint": None})
            parts.append(estimate(own, pp, "cpu"))
            counted = estimate(own, pp, "cpu", stages=stage_sizes)
            # The shapes of tensors include biases of routers, which are no parameters.
            assert counted.weights == pytest.approx(parts[-1].weights, rel=1e-4)
            assert counted.activations == pytest.approx(parts[-1].activations)
        without, further = parts
        assert further.total > without.total
        if pp == 1:  # in a pipeline, another rank may need most
            assert further.activations - without.activations > 4 * 8 * 256 * 2000  # logits


def test_a_run_that_does_not_fit_gives_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamake.train.startup_log.device_memory", lambda *_: 1000.0)
    printed = startup_log(run, ONE, device=CPU)
    assert "more than the device has: lower train.micro_batch_size" in printed
