"""Each rank of Megatron holds its slices of the whole tensors, in the order of each version."""

import argparse
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import hf_folder, megatron_names
from tests.support.families import FAMILIES, assert_same, weights
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.config.architecture import Architecture


def chunked(architecture: Architecture, size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each of several ranks, cut from those of a single rank."""
    whole = megatron_names.megatron_tensors(architecture, weights(architecture))
    for rank in range(size):
        tensors = {}
        for name, tensor in whole.items():
            if "query_key_value" in name or "word_embeddings.w" in name or "output" in name:
                tensors[name] = tensor.chunk(size)[rank]
            elif "dense_h_to_4h" in name:
                gated = architecture.family == "llama"
                halves = tensor.chunk(2) if gated else (tensor,)
                tensors[name] = torch.cat([half.chunk(size)[rank] for half in halves])
            elif name.endswith(("dense.weight", "dense_4h_to_h.weight")):
                tensors[name] = tensor.chunk(size, dim=1)[rank]
            else:
                tensors[name] = tensor
        yield tensors


@pytest.mark.parametrize("name", ["llama", "gpt2-untied"])
def test_each_rank_holds_its_chunks_of_the_whole(name: str, tmp_path: Path) -> None:
    # 256 rows are padding for one rank and for two alike.
    architecture = FAMILIES[name]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    writer.write(tmp_path / "mds", open_any(tmp_path / "hf"), "mds", Target(ParallelLayout(2)))
    for rank, expected in enumerate(chunked(architecture, 2)):
        file = tmp_path / "mds" / "global_step0" / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(file, weights_only=False)
        tensors = dict(torch_archive.leaves(state["module"]))
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensors[key], tensor), key
        assert state["args"].tensor_model_parallel_size == 2
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("older", [False, True])
def test_each_order_of_queries_keys_and_values_is_read(
    version: float, older: bool, tmp_path: Path
) -> None:
    architecture, size = FAMILIES["gpt2"], 2
    heads, head = architecture.num_attention_heads // size, architecture.head_dim
    known = argparse.Namespace(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=48,
        num_attention_heads=8,
        max_position_embeddings=32,
        vocab_size=131,
        consumed_train_samples=70,
    )
    for rank, whole in enumerate(chunked(architecture, size)):
        model: dict[str, Any] = {}
        for name, tensor in whole.items():
            if "query_key_value" in name:
                # As of version 2 on: heads, then the three.
                parts = tensor.view(heads, 3, head, *tensor.shape[1:])
                if version == 0:
                    parts = parts.transpose(0, 1)
                elif version < 2:
                    parts = parts.transpose(1, 2)
                tensor = parts.reshape(tensor.shape).contiguous()
            if older:
                name = name.replace(".encoder.", ".transformer.")
                name = name.replace("self_attention", "attention")
            model[name] = tensor
        folder = tmp_path / "iter_0000007" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        state = {"model": model, "args": known, "iteration": 7}
        if version:
            state["checkpoint_version"] = version
        torch.save(state, folder / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    checkpoint = open_any(tmp_path)
    assert (checkpoint.progress.iteration, checkpoint.progress.consumed_samples) == (7, 70)
    assert checkpoint.architecture == architecture
    assert_same(checkpoint, architecture)


def test_a_pipeline_of_an_earlier_version_is_read_in_its_order(tmp_path: Path) -> None:
    architecture = FAMILIES["gpt2"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    convert(source=tmp_path / "hf", target=tmp_path / "pipe", format="mds-pipeline")
    for path in (tmp_path / "pipe").rglob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        if path.name.startswith("mp_rank"):
            state["checkpoint_version"] = 0
        for name in [name for name in state if "query_key_value" in name]:
            # Version 0 has the three, then heads.
            parts = state[name].view(8, 3, architecture.head_dim, *state[name].shape[1:])
            state[name] = parts.transpose(0, 1).reshape(state[name].shape).contiguous()
        torch.save(state, path)
    assert_same(open_any(tmp_path / "pipe"), architecture)


def test_virtual_stages_hold_their_layers_and_a_tied_head(tmp_path: Path) -> None:
    architecture = FAMILIES["llama-tied"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    arguments: dict[str, Any] = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="megatron", **arguments)
    checkpoint = open_any(tmp_path / "a")
    assert checkpoint.layout == ParallelLayout(1, 2, 2)
    assert_same(checkpoint, architecture)
    last = torch.load(
        tmp_path / "a/iter_0000000/mp_rank_00_001/model_optim_rng.pt", weights_only=False
    )
    # Ranks have layers 0 and 2, 1 and 3.
    assert last["model0"]["language_model"].keys() == {"encoder"}
    head = last["model1"]["word_embeddings_for_head"]["weight"]
    assert torch.equal(head[:128], weights(architecture)["model.embed_tokens.weight"])
    fused = last["model1"]["language_model"]["encoder"]["layers.0.mlp.dense_4h_to_h.weight"]
    assert torch.equal(fused, weights(architecture)["model.layers.3.mlp.down_proj.weight"])


def test_padding_is_the_mean_of_rows_and_is_removed_again(tmp_path: Path) -> None:
    architecture = FAMILIES["llama"]
    known = weights(architecture, torch.float32)
    hf_folder.write(tmp_path / "hf", architecture, known)
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="mds", tensor_parallel_size=4)
    assert open_any(tmp_path / "a").padded_vocab_size == 512
    for rank in range(4):
        file = tmp_path / "a/global_step0" / f"mp_rank_{rank:02d}_model_states.pt"
        model = torch.load(file, weights_only=False)["module"]["language_model"]
        rows = model["output_layer"]["weight"]
        own = known["lm_head.weight"][rank * 128 : (rank + 1) * 128]
        assert torch.equal(rows[: len(own)], own)
        mean = known["lm_head.weight"].double().mean(0).float()
        assert torch.equal(rows[len(own) :], mean.expand(len(rows) - len(own), -1))
