"""Checkpoints that DeepSpeed itself writes are read bit by bit as its ranks held them."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed_files import (
    KINDS,
    convert_to_universal,
    held_states,
    load_universal,
    universal,
    written_once,
)
from tests.support.deepspeed_models import (
    EMBEDDING,
    HEAD,
    HEAD_DIM,
    LAYERS,
    NORM,
    NUM_LAYERS,
    PADDED,
    SAMPLES,
    STEPS,
    TOKENS,
    VOCAB,
    Case,
    arguments,
)
from tests.support.grids import cover, field_values, params
from tests.support.shared_folders import made_once
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.errors import UserError

pytestmark = pytest.mark.ranks

CASES = [
    Case(0, "fp32"),
    Case(0, "bf16", accumulation="bf16"),
    Case(0, "fp16"),
    Case(1, "fp32"),
    Case(1, "bf16"),
    Case(1, "bf16", accumulation="bf16"),
    Case(1, "bf16", tied=True),
    Case(1, "bf16", data=4, fused=True),
    Case(2, "fp32"),
    Case(2, "bf16", round_robin=True),
    Case(2, "fp16", fused=True),
    Case(0, "fp32", data=1, tensor=2),
    Case(1, "bf16", data=1, tensor=2),
    Case(1, "fp16", data=2, tensor=2),
]
PIPELINED = [
    Case(0, "fp32", data=1, pipeline=2),
    Case(0, "bf16", data=1, pipeline=2, accumulation="bf16"),
    Case(1, "bf16", data=1, pipeline=2),
    Case(1, "bf16", data=2, pipeline=1),
    Case(1, "fp32", data=1, pipeline=2, tied=True),
    Case(1, "bf16", data=1, tensor=2, pipeline=2),
]
ZERO_3 = [Case(3, "fp32"), Case(3, "bf16", data=4), Case(3, "fp16")]
ALL = [*CASES, *PIPELINED, *ZERO_3]
KEPT = [*cover(ALL, field_values), Case(1, "bf16"), Case(1, "bf16", data=1, tensor=2)]
"""Cases that `make test` runs."""
WITHOUT_NAMES = [case for case in [*CASES, *PIPELINED] if not case.zero_stage]
WITHOUT_NAMES.remove(Case(0, "bf16", data=1, pipeline=2, accumulation="bf16"))
UNIVERSAL = [
    Case(1, "bf16"),
    Case(1, "bf16", data=1, tensor=2),
    Case(1, "bf16", data=1, pipeline=2),
    Case(1, "fp32", data=1, pipeline=2, tied=True),
    Case(3, "bf16", data=4),
]


SOURCES = [Case(1, "bf16"), Case(3, "bf16", data=4), Case(1, "fp16", data=2, tensor=2)]
"""Cases that tests without parameters read."""
NO_PARAMS = SimpleNamespace(params={})


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, Path]:
    """Checkpoints of DeepSpeed for the selected tests, which must not change them."""
    selected = {
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == Path(__file__) and "case" in getattr(item, "callspec", NO_PARAMS).params
    }
    cases = [case for case in ALL if case in {*selected, *SOURCES}]
    return written_once(tmp_path_factory, *cases)


@pytest.fixture(scope="module")
def universals(
    folders: dict[Case, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, Path]:
    """Universal checkpoints that DeepSpeed made from some of them."""
    cases = [case for case in UNIVERSAL if case in folders]

    def make(folder: Path) -> None:
        for case in cases:
            shutil.copytree(folders[case], folder / str(case))
            convert_to_universal(folder / str(case))

    root = made_once(tmp_path_factory, "universals-of-deepspeed", make)
    return {case: universal(root / str(case)) for case in cases}


def expected(case: Case, folder: Path, kind: str) -> dict[str, Tensor]:
    """Return the ranks' tensors by Hugging Face's names, not fused and without padding.

    `kind`: weight, master, exp_avg or exp_avg_sq.
    """
    held = {name: states[kind] for name, states in held_states(folder).items()}
    heads, groups = case.heads
    tensors = {
        "model.embed_tokens": held[EMBEDDING][:VOCAB],
        "model.norm": held[NORM],
    }
    if not case.tied:
        tensors["lm_head"] = held[HEAD][:VOCAB]
    for number in range(NUM_LAYERS):
        megatron, hf = f"{LAYERS}{number}.", f"model.layers.{number}."
        fused = held[f"{megatron}self_attention.query_key_value"]
        by_group = fused.view(groups, heads // groups + 2, HEAD_DIM, -1)
        query, key, value = by_group.split([heads // groups, 1, 1], dim=1)
        gate, up = held[f"{megatron}mlp.dense_h_to_4h"].chunk(2)
        tensors |= {
            f"{hf}input_layernorm": held[f"{megatron}input_layernorm"],
            f"{hf}self_attn.q_proj": query.flatten(0, 2),
            f"{hf}self_attn.k_proj": key.flatten(0, 2),
            f"{hf}self_attn.v_proj": value.flatten(0, 2),
            f"{hf}self_attn.o_proj": held[f"{megatron}self_attention.dense"],
            f"{hf}post_attention_layernorm": held[f"{megatron}post_attention_layernorm"],
            f"{hf}mlp.gate_proj": gate,
            f"{hf}mlp.up_proj": up,
            f"{hf}mlp.down_proj": held[f"{megatron}mlp.dense_4h_to_h"],
        }
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


def configuration(case: Case) -> dict[str, Any]:
    """Return Hugging Face's config of the model."""
    args = arguments(case)
    return {
        "vocab_size": VOCAB,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_key_value_heads,
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.layernorm_epsilon,
        "tie_word_embeddings": case.tied,
    }


