"""Checkpoints of Megatron's first versions: other orders and names, and no arguments."""

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import berts, megatron_names, t5s
from tests.support.families import FAMILIES, assert_same, weights
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
BERT = berts.bert(**WIDE, intermediate_size=512, hidden_act="gelu_new")
MODELS = {
    "bert": BERT,
    "bert-without-order": berts.bert(sentence_order_head=False, type_vocab_size=0),
    "t5": t5s.t5(),
    "gpt2": FAMILIES["gpt2"],
}
NUM_RANKS = 2
"""Tensor-parallel ranks."""


def older(name: str) -> str:
    """Name of a tensor in Megatron's first versions."""
    return name.replace("self_attention", "attention")


def in_order_of(version: float, fused: torch.Tensor, *, num_parts: int, head: int) -> torch.Tensor:
    """Rows of a fused tensor, which are heads, then parts, in the order of an earlier version."""
    rows = fused.view(-1, num_parts, head, *fused.shape[1:])
    if version == 0:
        rows = rows.transpose(0, 1)
    elif version < 2:
        rows = rows.transpose(1, 2)
    return rows.reshape(fused.shape).contiguous()


def write(
    folder: Path,
    architecture: Architecture,
    *,
    version: float,
    args: Any = "as written",
    num_ranks: int = NUM_RANKS,
) -> Path:
    """Write a checkpoint of some ranks as an earlier version of Megatron did."""
    source = megatron_names.in_memory(architecture, weights(architecture))
    writer.write(folder / "new", source, "megatron", Target(ParallelLayout(num_ranks)))
    for rank in range(num_ranks):
        place = Path(f"mp_rank_{rank:02d}/model_optim_rng.pt")
        state = torch.load(folder / "new/iter_0000000" / place, weights_only=False)
        model = state["model"]["language_model"]
        for stack in ("encoder", "decoder"):
            for name, tensor in model.get(stack, {}).items():
                if name.rpartition(".")[0].endswith(("query_key_value", "key_value")):
                    num_parts = 3 if "query_key_value" in name else 2
                    sizes = {"num_parts": num_parts, "head": architecture.head_dim}
                    model[stack][name] = in_order_of(version, tensor, **sizes)
        if not architecture.has_decoder:
            layers = model.pop("encoder")
            model["transformer"] = {older(name): tensor for name, tensor in layers.items()}
        del state["args"].tokamake
        kept = {"model": state["model"], "iteration": 0}
        if args is not None:
            kept["args"] = state["args"] if args == "as written" else args
        if version:
            kept["checkpoint_version"] = version
        target = folder / "release" / place
        target.parent.mkdir(parents=True)
        torch.save(kept, target)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("name", MODELS)
def test_each_version_is_read(name: str, version: float, tmp_path: Path) -> None:
    architecture = MODELS[name]
    checkpoint = open_any(write(tmp_path, architecture, version=version))
    assert checkpoint.architecture == architecture
    assert_same(checkpoint, architecture)


def test_models_without_arguments_have_those_of_their_shapes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        checkpoint = open_any(write(tmp_path, BERT, version=0, args=None))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.endswith(
        "has no args: assuming 2 attention heads of width 64, and a GELU by tanh in MLPs"
    )
    # The file does not say which rows of the vocabulary are padding.
    padded = checkpoint.architecture.vocab_size
    assert padded == 256
    assert checkpoint.architecture == BERT.model_copy(update={"vocab_size": padded})
    read = checkpoint.source.read("model.model.layers.2.self_attn.k_proj.weight")
    assert torch.equal(read, weights(BERT)["model.layers.2.self_attn.k_proj.weight"])


def test_early_arguments_lack_the_width_of_mlps(tmp_path: Path) -> None:
    early = argparse.Namespace(
        num_layers=3,
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=64,
        vocab_size=131,
    )
    checkpoint = open_any(write(tmp_path, BERT, version=1.0, args=early))
    assert checkpoint.architecture == BERT
    assert_same(checkpoint, BERT)


def test_other_models_without_arguments_are_refused(tmp_path: Path) -> None:
    narrow = berts.bert(hidden_size=96)
    with pytest.raises(UserError, match=r"has no args, and a hidden size of 96, no multiple of 64"):
        open_any(write(tmp_path / "narrow", narrow, version=0, args=None))
    with pytest.raises(UserError, match=r"has no args, which describe the model; give the check"):
        open_any(write(tmp_path / "newer", BERT, version=2.0, args=None))


def test_a_gpt_without_arguments_is_read(tmp_path: Path) -> None:
    gpt = FAMILIES["gpt2"].model_copy(update={"num_attention_heads": 1, "num_key_value_heads": 1})
    architecture = Architecture(**{**gpt.model_dump(), "head_dim": 64, "hidden_act": "gelu_new"})
    checkpoint = open_any(write(tmp_path, architecture, version=0, args=None, num_ranks=1))
    expected = {"vocab_size": checkpoint.architecture.vocab_size}
    assert checkpoint.architecture == architecture.model_copy(update=expected)
