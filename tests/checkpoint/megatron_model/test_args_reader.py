"""Checkpoints of Megatron without some arguments: the vocabulary size, or all of them."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import berts, hf_folder, megatron_names, t5s
from tests.support.families import FAMILIES, assert_same, weights
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.inspect import inspect
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

ROW_PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
KINDS: dict[str, dict[str, Any]] = {
    "mds": {"tensor_parallel_size": 2},
    "mds-pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "megatron": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
    "universal": {},
}
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


def padded(tmp_path: Path, name: str, kind: str, **changes: Any) -> Path:
    """Write a checkpoint with 131 tokens that does not record this size."""
    hf_folder.write(tmp_path / "start", FAMILIES[name], weights(FAMILIES[name], torch.float32))
    convert(source=tmp_path / "start", target=tmp_path / kind, format=kind, **KINDS[kind])  # type: ignore
    megatron_names.remove_tokamake_arguments(tmp_path / kind, vocab_size=None, **changes)
    # The other formats have padding anyway.
    for file in files_with_row_per_token(tmp_path / kind) if kind == "universal" else ():
        state = torch.load(file, weights_only=False)
        state["param"] = torch.cat([state["param"], torch.ones(125, 64)])
        torch.save(state, file)
    return tmp_path / kind


def files_with_row_per_token(folder: Path) -> list[Path]:
    names = ("embedding.word_embeddings", "output_layer")
    return [file for name in names for file in folder.rglob(f"*{name}.weight/fp32.pt")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_vocab_size_removes_the_padding(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = padded(tmp_path, name, kind), weights(FAMILIES[name], torch.float32)
    capsys.readouterr()
    convert(source=folder, target=tmp_path / "hf", format="hf", vocab_size=131)
    assert "vocabulary" not in capsys.readouterr().err
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == 131
    source = open_any(tmp_path / "hf").source
    assert {*source} == {f"model.{key}" for key in expected}
    for key, tensor in expected.items():
        assert torch.equal(source.read(f"model.{key}"), tensor), key


@pytest.mark.parametrize("kind", KINDS)
def test_without_vocab_size_all_rows_are_kept_with_a_warning(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = padded(tmp_path, "llama", kind)
    rows = open_any(folder).source.shapes["model.lm_head.weight"][0]
    assert rows > 131
    capsys.readouterr()
    convert(source=folder, target=tmp_path / "hf", format="hf")
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f": does not record the vocabulary size, so all {rows} rows of the embedding are" in line
    assert "--vocab-size" in line
    assert open_any(tmp_path / "hf").architecture.vocab_size == rows
    inspect(folder)
    assert f"vocabulary    {rows} rows, which may include padding" in capsys.readouterr().out


def test_vocab_size_decides_the_padding_of_the_target(tmp_path: Path) -> None:
    folder = padded(tmp_path, "llama", "mds")
    convert(source=folder, target=tmp_path / "a", format="megatron", vocab_size=131)
    checkpoint = open_any(tmp_path / "a")
    assert (checkpoint.architecture.vocab_size, checkpoint.padded_vocab_size) == (131, 256)
    assert not checkpoint.is_padding_unknown
    (file,) = (tmp_path / "a").rglob("*.pt")
    stored = torch.load(file, weights_only=False)["model"]["language_model"]["output_layer"]
    mean = weights(FAMILIES["llama"], torch.float32)["lm_head.weight"].mean(0)
    torch.testing.assert_close(stored["weight"][131:], mean.expand(125, -1))


def test_vocab_size_removes_the_padding_of_optimizer_states(tmp_path: Path) -> None:
    folder, expected = padded(tmp_path, "llama", "universal"), weights(FAMILIES["llama"])
    for file in folder.rglob("fp32.pt"):
        state = torch.load(file, weights_only=False)
        state["param"] = -state["param"]
        torch.save(state, file.with_name("exp_avg.pt"))
    convert(source=folder, target=tmp_path / "native", format="native", vocab_size=131)
    source = open_any(tmp_path / "native").source
    for key in ROW_PER_TOKEN:
        moments = source.read(f"optimizer.exp_avg.{key}")
        assert torch.equal(moments, -source.read(f"model.{key}"))
        assert moments.shape == expected[key].shape


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, r"--vocab-size 0: the embedding in .* has 256 rows; give 1 to 256"),
        (257, r"--vocab-size 257: the embedding in .* has 256 rows; give 1 to 256"),
    ],
)
def test_a_vocab_size_out_of_range_is_refused(size: int, message: str, tmp_path: Path) -> None:
    folder = padded(tmp_path, "llama", "mds")
    with pytest.raises(UserError, match=message):
        convert(source=folder, target=tmp_path / "hf", format="hf", vocab_size=size)
    assert not (tmp_path / "hf").exists()


def test_a_vocab_size_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    padded(tmp_path, "llama", "mds")
    source = tmp_path / "start"
    with pytest.raises(UserError, match=r"--vocab-size 100: .* says that it has 131 tokens; leave"):
        convert(source=source, target=tmp_path / "hf", format="hf", vocab_size=100)
    convert(source=source, target=tmp_path / "hf", format="hf", vocab_size=131)


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
