"""Checkpoints of current Megatron-LM: names, arguments and outputs of megatron.core."""

import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_convert_logits import of_transformers
from tests.support import cores
from tests.support.core_arguments import BERTS, CASES, OF_ALL, T5S
from tests.support.programs import core_python
from tests.support.shared_folders import made_once
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout
from tokamake.checkpoint.tensors.chunks import check_replicas
from tokamake.errors import UserError

FILE = Path("iter_0000007/mp_rank_00/model_optim_rng.pt")
TE = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
)
"""Patterns of names in megatron.core's local layers, and the names in Transformer Engine's."""
ALONE = ("gpt-exact", "deepseek_v2", "deepseek_v3", "gpt_oss")
"""Cases of a single rank. gpt-exact has one key and value head. Local layers divide projections to
latent vectors, but Transformer Engine's do not. megatron.core divides no experts with biases."""


def write_cases(folder: Path, size: int) -> None:
    """Write the checkpoints of `CASES` on `size` tensor-parallel ranks."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    logs = [folder.with_name(f"{folder.name}.{rank}.log") for rank in range(size)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [core_python(), cores.__file__, str(folder), str(rank), str(size)]
        with log.open("w") as stream:
            ranks.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * size, [log.read_text() for log in logs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a single rank."""
    return made_once(tmp_path_factory, "core-one", partial(write_cases, size=1))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two tensor-parallel ranks."""
    return made_once(tmp_path_factory, "core-two", partial(write_cases, size=2))


def logits(folder: Path) -> Tensor:
    """Return the logits of the model that training would start from."""
    return outputs(open_any(folder))


def outputs(checkpoint: Checkpoint, **further: Tensor) -> Any:
    """Return the outputs of a checkpoint's model."""
    keys = [key for key in checkpoint.source if key.startswith("model.")]
    weights = {key.removeprefix("model."): checkpoint.source.read(key) for key in keys}
    rows, length = cores.TOKENS
    with torch.no_grad():
        model = model_tensors.to_model(checkpoint.architecture, weights).eval()
        return model(torch.arange(rows * length).view(cores.TOKENS), **further)


def resave(source: Path, target: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """Write a copy of a checkpoint with an edited state."""
    state = torch.load(source / FILE, weights_only=False)
    edit(state)
    (target / FILE).parent.mkdir(parents=True)
    torch.save(state, target / FILE)
    return target / FILE.parts[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_megatron_core(name: str, folder: Path) -> None:
    expected, actual = torch.load(folder / name / "logits.pt"), logits(folder / name)
    expected = expected.split(cores.TOKENS[1], dim=1)
    of_mtp = CASES[name].get("mtp_num_layers")
    assert expected[0].std() > 1
    torch.testing.assert_close(actual, expected[0][..., : actual.shape[-1]], rtol=0, atol=1e-4)
    assert len(expected) == 1 + bool(of_mtp)
    if of_mtp:
        actual = logits_of_mtp(open_any(folder / name))
        # The last place has no next token.
        torch.testing.assert_close(actual[:, :-1], expected[1][:, :-1], rtol=0, atol=1e-4)


class KeptLogits:
    """Keeps the logits of a layer that predicts further tokens, in place of its loss."""

    factors = (1.0,)

    def added(self, x_BLD: Tensor, logits: Tensor, **_: Any) -> Tensor:
        self.logits = logits.detach()
        return x_BLD


def logits_of_mtp(checkpoint: Checkpoint) -> Tensor:
    """Return the logits of the first layer that predicts further tokens."""
    names = model_tensors.shapes(checkpoint.architecture)
    weights = {name: checkpoint.source.read(f"model.{name}") for name in names}
    model: Any = model_tensors.to_model(checkpoint.architecture, weights).eval()
    model.further_losses = kept = KeptLogits()
    tokens = torch.arange(cores.TOKENS[0] * cores.TOKENS[1]).view(cores.TOKENS)
    further = tokens.roll(-1, 1)[..., None]
    model(tokens, further_tokens=further, further_labels=further)
    return kept.logits


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in CASES if name not in ALONE])
def test_logits_of_two_ranks_equal_those_of_megatron_core(name: str, two_ranks: Path) -> None:
    checkpoint = open_any(two_ranks / name)
    assert checkpoint.layout == ParallelLayout(2)
    check_replicas(checkpoint.source)
    expected, actual = torch.load(two_ranks / name / "logits.pt"), logits(two_ranks / name)
    expected = expected[:, : actual.shape[1], : actual.shape[-1]]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def assert_is_bert(folder: Path) -> None:
    """Check the logits of a BERT; Megatron's rows of padding see nothing."""
    logits, order = torch.load(folder / "logits.pt")
    padding_mask, types = cores.inputs_of_bert()
    document_ids = (~padding_mask).long()
    ours = outputs(open_any(folder), token_types=types, document_ids=document_ids)
    expected = logits[..., :131][padding_mask]
    assert expected.std() > 1
    torch.testing.assert_close(ours.logits[padding_mask], expected, rtol=0, atol=1e-4)
    assert (order is None) == (ours.sample_logits is None)
    if order is not None:
        torch.testing.assert_close(ours.sample_logits, order, rtol=0, atol=1e-4)


