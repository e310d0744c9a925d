"""Checkpoints that DeepSpeed itself writes are read, every bit as its ranks held it."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed_files import KINDS, loaded, made, truth, universal
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
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.errors import UserError

pytestmark = pytest.mark.ranks

CASES = [
    Case(0, "fp32"),
    Case(0, "bf16", sums="bf16"),
    Case(0, "fp16"),
    Case(1, "fp32"),
    Case(1, "bf16"),
    Case(1, "bf16", sums="bf16"),
    Case(1, "bf16", tied=True),
    Case(1, "bf16", data=4, fused=True),
    Case(2, "fp32"),
    Case(2, "bf16", round_robin=True),
    Case(2, "fp16", fused=True),
    Case(0, "fp32", data=1, tensor=2),
    Case(1, "bf16", data=1, tensor=2),
    Case(1, "fp16", data=2, tensor=2),
]
PIPED = [
    Case(0, "fp32", data=1, pipeline=2),
    Case(0, "bf16", data=1, pipeline=2, sums="bf16"),
    Case(1, "bf16", data=1, pipeline=2),
    Case(1, "bf16", data=2, pipeline=1),
    Case(1, "fp32", data=1, pipeline=2, tied=True),
    Case(1, "bf16", data=1, tensor=2, pipeline=2),
]
PARTITIONED = [Case(3, "fp32"), Case(3, "bf16", data=4), Case(3, "fp16")]
NAMELESS = [case for case in [*CASES, *PIPED] if not case.zero_stage]
NAMELESS.remove(Case(0, "bf16", data=1, pipeline=2, sums="bf16"))
UNIVERSAL = [
    Case(1, "bf16"),
    Case(1, "bf16", data=1, tensor=2),
    Case(1, "bf16", data=1, pipeline=2),
    Case(1, "fp32", data=1, pipeline=2, tied=True),
    Case(3, "bf16", data=4),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """What DeepSpeed wrote, of each case; do not write there."""
    return made(tmp_path_factory.mktemp("deepspeed"), *CASES, *PIPED, *PARTITIONED)


@pytest.fixture(scope="module")
def universals(folders: dict[Case, Path]) -> dict[Case, Path]:
    """Universal checkpoints of some of them."""
    return {case: universal(folders[case]) for case in UNIVERSAL}


def expected(case: Case, folder: Path, kind: str) -> dict[str, Tensor]:
    """What ranks held, by Hugging Face's names; nothing of it is fused or padded any more.

    Args:
        case: how it was trained.
        folder: where the truth lies.
        kind: weight, master, exp_avg or exp_avg_sq.
    """
    held = {name: of[kind] for name, of in truth(folder).items()}
    heads, groups = case.heads
    found = {
        "model.embed_tokens": held[EMBEDDING][:VOCAB],
        "model.norm": held[NORM],
    }
    if not case.tied:
        found["lm_head"] = held[HEAD][:VOCAB]
    for number in range(NUM_LAYERS):
        theirs, ours = f"{LAYERS}{number}.", f"model.layers.{number}."
        fused = held[f"{theirs}self_attention.query_key_value"]
        by_group = fused.view(groups, heads // groups + 2, HEAD_DIM, -1)
        query, key, value = by_group.split([heads // groups, 1, 1], dim=1)
        gate, up = held[f"{theirs}mlp.dense_h_to_4h"].chunk(2)
        found |= {
            f"{ours}input_layernorm": held[f"{theirs}input_layernorm"],
            f"{ours}self_attn.q_proj": query.flatten(0, 2),
            f"{ours}self_attn.k_proj": key.flatten(0, 2),
            f"{ours}self_attn.v_proj": value.flatten(0, 2),
            f"{ours}self_attn.o_proj": held[f"{theirs}self_attention.dense"],
            f"{ours}post_attention_layernorm": held[f"{theirs}post_attention_layernorm"],
            f"{ours}mlp.gate_proj": gate,
            f"{ours}mlp.up_proj": up,
            f"{ours}mlp.down_proj": held[f"{theirs}mlp.dense_4h_to_h"],
        }
    return {f"{name}.weight": tensor for name, tensor in found.items()}


def configuration(case: Case) -> dict[str, Any]:
    """Shape of the model in Hugging Face's terms."""
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
    """Weights that are read from a path are those that ranks held, and nothing else is there.

    Where files hold masters alone, these are weights, too.
    """
    source = open_any(path).source
    known = expected(case, folder, "weight")
    kinds = {next(iter(known.values())).dtype}
    if has_masters_alone(case, path):
        kinds = {torch.float32}
    assert {key for key in source if key.startswith("model.")} == {f"model.{n}" for n in known}
    for name, tensor in known.items():
        found = source.read(f"model.{name}")
        assert found.dtype in kinds, name
        assert torch.equal(found.to(tensor.dtype), tensor), name


def has_masters_alone(case: Case, path: Path) -> bool:
    """Whether there are no rounded weights: with stage 3, and in universal checkpoints."""
    return case.zero_stage == 3 or open_any(path).format == "universal"


def assert_states(case: Case, folder: Path, path: Path) -> None:
    """The same of masters and of what Adam keeps."""
    source = open_any(path).source
    kinds = {f"optimizer.{kind}.": kind for kind in KINDS}
    if case.precision != "fp32":
        kinds["model." if has_masters_alone(case, path) else "master."] = "master"
    for prefix, kind in kinds.items():
        known = expected(case, folder, kind)
        assert {key for key in source if key.startswith(prefix)} == {prefix + n for n in known}
        for name, tensor in known.items():
            assert torch.equal(source.read(prefix + name), tensor), (prefix, name)
    step = truth(folder)[EMBEDDING]["step"]
    for name in expected(case, folder, "weight"):
        assert int(source.read(f"optimizer.step.{name}")) == step


