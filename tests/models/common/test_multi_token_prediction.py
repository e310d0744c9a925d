"""Layers that predict further tokens, against equations of the paper with transformers' layers.

transformers has no such layers. Here it reads a folder as a model with more layers: the further
ones are the blocks of the reference.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.support import hf_folder
from tests.support.dense import SHARED_EXPERTS, TIED, dense, latent
from tests.support.model_ranks import tokens_of
from tests.support.random_tensors import random_tensors
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.load_model import load_model
from tokamake.checkpoint.model_tensors import to_model
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.common.multi_token_prediction import MTPLosses
from tokamake.models.common.recompute import Recompute
from tokamake.parallel.loss import NO_LABEL

SHAPES = {
    "deepseek_v3": latent(num_nextn_predict_layers=2),
    "glm4_moe": dense(
        "glm4_moe",
        use_qk_norm=True,
        num_nextn_predict_layers=1,
        **SHARED_EXPERTS | TIED | {"num_experts": 6},
    ),
}
LENGTH, FACTORS, SHARE = 20, (1 / 30, 1 / 17), 0.6


def weights_of(architecture: Architecture) -> dict[str, Tensor]:
    """Random weights whose norms and biases differ, too."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: each + 0.1 * torch.randn(each.shape, generator=generator)
        for name, each in random_tensors(architecture, 1).items()
    }


