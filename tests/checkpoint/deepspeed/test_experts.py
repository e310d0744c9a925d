"""Mixtures of experts that DeepSpeed's own MoE layers save are read bit by bit, or refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support import hf_folder
from tests.support.deepspeed_experts import (
    EXPERTS,
    GROUPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    STEPS,
    VOCAB,
    WIDTH,
    ExpertCase,
    arguments,
    load_experts,
    write_experts,
)
from tests.support.deepspeed_files import KINDS
from tests.support.grids import params
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tests.support.shared_folders import made_once
from tokamake.checkpoint import model_tensors, writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

pytestmark = pytest.mark.ranks

TWO_RANKS = (
    ExpertCase(data=2, expert=2),
    ExpertCase(data=2, expert=1, zero_stage=2, precision="bf16", chosen=3),
    ExpertCase(data=1, expert=2, tensor=2),
    ExpertCase(data=2, expert=1, zero_stage=0),
    ExpertCase(data=1, expert=1, tensor=2, divided=True),
)
FOUR_RANKS = (
    ExpertCase(data=4, expert=2, precision="bf16"),
    ExpertCase(data=4, expert=2, strided=True, zero_stage=2),
    ExpertCase(data=4, expert=4),
)
ALL = [*TWO_RANKS, *FOUR_RANKS]
"""`make test` writes the first cases alone: they need two ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of DeepSpeed by case, which tests must not change."""

    def make(folder: Path) -> None:
        write_experts(folder, *TWO_RANKS)

    return made_once(tmp_path_factory, "experts-of-deepspeed", make)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of four ranks."""

    def make(folder: Path) -> None:
        write_experts(folder, *FOUR_RANKS)

    return made_once(tmp_path_factory, "more-experts-of-deepspeed", make)


def folder_of(case: ExpertCase, request: pytest.FixtureRequest) -> Path:
    root: Path = request.getfixturevalue("wide" if case in FOUR_RANKS else "folder")
    return root / str(case)


