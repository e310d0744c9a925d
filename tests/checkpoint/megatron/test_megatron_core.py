"""Megatron-LM's checkpoints of today: megatron.core's names, arguments and function."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_converted_logits import of_transformers
from tests.support import cores
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout
from tokamake.checkpoint.tensors.replicas import check_copies
from tokamake.errors import UserError

FILE = Path("iter_0000007/mp_rank_00/model_optim_rng.pt")
TE = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
)
"""Names that Transformer Engine's layers have in place of the local ones."""


def written(made: Path, size: int) -> Path:
    """Checkpoints of `cores.CASES` by so many tensor-parallel ranks."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    logs = [made.with_name(f"{made.name}.{rank}.log") for rank in range(size)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, cores.__file__, str(made), str(rank), str(size)]
        with log.open("w") as stream:
            ranks.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * size, [log.read_text() for log in logs]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one rank."""
    return written(tmp_path_factory.mktemp("core") / "one", 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two, which share layers."""
    return written(tmp_path_factory.mktemp("core") / "two", 2)


def logits(folder: Path) -> Tensor:
    """Of the model that training would start from."""
    found = open_any(folder)
    weights = [key for key in found.source if key.startswith("model.")]
    read = {key.removeprefix("model."): found.source.read(key) for key in weights}
    rows, length = cores.TOKENS
    with torch.no_grad():
        model = model_tensors.to_model(found.architecture, read).eval()
        return model(torch.arange(rows * length).view(cores.TOKENS))


def resave(source: Path, target: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """The same checkpoint with another state."""
    state = torch.load(source / FILE, weights_only=False)
    edit(state)
    (target / FILE).parent.mkdir(parents=True)
    torch.save(state, target / FILE)
    return target / FILE.parts[0]


@pytest.mark.parametrize("name", cores.CASES)
def test_logits_are_megatron_cores(name: str, folder: Path) -> None:
    expected, found = torch.load(folder / name / "logits.pt"), logits(folder / name)
    assert expected.std() > 1
    torch.testing.assert_close(found, expected[..., : found.shape[-1]], rtol=0, atol=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in cores.CASES if name != "gpt-exact"])
def test_logits_of_two_ranks_are_megatron_cores(name: str, shared: Path) -> None:
    found = open_any(shared / name)
    assert found.layout == ParallelLayout(2)
    check_copies(found.source)
    expected, own = torch.load(shared / name / "logits.pt"), logits(shared / name)
    torch.testing.assert_close(own, expected[..., : own.shape[-1]], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", cores.CASES)
def test_states_are_those_of_megatron_cores_parameters(name: str, folder: Path) -> None:
    assert_stepped(open_any(folder / name))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_states_of_two_ranks_are_those_of_their_parameters(name: str, shared: Path) -> None:
    assert_stepped(open_any(shared / name))


def assert_stepped(found: Checkpoint) -> None:
    """See that moments are what `cores` has made them."""
    check_copies(found.source)
    weights = [key for key in found.source if key.startswith("model.")]
    for key in weights:
        name, whole = key.removeprefix("model."), found.source.read(key)
        assert torch.equal(found.source.read(f"optimizer.exp_avg.{name}"), whole / 2), name
        second = found.source.read(f"optimizer.exp_avg_sq.{name}")
        assert torch.equal(second, whole * whole / 4), name
        assert found.source.number(f"optimizer.step.{name}") == 1
    assert len([*found.source]) == 4 * len(weights)


@pytest.mark.parametrize("name", ["llama3", "llama-tied"])
def test_transformers_computes_the_same_after_a_conversion(
    name: str, folder: Path, tmp_path: Path
) -> None:
    convert(source=folder / name, target=tmp_path / "hf", format="hf")
    expected = torch.load(folder / name / "logits.pt")
    torch.testing.assert_close(
        of_transformers(tmp_path / "hf")[:, :24], expected, rtol=0, atol=1e-4
    )


def test_transformer_engines_names_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    def rename(state: dict[str, Any]) -> None:
        for name in [*state["model"]]:
            value = state["model"].pop(name)
            for before, after in TE:
                name = re.sub(before, after, name)
            state["model"][name] = value
        assert "decoder.layers.3.mlp.linear_fc1.layer_norm_weight" in state["model"]
        state["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.zeros(5).byte()

    made = resave(folder / "gpt", tmp_path, rename)
    torch.testing.assert_close(
        logits(made), torch.load(folder / "gpt/logits.pt"), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (3, 1)])
def test_stages_of_a_pipeline_and_the_tied_head_of_the_last(
    counts: tuple[int, int], folder: Path, tmp_path: Path
) -> None:
    state = torch.load(folder / "llama-tied" / FILE, weights_only=False)
    state["args"].pipeline_model_parallel_size = 2
    whole = state["model"]
    for stage in range(2):
        part = {}
        for name, value in whole.items():
            number = re.search(r"\.layers\.(\d+)", name)
            if number is None:
                if name.startswith("embedding") == (stage == 0):
                    part[name] = value
            elif (int(number[1]) >= counts[0]) == stage:
                own = int(number[1]) - stage * counts[0]
                part[name.replace(number[0], f".layers.{own}")] = value
        if stage:
            part["output_layer.weight"] = whole["embedding.word_embeddings.weight"]
        file = tmp_path / f"iter_0000007/mp_rank_00_{stage:03d}/model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save({**state, "model": part}, file)
    found = open_any(tmp_path / "iter_0000007")
    assert (found.layout, found.progress.iteration) == (ParallelLayout(1, 2), 7)
    expected = torch.load(folder / "llama-tied/logits.pt")
    torch.testing.assert_close(logits(tmp_path / "iter_0000007"), expected, rtol=0, atol=1e-4)
    convert(source=tmp_path / "iter_0000007", target=tmp_path / "back", format="megatron")


def test_a_weight_in_8_bit_is_refused(folder: Path, tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def narrow(state: dict[str, Any]) -> None:
        state["model"][name] = state["model"][name].to(torch.float8_e4m3fn)

    made = resave(folder / "llama", tmp_path, narrow)
    with pytest.raises(UserError, match=r"dense_4h_to_h\.weight is torch\.float8_e4m3fn; save we"):
        open_any(made)


def test_tensors_that_no_family_has_are_named(folder: Path, tmp_path: Path) -> None:
    made = resave(
        folder / "llama",
        tmp_path,
        lambda state: state["model"].update({"decoder.layers.0.mlp.router.weight": torch.ones(4)}),
    )
    with pytest.raises(UserError, match=r"mlp\.router\.weight is not part of the model"):
        open_any(made)