def assert_weights(case: Case, folder: Path, path: Path) -> None:
    """Check that a path has exactly the weights of the ranks.

    If files hold only master weights, these are the weights.
    """
    source = open_any(path).source
    weights = expected(case, folder, "weight")
    dtype = next(iter(weights.values())).dtype
    if has_only_masters(case, path):
        dtype = torch.float32
    assert {key for key in source if key.startswith("model.")} == {f"model.{n}" for n in weights}
    for name, tensor in weights.items():
        read = source.read(f"model.{name}")
        assert read.dtype == dtype, name
        assert torch.equal(read.to(tensor.dtype), tensor), name


def has_only_masters(case: Case, path: Path) -> bool:
    """Return whether there are no rounded weights: with ZeRO 3, and in universal checkpoints."""
    return case.zero_stage == 3 or open_any(path).format == "universal"


def assert_states(case: Case, folder: Path, path: Path) -> None:
    """Check the same for master weights and Adam's states."""
    source = open_any(path).source
    kinds = {f"optimizer.{kind}.": kind for kind in KINDS}
    if case.precision != "fp32":
        kinds["model." if has_only_masters(case, path) else "master."] = "master"
    for prefix, kind in kinds.items():
        states = expected(case, folder, kind)
        assert {key for key in source if key.startswith(prefix)} == {prefix + n for n in states}
        for name, tensor in states.items():
            assert torch.equal(source.read(prefix + name), tensor), (prefix, name)
    step = held_states(folder)[EMBEDDING]["step"]
    for name in expected(case, folder, "weight"):
        assert int(source.read(f"optimizer.step.{name}")) == step


@pytest.mark.parametrize("case", params(ALL, KEPT), ids=str)
def test_weights_are_those_of_the_ranks(case: Case, folders: dict[Case, Path]) -> None:
    assert_weights(case, folders[case], folders[case])


@pytest.mark.parametrize("case", params(ALL, KEPT), ids=str)
def test_format_architecture_progress_and_layout_are_read(
    case: Case, folders: dict[Case, Path]
) -> None:
    checkpoint = open_any(folders[case])
    assert checkpoint.format == ("mds_pipeline" if case.pipeline else "mds")
    shape = checkpoint.architecture
    config = configuration(case)
    assert {name: getattr(shape, name) for name in config} == config
    assert (shape.family, shape.rope_theta) == ("llama", 5000.0)
    assert checkpoint.padded_vocab_size == PADDED
    progress = checkpoint.progress
    assert progress.iteration == STEPS
    assert (progress.consumed_samples, progress.consumed_tokens) == (SAMPLES, TOKENS)
    layout = checkpoint.layout
    assert layout.tensor_parallel_size == case.tensor
    assert layout.pipeline_parallel_size == max(1, case.pipeline)


