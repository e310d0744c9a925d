"""A new family is a folder: experts as stacks of matrices, with files and placements of their own.

`tests/support/mixture` is added to the families for these tests; no other file knows it.
"""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support import hf_folder, plug_ins
from tests.support.model_ranks import cut
from tests.support.paths import ROOT
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.runs import losses, make_run, prepare, train_here, weights, write_start
from tokamake import plugins
from tokamake.checkpoint import model_tensors, writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorParallelRank
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.checkpoint.torch_dist.sharded_tensors import sharded_tensors
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import read_run
from tokamake.errors import UserError
from tokamake.optim._groups import parameter_groups, part_hidden_matrices
from tokamake.parallel import collectives
from tokamake.parallel.axis import Axis
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.placement import Placement, placements
from tokamake.parallel.sharding import parameter_chunks
from tokamake.train import memory
from tokamake.train.memory import estimate
from tokamake.train.numerics import with_precision

CPU = torch.device("cpu")
GATE, DOWN = "model.layers.0.mlp.experts.gate_proj.weight", "mlp.experts.down_proj"


@pytest.fixture(autouse=True)
def shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Architecture:
    new = {"models/mixture": ROOT / "tests/support/mixture"}
    plug_ins.add(tmp_path / "library", monkeypatch, new)
    return Architecture(
        family="mixture",
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )


def start_run(tmp_path: Path, shape: Architecture, **settings: Any) -> Path:
    root = prepare(tmp_path)
    write_start(root / "start", shape, random_tensors(shape, 5))
    return make_run(root, "mixture", evaluation_steps=0, **settings)


def test_the_shapes_are_those_of_the_model(shape: Architecture) -> None:
    model = plugins.load("models/*/model", "mixture").Model
    with torch.device("meta"):
        parameters = [*model(shape).named_parameters()]
    expected = [(model.tensor_name(name), tuple(each.shape)) for name, each in parameters]
    assert expected == [*model_tensors.shapes(shape).items()]


def test_each_matrix_of_a_stack_has_random_weights_of_its_own(shape: Architecture) -> None:
    tensors = random_tensors(shape, 1)
    experts = tensors[GATE]
    assert experts.shape == (3, 24, 32)
    assert experts.std().item() == pytest.approx(shape.initializer_range, rel=0.05)
    for first, second in combinations(experts, 2):
        assert not torch.isclose(first, second).any(dim=-1).all()
    assert not tensors[f"model.layers.0.{DOWN}.bias"].any()


def test_placements_decide_groups_of_the_optimizer(shape: Architecture) -> None:
    model = plugins.load("models/*/model", "mixture").Model(shape)
    named = [*model.named_parameters()]
    groups = parameter_groups(named, 0.1, placements=placements(model))
    decaying, plain = ({*group["param_names"]} for group in groups)
    assert {"layers.0.mlp.experts.gate_proj.weight", "layers.0.mlp.gate.weight"} <= decaying
    assert {f"layers.0.{DOWN}.bias", "norm.weight"} <= plain
    hidden = next(group for group in part_hidden_matrices(groups) if group["hidden"])
    assert f"layers.1.{DOWN}.weight" in hidden["param_names"]
    assert "embed_tokens.weight" not in hidden["param_names"]


