"""Distributed checkpoints of Megatron-LM: read as megatron.core has saved them, written for it."""

import argparse
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.megatron.test_format import logits
from tests.checkpoint.torch_dist.conftest import ONE, edited, run
from tests.support import dist_cores
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint, Target
from tokamake.checkpoint.torch_dist import format as torch_dist
from tokamake.errors import UserError


def plain_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors as megatron.core itself loads them, without knowing the model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    (path,) = folder.glob("iter_*")
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def expected_weights(folder: Path, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return whole weights, cut out of the sharded tensors with plain torch."""
    tensors, shape = plain_tensors(folder), checkpoint.architecture
    head, groups = shape.head_dim, shape.num_key_value_heads
    queries = shape.num_attention_heads // groups
    weights = {}
    for kind in ("weight", "bias"):
        for layer in range(shape.num_hidden_layers):
            of_layer = {
                key.removeprefix("decoder.layers."): each[layer]
                for key, each in tensors.items()
                if key.startswith("decoder.layers.") and key.endswith(kind)
            }
            names = {
                "self_attn.o_proj": f"self_attention.linear_proj.{kind}",
                "self_attn.q_norm": f"self_attention.q_layernorm.{kind}",
                "self_attn.k_norm": f"self_attention.k_layernorm.{kind}",
                "input_layernorm": f"self_attention.linear_qkv.layer_norm_{kind}",
                "post_attention_layernorm": f"mlp.linear_fc1.layer_norm_{kind}",
                "mlp.down_proj": f"mlp.linear_fc2.{kind}",
                "mlp.gate": f"mlp.router.{kind}",
                "mlp.experts.down_proj": f"mlp.experts.experts.linear_fc2.{kind}",
            }
            found = {ours: of_layer[key] for ours, key in names.items() if key in of_layer}
            if (fused := of_layer.get(f"self_attention.linear_qkv.{kind}")) is not None:
                by_group = fused.view(groups, queries + 2, head, *fused.shape[1:])
                for name, rows in (
                    ("q", by_group[:, :queries]),
                    ("k", by_group[:, queries]),
                    ("v", by_group[:, queries + 1]),
                ):
                    found[f"self_attn.{name}_proj"] = rows.reshape(-1, *fused.shape[1:])
            if (fused := of_layer.get(f"mlp.linear_fc1.{kind}")) is not None:
                if shape.family == "gpt":
                    found["mlp.up_proj"] = fused
                else:
                    found["mlp.gate_proj"], found["mlp.up_proj"] = fused.chunk(2)
            if (fused := of_layer.get(f"mlp.experts.experts.linear_fc1.{kind}")) is not None:
                for name, stack in zip(("gate", "up"), fused.chunk(2, 1), strict=True):
                    found[f"mlp.experts.{name}_proj"] = stack
            weights |= {f"model.layers.{layer}.{name}.{kind}": each for name, each in found.items()}
        if (norm := tensors.get(f"decoder.final_layernorm.{kind}")) is not None:
            weights[f"model.norm.{kind}"] = norm
    rows = shape.vocab_size
    weights["model.embed_tokens.weight"] = tensors["embedding.word_embeddings.weight"][:rows]
    if (positions := tensors.get("embedding.position_embeddings.weight")) is not None:
        weights["model.embed_positions.weight"] = positions
    if not shape.tie_word_embeddings:
        weights["lm_head.weight"] = tensors["output_layer.weight"][:rows]
    return weights


def assert_tensors_of_megatron(folder: Path) -> None:
    """Check all tensors of a checkpoint with states of the single step of `dist_cores`."""
    checkpoint = open_any(folder)
    source, expected = checkpoint.source, expected_weights(folder, checkpoint)
    assert checkpoint.format == "torch_dist"
    assert not checkpoint.unread
    assert {key for key in source if key.startswith("model.")} == {f"model.{n}" for n in expected}
    kinds = {key.split(".")[1] for key in source if key.startswith("optimizer.")}
    assert kinds == ({"step", "exp_avg", "exp_avg_sq"} if kinds else set())
    for name, weight in expected.items():
        assert torch.equal(source.read(f"model.{name}"), weight), name
        if not kinds:
            continue
        assert source.number(f"optimizer.step.{name}") == 1
        # The gradient, from which Adam's first step of size LR went.
        gradient = 2 * source.read(f"optimizer.exp_avg.{name}")
        second = source.read(f"optimizer.exp_avg_sq.{name}")
        torch.testing.assert_close(second, gradient**2 / 4, msg=name)
        is_rounded = weight.dtype != torch.float32
        exact = source.read(f"master.{name}") if is_rounded else weight
        assert torch.equal(exact.to(weight.dtype), weight)
        decay = 1 - dist_cores.LR * dist_cores.DECAY if weight.dim() > 1 else 1
        step = dist_cores.LR * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(exact, gradient * decay - step, rtol=1e-5, atol=1e-6, msg=name)
    if kinds:
        settings = {"lr": dist_cores.LR, "weight_decay": dist_cores.DECAY}
        expected_notes = {**settings, "betas": [0.5, 0.75], "eps": 1e-8}
        assert checkpoint.notes[OPTIMIZER_SETTINGS] == expected_notes


SAVED = (
    "llama-none",
    "gpt-plain",
    "llama-plain-bf16",
    "llama-tied-plain-fp16",
    "qwen3-fully_reshardable-bf16",
    "llama-dp_reshardable",
    "mixtral-grouped-fully_reshardable-bf16",
    "qwen3_moe-dp_reshardable",
)


@pytest.mark.parametrize("name", SAVED)
def test_all_tensors_are_those_that_megatron_core_has_saved(name: str, folder: Path) -> None:
    assert_tensors_of_megatron(folder / name)


def test_progress_layout_and_loss_scale_are_those_of_the_run(folder: Path) -> None:
    checkpoint = open_any(folder / "llama-tied-plain-fp16")
    assert (checkpoint.progress.iteration, checkpoint.progress.consumed_samples) == (7, 70)
    assert checkpoint.notes["loss_scale"] == (1024.0, 1)
    assert open_any(folder / "llama-none").architecture.vocab_size == 131


@pytest.mark.parametrize("name", [name for name in SAVED if "reshardable" in name])
def test_the_classic_file_of_the_distributed_optimizer_holds_the_same(
    name: str, folder: Path
) -> None:
    assert_same(open_any(folder / name / "classic/iter_0000007"), open_any(folder / name))


def assert_same(first: Checkpoint, second: Checkpoint) -> None:
    assert not first.unread
    assert {*first.source} == {*second.source}
    for key in first.source:
        assert torch.equal(first.source.read(key), second.source.read(key)), key
    assert first.notes[OPTIMIZER_SETTINGS] == second.notes[OPTIMIZER_SETTINGS]
    assert first.progress == second.progress


@pytest.mark.parametrize(
    "kind", [pytest.param("plain", marks=pytest.mark.grid), "fully_reshardable"]
)
def test_megatron_core_loads_weights_and_states_that_are_written(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """Of 16-bit weights, into the optimizer with fp32 weights and into the distributed one."""
    starts = {
        "llama-bf16": folder / "llama-plain-bf16",
        "mixtral-bf16": folder / "mixtral-grouped-fully_reshardable-bf16",
    }
    for name, start in starts.items():
        convert(source=start, target=tmp_path / name, format="torch-dist")
    run("load", tmp_path / "back", ONE, *(str(tmp_path / name / kind) for name in starts))
    for name, start in starts.items():
        assert_same(open_any(start), open_any(tmp_path / "back" / name / kind))


def test_logits_are_those_of_the_classic_checkpoint(folder: Path) -> None:
    classic = folder / "qwen3-fully_reshardable-bf16/classic/iter_0000007"
    assert torch.equal(logits(classic), logits(folder / "qwen3-fully_reshardable-bf16"))


def test_conversions_there_and_back_keep_all_tensors(folder: Path, tmp_path: Path) -> None:
    start = folder / "qwen3-fully_reshardable-bf16"
    convert(source=start, target=tmp_path / "native", format="native")
    convert(source=tmp_path / "native", target=tmp_path / "there", format="torch-dist")
    convert(source=tmp_path / "there", target=tmp_path / "back", format="native")
    assert_same(open_any(tmp_path / "native"), open_any(tmp_path / "back"))


@pytest.mark.parametrize(
    "options",
    [
        {"format": "torch-dist"},
        {"format": "megatron"},
        {"format": "megatron", "zero_stage": 1, "pipeline_parallel_size": 2},
    ],
)
def test_states_of_expert_parallel_ranks_are_written_and_read(
    options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    start = folder / "mixtral-grouped-fully_reshardable-bf16"
    convert(source=start, target=tmp_path / "a", expert_parallel_size=2, **options)
    checkpoint = open_any(tmp_path / "a")
    assert_same(open_any(start), checkpoint)
    files = [*tmp_path.rglob("common.pt"), *tmp_path.rglob("model_optim_rng.pt")]
    assert len(files) == (
        1 if options["format"] == "torch-dist" else 2 * options.get("pipeline_parallel_size", 1)
    )
    for file in files:
        state = torch.load(file, weights_only=False)
        assert state["args"].expert_model_parallel_size == len(state["optimizer"]) == 2


def test_small_files_hold_the_same_tensors(folder: Path, tmp_path: Path) -> None:
    start = open_any(folder / "llama-plain-bf16")
    writer.write(tmp_path / "a", start, "torch_dist", Target(max_shard_bytes=100_000))
    assert len([*tmp_path.glob("a/iter_0000007/__0_*.distcp")]) > 5
    assert_same(start, open_any(tmp_path / "a"))


def test_fp32_weights_are_stored_once_under_the_names_of_both_optimizers(
    folder: Path, tmp_path: Path
) -> None:
    convert(source=folder / "llama-plain-bf16", target=tmp_path / "a", format="torch-dist")
    tensors = plain_tensors(tmp_path / "a")
    masters = {key for key in tensors if key.startswith("optimizer.state.fp32_param.")}
    assert len(masters) == 9
    for key in masters:
        assert torch.equal(tensors[key], tensors[key.replace("fp32_param", "param")])
    size = sum(file.stat().st_size for file in tmp_path.glob("a/*/*.distcp"))
    once = 103_360 * (2 + 3 * 4)
    assert size < 1.5 * once  # the archives around small tensors take the remainder


def with_common_state_in_an_archive(source: Path, target: Path, num_ranks: int = 1) -> Path:
    """Copy a checkpoint, and store its common state as Megatron-LM does since August 2026."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    shutil.copytree(source, target)
    (path,) = target.glob("iter_*")
    state = torch.load(path / "common.pt", weights_only=False)
    (path / "common.pt").unlink()
    with (path / "__7_0.distcp").open("wb") as stream:
        stream.write(bytes(64))
        torch.save([state] * num_ranks, stream)
        size = stream.tell() - 64
    metadata = FileSystemReader(path).read_metadata()
    key = "common_state/shard_0_1"
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo("__7_0.distcp", 64, size)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return target


def test_the_common_state_may_lie_in_an_archive(folder: Path, tmp_path: Path) -> None:
    start = folder / "llama-tied-plain-fp16"
    moved = open_any(with_common_state_in_an_archive(start, tmp_path / "a"))
    assert_same(moved, open_any(start))
    assert moved.notes["loss_scale"] == (1024.0, 1)
    with pytest.raises(UserError, match="damaged at common_state/shard_0_1, which is not one obj"):
        open_any(with_common_state_in_an_archive(start, tmp_path / "b", num_ranks=2))


def test_a_tensor_for_each_layer_is_read(folder: Path) -> None:
    assert "decoder.layers.3.mlp.linear_fc2.weight" in plain_tensors(folder / "gpt-layers")
    assert_same(open_any(folder / "gpt-layers"), open_any(folder / "gpt-plain"))


def test_metadata_says_how_the_optimizer_is_sharded(folder: Path, tmp_path: Path) -> None:
    convert(source=folder / "llama-plain-bf16", target=tmp_path / "a", format="torch-dist")
    (path,) = tmp_path.glob("a/iter_*")
    assert json.loads((path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    # As Megatron-LM does, with no class but those of its arguments.
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(path / "common.pt", weights_only=True)
    assert state["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert state["args"].no_save_rng
    assert not state["args"].no_save_optim


@pytest.mark.parametrize("rates", [{"max_lr": 3e-4, "min_lr": 3e-5}, {"max_lr": 3e-4}, {}])
def test_groups_have_the_learning_rates_by_which_megatron_finds_them(
    rates: dict[str, float], folder: Path, tmp_path: Path
) -> None:
    """Megatron-LM since 2026 compares max_lr and min_lr with --lr and --min-lr."""
    start = open_any(folder / "llama-plain-bf16")
    start = replace(start, notes={**start.notes, "lr_scheduler": rates})
    writer.write(tmp_path / "a", start, "torch_dist", Target())
    (path,) = tmp_path.glob("a/iter_*")
    state = torch.load(path / "common.pt", weights_only=False)
    for group, decays in zip(state["optimizer"]["optimizer"]["param_groups"], (1, 0), strict=True):
        assert {name: group[name] for name in ("max_lr", "min_lr") if name in group} == rates
        assert group["weight_decay"] == dist_cores.DECAY * decays
        assert (group["wd_mult"], group["step"]) == (decays, 1)
    # The Adam of Transformer Engine refuses step counts of parameters.
    assert state["optimizer"]["optimizer"]["state"] == {}
    warned = [line for line in torch_dist.warnings(start) if "of its schedule" in line]
    assert len(warned) == (len(rates) < 2)


def test_a_checkpoint_without_states_says_what_megatron_needs(folder: Path) -> None:
    (warning,) = torch_dist.warnings(open_any(folder / "llama-none"))
    assert "has no optimizer states: give Megatron-LM --no-load-optim or --finetune" in warning


@pytest.mark.grid
def test_fewer_key_value_heads_than_ranks_leave_out_states_in_buckets(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "llama-dp_reshardable", tmp_path / "a")
    edited(tensor_model_parallel_size=8)(tmp_path / "a/iter_0000007")
    checkpoint = open_any(tmp_path / "a")
    assert {key.partition(".")[0] for key in checkpoint.source} == {"model"}
    assert checkpoint.unread == ("optimizer states of 1 model-parallel ranks",)


def test_another_folder_with_a_file_of_that_name_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint of a known format"):
        open_any(tmp_path)