COMPUTED = [
    Case(0, "fp32"),
    Case(1, "bf16", tied=True),
    Case(1, "bf16", data=1, tensor=2),
    Case(0, "fp32", data=1, pipeline=2),
    Case(3, "fp32"),
]


@pytest.mark.parametrize("case", params(COMPUTED, KEPT), ids=str)
def test_transformers_computes_the_same(
    case: Case, folders: dict[Case, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    convert(source=folders[case], target=tmp_path / "hf", format="hf", dtype="fp32")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    rope = {"rope_type": "default", "rope_theta": arguments(case).rope_theta}
    reference = LlamaForCausalLM(LlamaConfig(**configuration(case), rope_parameters=rope))
    weights = {n: tensor.float() for n, tensor in expected(case, folders[case], "weight").items()}
    reference.load_state_dict(weights, strict=not case.tied)
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (converted(tokens).logits - reference(tokens).logits).abs().max().item()
    assert difference <= 1e-5


def repacked(folder: Path, target: Path, compression: int) -> Path:
    """Return a copy of a checkpoint with a file that another program packed again."""
    copy = Path(shutil.copytree(folder, target))
    file = copy / f"global_step{STEPS}" / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return copy


def test_a_repacked_file_is_read_unless_it_is_compressed(
    folders: dict[Case, Path], tmp_path: Path
) -> None:
    case = Case(1, "bf16")
    stored = repacked(folders[case], tmp_path / "stored", zipfile.ZIP_STORED)
    assert_weights(case, folders[case], stored)
    compressed = repacked(folders[case], tmp_path / "compressed", zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"mp_rank_00_model_states.pt: .*compressed"):
        open_any(compressed)


@pytest.mark.parametrize("case", params(ALL, KEPT), ids=str)
def test_optimizer_states_are_those_of_the_ranks(case: Case, folders: dict[Case, Path]) -> None:
    checkpoint = open_any(folders[case])
    if case in WITHOUT_NAMES:
        assert checkpoint.unread == ("optimizer states without names, of ZeRO stage 0",)
        assert not any(key.startswith("optimizer.") for key in checkpoint.source)
        return
    assert checkpoint.unread == ()
    assert_states(case, folders[case], folders[case])
    layout = checkpoint.layout
    assert layout.data_parallel_size == case.data
    # In bf16, DeepSpeed's pipelines with stage 0 write the partitions of stage 1.
    assert layout.zero_stage == max(1, case.zero_stage)


@pytest.mark.parametrize("check", [assert_weights, assert_states])
@pytest.mark.parametrize("case", params(UNIVERSAL, KEPT), ids=str)
def test_universal_checkpoints_have_the_states_of_the_ranks(
    check: Callable[[Case, Path, Path], None],
    case: Case,
    folders: dict[Case, Path],
    universals: dict[Case, Path],
) -> None:
    check(case, folders[case], universals[case])


LOADED = [
    Case(1, "bf16"),
    Case(2, "bf16", data=4),
    Case(1, "bf16", data=1, tensor=2),
    Case(1, "bf16", data=1, pipeline=2),
]


@pytest.mark.parametrize("case", params(LOADED, LOADED[:1]), ids=str)
def test_deepspeed_loads_converted_universal_checkpoints(
    case: Case, folders: dict[Case, Path], tmp_path: Path
) -> None:
    """The checkpoint comes from other ranks, and passes through the format `native`."""
    two_tensor_ranks = Case(1, "fp16", data=2, tensor=2)
    source = folders[two_tensor_ranks if case.tensor == 2 else Case(3, "bf16", data=4)]
    convert(source=source, target=tmp_path / "native", format="native")
    convert(
        source=tmp_path / "native",
        target=tmp_path / "universal",
        format="universal",
        pipeline_parallel_size=max(1, case.pipeline),
    )
    held = held_states(source)
    for name, states in load_universal(tmp_path / "universal", case).items():
        rows = VOCAB if name in (EMBEDDING, HEAD) else None
        for kind in ("master", *KINDS):
            assert torch.equal(states[kind][:rows], held[name][kind][:rows]), (name, kind)
        rounded = held[name]["master"].to(states["weight"].dtype)
        assert torch.equal(states["weight"][:rows], rounded[:rows]), name
        assert states["step"] == held[name]["step"]