@pytest.mark.parametrize("case", [*CASES, *PIPED, *PARTITIONED], ids=str)
def test_weights_are_those_of_the_ranks(case: Case, folders: dict[Case, Path]) -> None:
    assert_weights(case, folders[case], folders[case])


@pytest.mark.parametrize("case", [*CASES, *PIPED, *PARTITIONED], ids=str)
def test_what_is_known_of_a_checkpoint(case: Case, folders: dict[Case, Path]) -> None:
    found = open_any(folders[case])
    assert found.format == ("mds_pipeline" if case.pipeline else "mds")
    shape = found.architecture
    known = configuration(case)
    assert {name: getattr(shape, name) for name in known} == known
    assert (shape.family, shape.rope_theta) == ("llama", 5000.0)
    assert found.padded_vocab_size == PADDED
    progress = found.progress
    assert progress.iteration == STEPS
    assert (progress.consumed_samples, progress.consumed_tokens) == (SAMPLES, TOKENS)
    layout = found.layout
    assert layout.tensor_parallel_size == case.tensor
    assert layout.pipeline_parallel_size == max(1, case.pipeline)


@pytest.mark.parametrize(
    "case",
    [
        Case(0, "fp32"),
        Case(1, "bf16", tied=True),
        Case(1, "bf16", data=1, tensor=2),
        Case(0, "fp32", data=1, pipeline=2),
        Case(3, "fp32"),
    ],
    ids=str,
)
def test_transformers_computes_the_same(
    case: Case, folders: dict[Case, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    convert(source=folders[case], target=tmp_path / "hf", format="hf", dtype="fp32")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    rope = {"rope_type": "default", "rope_theta": arguments(case).rope_theta}
    theirs = LlamaForCausalLM(LlamaConfig(**configuration(case), rope_parameters=rope))
    known = {n: tensor.float() for n, tensor in expected(case, folders[case], "weight").items()}
    theirs.load_state_dict(known, strict=not case.tied)
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (ours(tokens).logits - theirs(tokens).logits).abs().max().item()
    assert difference <= 1e-5


def packed_again(folder: Path, to: Path, compression: int) -> Path:
    """A copy of a checkpoint of which a file was unpacked and packed."""
    copy = Path(shutil.copytree(folder, to))
    file = copy / f"global_step{STEPS}" / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return copy


def test_a_file_that_was_packed_again(folders: dict[Case, Path], tmp_path: Path) -> None:
    case = Case(1, "bf16")
    stored = packed_again(folders[case], tmp_path / "stored", zipfile.ZIP_STORED)
    assert_weights(case, folders[case], stored)
    packed = packed_again(folders[case], tmp_path / "packed", zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"mp_rank_00_model_states.pt: .*compressed"):
        open_any(packed)


@pytest.mark.parametrize("case", [*CASES, *PIPED, *PARTITIONED], ids=str)
def test_optimizer_states_are_those_of_the_ranks(case: Case, folders: dict[Case, Path]) -> None:
    found = open_any(folders[case])
    if case in NAMELESS:
        assert found.unread == ("optimizer states without names, of ZeRO stage 0",)
        assert not any(key.startswith("optimizer.") for key in found.source)
        return
    assert found.unread == ()
    assert_states(case, folders[case], folders[case])
    layout = found.layout
    assert layout.data_parallel_size == case.data
    # In bf16, DeepSpeed's pipelines write the shards of stage 1 for stage 0.
    assert layout.zero_stage == max(1, case.zero_stage)


@pytest.mark.parametrize("check", [assert_weights, assert_states])
@pytest.mark.parametrize("case", UNIVERSAL, ids=str)
def test_universal_checkpoints(
    check: Callable[[Case, Path, Path], None],
    case: Case,
    folders: dict[Case, Path],
    universals: dict[Case, Path],
) -> None:
    check(case, folders[case], universals[case])


@pytest.mark.parametrize(
    "case",
    [
        Case(1, "bf16"),
        Case(2, "bf16", data=4),
        Case(1, "bf16", data=1, tensor=2),
        Case(1, "bf16", data=1, pipeline=2),
    ],
    ids=str,
)
def test_deepspeed_loads_what_is_converted(
    case: Case, folders: dict[Case, Path], tmp_path: Path
) -> None:
    """From other ranks, by way of the trainer's own format, into a universal checkpoint."""
    of_two = Case(1, "fp16", data=2, tensor=2)
    begin = folders[of_two if case.tensor == 2 else Case(3, "bf16", data=4)]
    convert(source=begin, target=tmp_path / "native", format="native")
    stages = max(1, case.pipeline)
    to = tmp_path / "to"
    convert(
        source=tmp_path / "native", target=to, format="universal", pipeline_parallel_size=stages
    )
    known = truth(begin)
    for name, found in loaded(to, case).items():
        rows = VOCAB if name in (EMBEDDING, HEAD) else None
        for kind in ("master", *KINDS):
            assert torch.equal(found[kind][:rows], known[name][kind][:rows]), (name, kind)
        rounded = known[name]["master"].to(found["weight"].dtype)
        assert torch.equal(found["weight"][:rows], rounded[:rows]), name
        assert found["step"] == known[name]["step"]