def test_placements_join_what_tensor_parallel_ranks_compute(
    shape: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of two ranks without a group add up to the whole; gradients join by placement."""
    monkeypatch.setattr(collectives, "all_reduce", lambda x, **_: x)
    tensors = {name: torch.randn(size) for name, size in model_tensors.shapes(shape).items()}
    states, factors = torch.randn(2, 2, 5, shape.hidden_size)

    def computed(axis: Axis) -> tuple[Tensor, dict[str, tuple[Tensor, Placement]]]:
        model = plugins.load("models/*/model", "mixture").Model(shape, Mesh(tensor=axis))
        placed = placements(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(cut(tensors[model.tensor_name(name)], placed[name], axis))
        output = model.layers["0"].mlp(states)
        (output * factors).sum().backward()
        named = model.named_parameters()
        gradients = {name: (each.grad, placed[name]) for name, each in named if ".0.mlp" in name}
        return output.detach(), gradients

    whole, expected = computed(Axis())
    halves = [computed(Axis(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole, atol=1e-3, rtol=1e-4)
    for name, (gradient, _) in expected.items():
        (first, placement), (second, _) = (half[1][name] for half in halves)
        assert placement.partial != (placement.dim is not None)
        dim = placement.dim
        joined = first + second if dim is None else torch.cat((first, second), dim)
        torch.testing.assert_close(joined, gradient, atol=1e-3, rtol=1e-4)


def test_megatron_has_a_tensor_for_each_expert_on_each_rank(shape: Architecture) -> None:
    layer = TensorParallelRank(shape, Axis(1, 2), 128).layer(0)
    fused = layer["mlp.experts.local_experts.2.linear_fc1.weight"]
    assert fused.shape == (24, 32)
    assert [(chunk.key, chunk.slices) for chunk in fused.chunks] == [
        (f"model.{key}", (slice(2, 3), slice(12, 24), slice(0, 32)))
        for key in (GATE, GATE.replace("gate_proj", "up_proj"))
    ]
    assert not layer["mlp.experts.local_experts.0.linear_fc2.bias"].decays
    sizes = {each.key: each.shape for each in sharded_tensors(shape, padded_vocab_size=128)}
    assert sizes["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (2, 3, 48, 32)
    assert sizes["decoder.layers.pre_mlp_layernorm.weight"] == (2, 32)
    odd = Architecture(**{**shape.model_dump(), "expert_size": 25})
    with pytest.raises(UserError, match="tensor_parallel_size: 2: does not divide 25, the width"):
        TensorParallelRank(odd, Axis(0, 2), 128).layer(0)


LAYOUTS = {
    "mds": ParallelLayout(2),
    "mds_pipeline": ParallelLayout(2, 2),
    "megatron": ParallelLayout(2, 2),
    "torch_dist": ParallelLayout(),
    "universal": ParallelLayout(),
    "native": ParallelLayout(),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_format_keeps_every_bit(kind: str, shape: Architecture, tmp_path: Path) -> None:
    hf_folder.write(tmp_path / "hf", shape, random_tensors(shape, 1))
    names = {*load_file(tmp_path / "hf/model.safetensors")}
    assert "model.layers.1.block_sparse_moe.experts.2.w2.bias" in names
    source = open_any(tmp_path / "hf")
    writer.write(tmp_path / "there", source, kind, Target(LAYOUTS[kind]))
    checkpoint = open_any(tmp_path / "there")
    assert checkpoint.architecture == shape
    writer.write(tmp_path / "back", checkpoint, "hf", Target())
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.usefixtures("lone_rank")
def test_a_run_trains_and_its_states_go_to_every_format(
    shape: Architecture, tmp_path: Path
) -> None:
    config = start_run(tmp_path, shape)
    assert train_here(config) == 0
    assert losses(config)[-1] < losses(config)[0]
    assert weights(config)[f"model.layers.0.{DOWN}.bias"].any()
    trained = open_any(read_run(config).output)
    keys = [f"optimizer.{kind}.{GATE}" for kind in ("exp_avg", "exp_avg_sq")]
    assert all(trained.source.read(key).shape == (3, 24, 32) for key in keys)
    targets: dict[str, dict[str, Any]] = {
        "mds": {"zero_stage": 1, "data_parallel_size": 2, "tensor_parallel_size": 2},
        "megatron": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "distributed": {"format": "megatron", "zero_stage": 1, "tensor_parallel_size": 2},
        "torch_dist": {},
        "universal": {},
    }
    for name, options in targets.items():
        options = {"format": name, **options}
        convert(source=read_run(config).output, target=tmp_path / name, **options)
        checkpoint = open_any(tmp_path / name)
        assert {*checkpoint.source} == {*trained.source}, name
        for key in trained.source:
            if key.startswith("optimizer.step"):
                assert checkpoint.source.number(key) == 6
            else:
                assert torch.equal(checkpoint.source.read(key), trained.source.read(key)), key


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_of_matrices_train_stacks(
    name: str, shape: Architecture, tmp_path: Path
) -> None:
    config = start_run(tmp_path, shape, optimizer={"name": name, "learning_rate": 0.02})
    assert train_here(config) == 0
    assert losses(config)[-1] < losses(config)[0]
    kinds = {key.split(".")[1] for key in open_any(read_run(config).output).source if GATE in key}
    assert ("momentum_buffer" in kinds) == (name == "muon")


def test_the_estimate_of_memory_counts_all_experts(shape: Architecture, tmp_path: Path) -> None:
    needed = estimate(with_precision(read_run(start_run(tmp_path, shape)), CPU), 1, "cpu")
    number = sum(torch.Size(size).numel() for size in model_tensors.shapes(shape).values())
    assert (needed.weights, needed.optimizer) == (4 * number, 8 * number)


class ExpertMesh(Mesh):
    """A mesh with ranks that share experts, each with some of them."""

    expert = Axis()


def save_experts(folder: Path, whole: Tensor) -> None:
    """Save a stack that two ranks share by experts, and two tensor-parallel ranks by rows."""
    rank = dist.get_rank()
    mesh = ExpertMesh(tensor=Axis(rank % 2, 2), copy=((0, 2), (1, 3)))
    object.__setattr__(mesh, "expert", Axis(rank // 2, 2))
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(2, 12, 8))
    placed = {"weight": Placement(1, axes=(("expert", 0),))}
    (chunk,) = parameter_chunks(
        module,
        placed,
        mesh=mesh,
        shapes={"weight": (4, 24, 8)},
        saved_names={"weight": "weight"},
        tied_output=None,
    )
    chunk.local.data = whole[chunk.place].clone()
    layout = training_state.StateLayout(mesh, CPU)
    tensors = training_state.tensors_of([chunk], {}, layout=layout, kinds={})
    assert dist.group.WORLD is not None
    training_state.save(
        folder, tensors, description={}, rank_state=0, group=dist.group.WORLD
    ).result()


@pytest.mark.ranks
def test_a_placement_names_further_axes_of_the_mesh(tmp_path: Path) -> None:
    whole = torch.randn(4, 24, 8)
    spawn(save_experts, 4, tmp_path / "saved", whole)
    read = torch.zeros_like(whole)
    training_state.fill(tmp_path / "saved", {"model.weight": read})
    assert torch.equal(read, whole)


def test_experts_of_other_ranks_do_not_count_as_shards() -> None:
    mesh = ExpertMesh()
    object.__setattr__(mesh, "expert", Axis(0, 2))
    module: Any = nn.Linear(8, 4, bias=False)
    module.mesh, module.placements = mesh, {"weight": Placement(axes=(("expert", 0),))}
    assert memory._own_elements(module, 4) == 32 / 2
    assert memory._own_elements(module, 1) == 32