def further(tokens: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of each layer; every seventh label is missing."""
    seen = torch.stack([tokens[:, k : k + LENGTH] for k in range(1, number + 1)], -1)
    labels = torch.stack([tokens[:, k + 1 : k + 1 + LENGTH] for k in range(1, number + 1)], -1)
    return seen, labels.masked_fill(labels % 7 == 0, NO_LABEL)


class Reference(torch.nn.Module):
    """transformers' model, and the equations 21 to 25 of DeepSeek-V3's report."""

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        super().__init__()
        hf_folder.write(folder, architecture, weights_of(architecture))
        stored = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] += architecture.num_mtp_layers
        (folder / "config.json").write_text(json.dumps(config))
        self.whole: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        layers = self.whole.model.layers
        first = architecture.num_hidden_layers
        self.blocks, self.whole.model.layers = layers[first:], layers[:first]
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        self.own = [
            {
                name: torch.nn.Parameter(stored[f"model.layers.{first + number}.{name}.weight"])
                for name in names
            }
            for number in range(architecture.num_mtp_layers)
        ]
        self.eps = architecture.rms_norm_eps

    def losses(self, tokens: Tensor, seen: Tensor, labels: Tensor) -> list[Tensor]:
        """Sums of the losses of the further layers."""
        model, sums = self.whole.model, []
        states = model(tokens).last_hidden_state  # after the last norm
        places = torch.arange(LENGTH)[None]
        for number, (block, own) in enumerate(zip(self.blocks, self.own, strict=True)):
            embedded = model.embed_tokens(seen[..., number])
            both = torch.cat(
                (self.norm(embedded, own["enorm"]), self.norm(states, own["hnorm"])), -1
            )
            states = block(
                both @ own["eh_proj"].T, position_embeddings=model.rotary_emb(both, places)
            )
            states = states[0] if isinstance(states, tuple) else states
            states = self.norm(states, own["shared_head.norm"])
            logits = self.whole.lm_head(states).flatten(0, 1)
            flat = labels[..., number].flatten()
            sums.append(F.cross_entropy(logits, flat, ignore_index=NO_LABEL, reduction="sum"))
        return sums

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def watched(architecture: Architecture) -> tuple[Any, MTPLosses]:
    model = to_model(architecture, weights_of(architecture))
    losses = MTPLosses(
        scaling_factor=SHARE,
        num_layers=architecture.num_mtp_layers,
        vocab_size=architecture.vocab_size or 0,
        device=torch.device("cpu"),
    )
    model.further_losses = losses  # type: ignore[assignment]
    return model, losses


@pytest.mark.parametrize("granularity", ["none", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_losses_and_gradients_equal_the_equations(
    name: str, granularity: Any, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    number = shape.num_mtp_layers
    tokens = tokens_of(shape, LENGTH + 3)
    seen, labels = further(tokens, number)
    model, losses = watched(shape)
    model.set_recompute(Recompute(granularity))
    losses.factors = FACTORS[:number]
    inputs = {"further_tokens": seen, "further_labels": labels}
    # The logits have a gradient of 0: all gradients are of the further losses.
    (model(tokens[:, :LENGTH], **inputs) * 0).sum().backward()
    reference = Reference(shape, tmp_path / "folder")
    expected = reference.losses(tokens[:, :LENGTH], seen, labels)
    mean = sum(factor * loss for factor, loss in zip(FACTORS, expected, strict=False)) / number
    (SHARE * mean).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(losses.take(), torch.stack(expected).detach(), rtol=1e-5, atol=1e-4)
    theirs = reference.whole.model
    pairs = [(model.embed_tokens, theirs.embed_tokens), (model.norm, theirs.norm)]
    if not shape.tie_word_embeddings:
        pairs.append((model.lm_head, reference.whole.lm_head))
    ours = [model.layers[str(index)] for index in range(shape.mtp_layers.stop)]
    for own, right in zip(ours, [*theirs.layers, *reference.blocks], strict=True):
        pairs += [
            (getattr(own, norm), getattr(right, norm))
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        pairs.append((own.self_attn.o_proj, right.self_attn.o_proj))
    for own, right in pairs:
        assert right.weight.grad.any()
        torch.testing.assert_close(own.weight.grad, right.weight.grad, rtol=1e-4, atol=1e-6)
    for layer, tensors in zip(ours[shape.num_hidden_layers :], reference.own, strict=True):
        for key, right in tensors.items():
            own = layer.get_parameter(f"{key}.weight")
            torch.testing.assert_close(own.grad, right.grad, rtol=1e-4, atol=1e-6)


def test_only_training_runs_the_layers() -> None:
    shape = SHAPES["deepseek_v3"]
    tokens = tokens_of(shape, LENGTH + 3)
    seen, labels = further(tokens, 2)
    inputs = {"further_tokens": seen, "further_labels": labels}
    model, losses = watched(shape)
    for layer in model.layers.values():
        layer.calls = 0
        layer.register_forward_hook(lambda layer, *_: setattr(layer, "calls", layer.calls + 1))
    model(tokens[:, :LENGTH], **inputs)  # without factors, as for validations
    losses.factors = FACTORS
    with torch.no_grad():
        logits = model(tokens[:, :LENGTH], **inputs)
    assert [layer.calls for layer in model.layers.values()] == [2, 2, 2, 0, 0]
    trained = model(tokens[:, :LENGTH], **inputs)
    assert torch.equal(trained, logits)
    assert [layer.calls for layer in model.layers.values()] == [3, 3, 3, 1, 1]
    assert len(model.new_cache(1, 10).layers) == 3


# ---- Files ----


@pytest.mark.parametrize("name", SHAPES)
def test_folders_keep_the_layers_bit_by_bit(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    hf_folder.write(tmp_path / "hf", shape, weights_of(shape))
    first = shape.num_hidden_layers
    stored = load_file(tmp_path / "hf/model.safetensors")
    prefix = f"model.layers.{first}"
    for own in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "mlp.experts.5.up_proj"):
        assert f"{prefix}.{own}.weight" in stored
    output = "model.embed_tokens" if shape.tie_word_embeddings else "lm_head"
    for copy, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", output)):
        assert torch.equal(stored[f"{prefix}.{copy}.weight"], stored[f"{of}.weight"])
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["num_nextn_predict_layers"] == shape.num_mtp_layers
    writer.write(tmp_path / "native", open_any(tmp_path / "hf"), "native", Target())
    native = open_any(tmp_path / "native")
    assert native.architecture == shape
    writer.write(tmp_path / "again", native, "hf", Target())
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[key], each) for key, each in stored.items())
    # Inference leaves them out: transformers and tokamake predict the same.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    loaded: Any = load_model(native).model
    assert len(loaded.layers) == first
    tokens = tokens_of(shape, LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def changed_folder(folder: Path, *, key: Any = None, copies: Any = None) -> Architecture:
    """Read a folder with another key, and with changed copies of the embedding."""
    shape = SHAPES["deepseek_v3"]
    hf_folder.write(folder, shape, weights_of(shape))
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = key
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [
        name for name in tensors if ".embed_tokens" in name or ".shared_head.head" in name
    ]:
        if copies and name.startswith("model.layers"):
            copies(tensors, name)
    save_file(tensors, folder / "model.safetensors")
    architecture, _ = hf_folder.read(folder)
    return architecture


def test_files_decide_how_many_layers_there_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = SHAPES["deepseek_v3"]
    assert changed_folder(tmp_path / "a", copies=dict.pop) == shape
    assert changed_folder(tmp_path / "b", key=1) == shape
    assert not caplog.text
    assert changed_folder(tmp_path / "c", key=0) == shape.without_mtp
    assert "(MTP), from layer 3 on, are left out, because config.json says num_nextn" in caplog.text
    caplog.clear()
    hf_folder.write(tmp_path / "d", shape.without_mtp, weights_of(shape.without_mtp))
    config = json.loads((tmp_path / "d/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    (tmp_path / "d/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert hf_folder.read(tmp_path / "d")[0] == shape.without_mtp
    assert "has no layers that predict further tokens (MTP), though" in caplog.text


def test_layers_that_miss_tensors_or_have_an_output_of_their_own_are_refused(
    tmp_path: Path,
) -> None:
    def other(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name] = tensors[name] + 1

    with pytest.raises(UserError, match=r"layers\.3\.\S+ differs from .* in config.json to 0"):
        changed_folder(tmp_path / "a", copies=other)
    shape = SHAPES["glm4_moe"]
    hf_folder.write(tmp_path / "b", shape, weights_of(shape))
    shutil.copy(tmp_path / "b/model.safetensors", tmp_path / "whole")
    tensors = load_file(tmp_path / "whole")
    far = tensors | {"model.layers.300000000.enorm.weight": tensors["model.norm.weight"].clone()}
    save_file(far, tmp_path / "b/model.safetensors")
    with pytest.raises(UserError, match="MTP layers: 3 to 300000000, not 3 to "):
        hf_folder.read(tmp_path / "b")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "b/model.safetensors")
    with pytest.raises(UserError, match=r"tensor model\.layers\.3\.eh_proj\.weight is missing"):
        hf_folder.read(tmp_path / "b")