def expected(case: ExpertCase, folder: Path, kind: str) -> dict[str, Tensor]:
    """Return what the ranks held of a kind, by our names."""
    ranks = [each["parameters"] for each in torch.load(folder / "held.pt")]
    held: dict[str, list[Tensor]] = {}  # of each tensor-parallel rank
    for rank, parameters in enumerate(ranks):
        for name, kinds in parameters.items():
            parts = held.setdefault(name.removesuffix(".weight"), [])
            if len(parts) <= rank % case.tensor and kind in kinds:
                parts.append(kinds[kind])
    model, encoder = "language_model.", "language_model.encoder."

    def rows(name: str) -> Tensor:
        return torch.cat(held[name])

    def heads(name: str) -> list[Tensor]:
        parts = [
            part.view(GROUPS, HEADS // GROUPS + 2, HEAD_DIM, -1).split(
                [HEADS // GROUPS, 1, 1], dim=1
            )
            for part in held[name]
        ]
        return [torch.cat([part[at].flatten(0, 2) for part in parts]) for at in range(3)]

    tensors = {
        "model.embed_tokens": rows(f"{model}embedding.word_embeddings")[:VOCAB],
        "lm_head": rows(f"{model}output_layer")[:VOCAB],
        "model.norm": held[f"{encoder}final_layernorm"][0],
    }
    for number in range(LAYERS):
        theirs, ours = f"{encoder}layers.{number}.", f"model.layers.{number}."
        query, key, value = heads(f"{theirs}self_attention.query_key_value")
        moe = f"{theirs}mlp.deepspeed_moe."
        experts = [f"{moe}experts.deepspeed_experts.{each}." for each in range(EXPERTS)]
        fc1 = [
            held[f"{each}dense_h_to_4h"][: case.tensor if case.divided else 1] for each in experts
        ]
        fc2 = [
            held[f"{each}dense_4h_to_h"][: case.tensor if case.divided else 1] for each in experts
        ]
        halves = [[part.chunk(2) for part in each] for each in fc1]
        tensors |= {
            f"{ours}input_layernorm": held[f"{theirs}input_layernorm"][0],
            f"{ours}self_attn.q_proj": query,
            f"{ours}self_attn.k_proj": key,
            f"{ours}self_attn.v_proj": value,
            f"{ours}self_attn.o_proj": torch.cat(held[f"{theirs}self_attention.dense"], 1),
            f"{ours}post_attention_layernorm": held[f"{theirs}post_attention_layernorm"][0],
            f"{ours}mlp.gate": held[f"{moe}gate.wg"][0],
            f"{ours}mlp.experts.gate_proj": torch.stack(
                [torch.cat([gate for gate, _ in each]) for each in halves]
            ),
            f"{ours}mlp.experts.up_proj": torch.stack(
                [torch.cat([up for _, up in each]) for each in halves]
            ),
            f"{ours}mlp.experts.down_proj": torch.stack([torch.cat(each, 1) for each in fc2]),
        }
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", params(ALL, TWO_RANKS), ids=str)
def test_weights_and_states_are_those_of_the_ranks(
    case: ExpertCase, request: pytest.FixtureRequest
) -> None:
    path = folder_of(case, request)
    checkpoint = open_any(path)
    assert (checkpoint.format, checkpoint.architecture.family) == ("mds", "mixtral")
    assert checkpoint.progress.iteration == STEPS
    source = checkpoint.source
    weights = expected(case, path, "weight")
    assert {key for key in source if key.startswith("model.")} == {f"model.{n}" for n in weights}
    for name, tensor in weights.items():
        assert torch.equal(source.read(f"model.{name}"), tensor), name
    if case.tensor > 1 or not case.zero_stage:
        assert len(checkpoint.unread) == 1
        assert not any(key.startswith("optimizer.") for key in source)
        return
    assert checkpoint.unread == ()
    prefixes = {f"optimizer.{kind}.": kind for kind in KINDS}
    if case.precision != "fp32":
        prefixes["master."] = "master"
    for prefix, kind in prefixes.items():
        states = expected(case, path, kind)
        assert {key for key in source if key.startswith(prefix)} == {prefix + n for n in states}
        for name, tensor in states.items():
            assert torch.equal(source.read(prefix + name), tensor), prefix + name


def test_deepspeeds_experts_compute_what_a_mixtral_computes(folder: Path) -> None:
    for case in TWO_RANKS[:2]:  # of two and of three experts a token
        checkpoint = open_any(folder / str(case))
        states, result = torch.load(folder / str(case) / "held.pt")[0]["mlp"]
        names = model_tensors.shapes(checkpoint.architecture)
        tensors = {name: checkpoint.source.read(f"model.{name}") for name in names}
        model: Any = model_tensors.to_model(checkpoint.architecture, tensors)
        with torch.no_grad():
            computed = model.layers["0"].mlp.eval()(states)
        tolerance = 1e-5 if case.precision == "fp32" else 1e-2
        assert (computed - result).abs().max() <= tolerance * result.abs().max(), case


REFUSED = {
    "topk: 1: means weights of experts that are raw probabilities": {"topk": 1},
    "expert_interval: 2: means layers without experts among layers": {"expert_interval": 2},
    "mlp_type: 'residual': means an MLP that all tokens pass beside": {"mlp_type": "residual"},
    "add_bias_linear: True: means biases, but after experts": {"add_bias_linear": True},
    "num_experts: .4, 8.: means layers with different experts": {"num_experts": [4, 8]},
    "swiglu: False: means experts without a gate": {"swiglu": False},
    "normalization: 'layernorm': means experts beside": {"normalization": "layernorm"},
}


def changed(source: Path, target: Path, **changes: Any) -> Path:
    """Return a copy of the first case's checkpoint with other arguments."""
    shutil.copytree(source / str(TWO_RANKS[0]), target)
    (file,) = target.glob("global_step*/mp_rank_00_model_states.pt")
    state = torch.load(file, weights_only=False)
    torch.save({**state, "args": arguments(TWO_RANKS[0], **changes)}, file)
    return target


@pytest.mark.parametrize("message", REFUSED)
def test_experts_that_no_family_has_are_refused(message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"args.{message}"):
        open_any(changed(folder, tmp_path / "copy", **REFUSED[message]))


def test_experts_of_zero_3_and_of_pipelines_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path / "copy")
    (file,) = copy.glob("global_step*/mp_rank_00_model_states.pt")
    file = file.rename(file.with_name("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    with pytest.raises(UserError, match="is of ZeRO stage 3, in which experts are not read"):
        open_any(copy)
    # A stage of a pipeline has files of its layers.
    file = file.rename(file.with_name("mp_rank_00_model_states.pt"))
    file.with_name("layer_01-model_00-model_states.pt").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="saved without a pipeline, not a universal one"):
        open_any(copy)


def test_a_missing_expert_is_named(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path / "copy")
    next(copy.glob("global_step*/layer_1_expert_3_mp_rank_00_model_states.pt")).unlink()
    name = r"layers\.1\.mlp\.experts\.local_experts\.3\.linear_fc1\.weight"
    with pytest.raises(UserError, match=f"has no file with .*{name}"):
        open_any(copy)


def test_what_megatron_deepspeed_draws_or_drops_is_reported(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"moe_token_dropping": True, "moe_top2_2nd_expert_sampling": True}
    open_any(changed(folder, tmp_path / "copy", **changes))
    assert "drops tokens beyond a capacity and draws each token's second expert" in caplog.text


def mixtral(case: ExpertCase) -> Architecture:
    """The model of a case."""
    return Architecture(
        family="mixtral",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH * case.tensor,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS * case.tensor,
        num_key_value_heads=GROUPS * case.tensor,
        head_dim=HEAD_DIM,
        sliding_window=0,
        num_experts=EXPERTS,
        num_experts_per_tok=case.chosen,
    )


LOADED = (
    ExpertCase(data=2, expert=2),
    ExpertCase(data=2, expert=1, zero_stage=2, chosen=3),
    ExpertCase(data=1, expert=1, tensor=2, divided=True),
)


def test_deepspeed_loads_what_is_written(tmp_path: Path) -> None:
    folders = [tmp_path / str(case) for case in LOADED]
    for folder, case in zip(folders, LOADED, strict=True):
        shape = mixtral(case)
        hf_folder.write(tmp_path / f"{case}-hf", shape, random_tensors(shape, 1))
        target = Target(ParallelLayout(case.tensor), make_vocab_size_divisible_by=1)
        writer.write(folder, open_any(tmp_path / f"{case}-hf"), "mds", target)
        convert(source=folder, target=tmp_path / f"{case}-back", format="hf")
        files = (tmp_path / f"{case}-{name}/model.safetensors" for name in ("hf", "back"))
        before, after = map(load_file, files)
        assert not open_any(folder).unread
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    loaded = spawn(load_experts, 2, folders, LOADED, timeout=600)
    for number, (folder, case) in enumerate(zip(folders, LOADED, strict=True)):
        torch.save([of_rank[number] for of_rank in loaded], folder / "held.pt")
        tensors = random_tensors(mixtral(case), 1)
        held = expected(case, folder, "weight")
        assert held.keys() == tensors.keys()
        for name, tensor in held.items():
            assert torch.equal(tensor, tensors[name]), (str(case), name)
        # Every expert-parallel size reads the same files.
        assert len([*folder.glob("*/layer_*_expert_*")]) == LAYERS * EXPERTS * case.tensor


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"num_experts_per_tok": 1}, {}, "num_experts_per_tok: 1: .* raw probability, here"),
        ({}, {"zero_stage": 1}, "zero_stage: 1: optimizer states of DeepSpeed's experts are not"),
        ({}, {"format": "mds-pipeline"}, "which tokamake writes in the format mds alone"),
        ({}, {"format": "universal"}, "which tokamake writes in the format mds alone"),
    ],
)
def test_what_deepspeeds_experts_cannot_be_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shape = mixtral(ExpertCase()).model_copy(update=changes)
    hf_folder.write(tmp_path / "a", shape, random_tensors(shape, 1))
    with pytest.raises(UserError, match=message):
        convert(source=tmp_path / "a", target=tmp_path / "b", **{"format": "mds", **options})
    assert not (tmp_path / "b").exists()