def assert_is_t5(folder: Path) -> None:
    """Check the logits of a T5."""
    checkpoint = open_any(folder)
    assert checkpoint.architecture.family == "t5"
    padding_mask, _ = cores.inputs_of_bert()
    further = {"document_ids": (~padding_mask).long(), "decoder_tokens": cores.decoder_tokens()}
    ours = outputs(checkpoint, **further)
    expected = torch.load(folder / "logits.pt")[..., :131]
    assert expected.std() > 1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


ENCODERS = {
    **dict.fromkeys(BERTS, assert_is_bert),
    **dict.fromkeys(T5S, assert_is_t5),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_those_of_megatron_core(name: str, folder: Path) -> None:
    ENCODERS[name](folder / name)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_of_two_ranks_equal_those_of_megatron_core(name: str, two_ranks: Path) -> None:
    check_replicas(open_any(two_ranks / name).source)
    ENCODERS[name](two_ranks / name)


@pytest.mark.parametrize("name", OF_ALL)
def test_optimizer_states_belong_to_the_right_parameters(name: str, folder: Path) -> None:
    assert_states_of_one_step(open_any(folder / name))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_optimizer_states_of_two_ranks_belong_to_the_right_parameters(
    name: str, two_ranks: Path
) -> None:
    assert_states_of_one_step(open_any(two_ranks / name))


def assert_states_of_one_step(checkpoint: Checkpoint) -> None:
    """Check the moments: the single step of `cores` makes them functions of the weights."""
    source = checkpoint.source
    check_replicas(source)
    weights = [key for key in source if key.startswith("model.")]
    keys = [key for key in weights if not key.endswith(model_tensors.WITHOUT_GRADIENT)]
    for key in keys:
        name, weight = key.removeprefix("model."), source.read(key)
        assert torch.equal(source.read(f"optimizer.exp_avg.{name}"), weight / 2), name
        second = source.read(f"optimizer.exp_avg_sq.{name}")
        assert torch.equal(second, weight * weight / 4), name
        assert source.number(f"optimizer.step.{name}") == 1
    assert len([*source]) == len(weights) + 3 * len(keys)


@pytest.mark.parametrize("name", ["llama3", "llama-tied"])
def test_transformers_computes_the_same_logits_after_conversion(
    name: str, folder: Path, tmp_path: Path
) -> None:
    convert(source=folder / name, target=tmp_path / "hf", format="hf")
    expected = torch.load(folder / name / "logits.pt")
    torch.testing.assert_close(
        of_transformers(tmp_path / "hf")[:, :24], expected, rtol=0, atol=1e-4
    )


def test_names_of_transformer_engine_give_the_same_model(folder: Path, tmp_path: Path) -> None:
    def rename(state: dict[str, Any]) -> None:
        for name in [*state["model"]]:
            value = state["model"].pop(name)
            for pattern, replacement in TE:
                name = re.sub(pattern, replacement, name)
            state["model"][name] = value
        assert "decoder.layers.3.mlp.linear_fc1.layer_norm_weight" in state["model"]
        state["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.zeros(5).byte()

    renamed = resave(folder / "gpt", tmp_path, rename)
    torch.testing.assert_close(
        logits(renamed), torch.load(folder / "gpt/logits.pt"), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (3, 1)])
def test_pipeline_stages_with_a_tied_head_in_the_last_give_the_same_logits(
    counts: tuple[int, int], folder: Path, tmp_path: Path
) -> None:
    state = torch.load(folder / "llama-tied" / FILE, weights_only=False)
    state["args"].pipeline_model_parallel_size = 2
    model = state["model"]
    for stage in range(2):
        stage_model = {}
        for name, value in model.items():
            layer = re.search(r"\.layers\.(\d+)", name)
            if layer is None:
                if name.startswith("embedding") == (stage == 0):
                    stage_model[name] = value
            elif (int(layer[1]) >= counts[0]) == stage:
                number = int(layer[1]) - stage * counts[0]
                stage_model[name.replace(layer[0], f".layers.{number}")] = value
        if stage:
            stage_model["output_layer.weight"] = model["embedding.word_embeddings.weight"]
        file = tmp_path / f"iter_0000007/mp_rank_00_{stage:03d}/model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save({**state, "model": stage_model}, file)
    checkpoint = open_any(tmp_path / "iter_0000007")
    assert (checkpoint.layout, checkpoint.progress.iteration) == (ParallelLayout(1, 2), 7)
    expected = torch.load(folder / "llama-tied/logits.pt")
    torch.testing.assert_close(logits(tmp_path / "iter_0000007"), expected, rtol=0, atol=1e-4)
    convert(source=tmp_path / "iter_0000007", target=tmp_path / "back", format="megatron")


def test_a_weight_in_8_bit_is_refused(folder: Path, tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def narrow(state: dict[str, Any]) -> None:
        state["model"][name] = state["model"][name].to(torch.float8_e4m3fn)

    narrowed = resave(folder / "llama", tmp_path, narrow)
    with pytest.raises(UserError, match=r"dense_4h_to_h\.weight is torch\.float8_e4m3fn; save we"):
        open_any(narrowed)


def test_an_unknown_tensor_is_an_error_with_its_name(folder: Path, tmp_path: Path) -> None:
    edited = resave(
        folder / "llama",
        tmp_path,
        lambda state: state["model"].update({"decoder.layers.0.mlp.router.weight": torch.ones(4)}),
    )
    with pytest.raises(UserError, match=r"mlp\.router\.weight is not part of the model"):
        open_any(edited)
