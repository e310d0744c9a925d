"""retro equals the Retro of megatron.core 0.15.3, and its checkpoints are read and written."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import retro_core
from tests.support.paths import ROOT
from tests.support.retros import ARCHITECTURES, GROUPED, retro
from tokamake.checkpoint import model_tensors, writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.megatron import format as megatron_format
from tokamake.checkpoint.model_tensors import to_model
from tokamake.checkpoint.tensors.checkpoint import (
    OPTIMIZER_SETTINGS,
    Checkpoint,
    ParallelLayout,
    Progress,
    Target,
)
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

PACKAGES = Path(sys.prefix) / "megatron-core-0.15.3"
INSTALL = (
    f"PIP_CONSTRAINT= pip install --no-deps --target {PACKAGES} megatron-core=={PACKAGES.name[14:]}"
)
KEPT = {
    "megatron": ParallelLayout(),
    "megatron-tp2": ParallelLayout(2),
    "torch_dist": ParallelLayout(),
    "native": ParallelLayout(),
}
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
SETTINGS = {"lr": 0.25, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def run_core(do: str, folder: Path) -> None:
    """Run megatron.core 0.15.3, which cannot be imported beside the newer one."""
    path = os.pathsep.join(map(str, (PACKAGES, ROOT)))
    command = [sys.executable, "-W", "ignore", retro_core.__file__, do, str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classic checkpoints of megatron.core, with logits and gradients."""
    if not PACKAGES.is_dir():
        pytest.skip(INSTALL)
    folder = tmp_path_factory.mktemp("theirs") / "core"
    run_core("save", folder)
    return folder


def opened_model(checkpoint: Checkpoint) -> Any:
    """The model of a checkpoint."""
    source = checkpoint.source
    tensors = {name.removeprefix("model."): source.read(name) for name in source}
    return to_model(checkpoint.architecture, tensors).requires_grad_()


@pytest.mark.slow
@pytest.mark.parametrize("name", retro_core.CASES)
def test_logits_and_gradients_equal_megatron_core(name: str, theirs: Path, tmp_path: Path) -> None:
    checkpoint = open_any(theirs / name / "torch")
    oracle = torch.load(theirs / name / "oracle.pt")
    model, neighbors = opened_model(checkpoint), oracle["neighbors"]
    counts = torch.full(neighbors.shape[:-1], neighbors.shape[-1])
    logits = model(oracle["tokens"], neighbor_tokens=neighbors, num_neighbor_tokens=counts)
    assert (logits - oracle["logits"]).abs().max() <= 2e-6 * oracle["logits"].abs().max()
    logits.square().mean().backward()
    # Their gradients are read as a checkpoint of weights.
    file = theirs / name / "torch/iter_0000007/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"] = oracle["gradients"]
    written = tmp_path / "iter_0000007/mp_rank_00/model_optim_rng.pt"
    written.parent.mkdir(parents=True)
    torch.save(state, written)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    source = open_any(tmp_path).source
    largest = max(gradient.abs().max() for gradient in oracle["gradients"].values())
    for parameter, own in model.named_parameters():
        expected = source.read(f"model.{model.tensor_name(parameter)}")
        # Gradients of the biases of keys are 0, but for rounding.
        assert (own.grad - expected).abs().max() <= 1e-5 * largest, parameter


@pytest.mark.slow
@pytest.mark.grid
def test_checkpoints_of_megatron_core_are_read_and_written(theirs: Path) -> None:
    unpadded = Target(make_vocab_size_divisible_by=32)
    run_core("distribute", theirs)
    for name in retro_core.CASES:
        folder = theirs / name
        checkpoint = open_any(folder / "torch")
        shape = checkpoint.architecture
        assert (shape.family, shape.setting("decoder")) == ("retro", name)
        assert [*shape.retrieval_layers] == [5, 8]
        assert (shape.setting("chunk_length"), shape.setting("final_norm")) == (4, False)
        assert shape.setting("encoder_attention_dropout") == 0.2
        distributed = open_any(folder / "torch_dist")
        assert distributed.architecture == shape
        for key in checkpoint.source:
            assert torch.equal(distributed.source.read(key), checkpoint.source.read(key)), key
        writer.write(folder / "ours-torch", distributed, "megatron", unpadded)
        writer.write(folder / "ours-torch_dist", checkpoint, "torch_dist", unpadded)
    run_core("load", theirs)
    for name in retro_core.CASES:
        expected = torch.load(theirs / name / "oracle.pt")["logits"]
        for form in ("torch", "torch_dist"):
            logits = torch.load(theirs / name / f"ours-{form}/logits.pt")
            assert torch.equal(logits, expected), (name, form)


def trained(architecture: Architecture) -> Checkpoint:
    """A checkpoint in memory, with Adam's states."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, shape in model_tensors.shapes(architecture).items():
        for kind in KINDS:
            tensors[f"{kind}.{name}"] = torch.randn(tuple(shape), generator=generator)
        tensors[f"optimizer.step.{name}"] = torch.tensor(7.0)
    return Checkpoint(
        "native",
        Path(),
        architecture,
        TensorSource([], {}, in_memory=tensors),
        progress=Progress(7, 56, 448),
        notes={OPTIMIZER_SETTINGS: SETTINGS},
    )


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_formats_keep_every_bit_and_the_states_of_adam(
    name: str, kind: str, tmp_path: Path
) -> None:
    checkpoint = trained(ARCHITECTURES[name])
    writer.write(tmp_path, checkpoint, kind.partition("-")[0], Target(KEPT[kind]))
    written = open_any(tmp_path)
    assert written.architecture == checkpoint.architecture
    assert {*written.source} == {*checkpoint.source}
    for key in checkpoint.source:
        assert torch.equal(written.source.read(key), checkpoint.source.read(key)), key


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folders_of_hugging_face_keep_the_model(name: str, tmp_path: Path) -> None:
    checkpoint = trained(ARCHITECTURES[name])
    writer.write(tmp_path / "hf", checkpoint, "hf", Target())
    written = open_any(tmp_path / "hf")
    assert written.architecture == checkpoint.architecture
    assert {*written.source} == {key for key in checkpoint.source if key.startswith("model.")}
    for key in written.source:
        assert torch.equal(written.source.read(key), checkpoint.source.read(key)), key


@pytest.mark.parametrize("form", ["mds", "mds_pipeline", "universal"])
def test_formats_without_such_a_model_are_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="format: "):
        writer.write(tmp_path / "there", trained(ARCHITECTURES["retro-gpt"]), form, Target())
    assert not (tmp_path / "there").exists()


def test_shared_heads_of_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_key_value_heads: 2: Megatron's Retros have as many"):
        writer.write(tmp_path / "there", trained(GROUPED), "megatron", Target())


def test_layers_that_megatron_cannot_have_are_named() -> None:
    (_, text) = megatron_format.warnings(trained(ARCHITECTURES["retro-gpt"]))
    assert "no argument for first_retrieval_layer and retrieval_interval, final_norm" in text
    published = {"first_retrieval_layer": 0, "retrieval_interval": 3, "num_hidden_layers": 6}
    shape = retro(decoder="gpt", final_norm=False, **published)
    assert len(megatron_format.warnings(trained(shape))) == 1
