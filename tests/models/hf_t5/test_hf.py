"""hf_t5 in transformers' folders: read, written, refused; Megatron has no such model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import hf_folder
from tests.support.t5s import HF_ARCHITECTURES
from tokamake.checkpoint import writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.errors import UserError

SHAPE = HF_ARCHITECTURES["hf_t5"]


def test_files_of_old_versions_have_copies_of_the_embedding(config: Path) -> None:
    file = config.with_name("model.safetensors")
    tensors = load_file(file)
    embedding = tensors["shared.weight"]
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies: dict[str, Any] = {unused: torch.zeros(12, 4)}
    for stack in ("encoder", "decoder"):
        copies[f"{stack}.embed_tokens.weight"] = embedding.clone()
    save_file(tensors | copies, file)
    _, read = hf_folder.read(config.parent)
    assert torch.equal(read["model.embed_tokens.weight"], embedding)
    assert torch.equal(read["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize("kind", ["mds", "mds_pipeline", "megatron", "torch_dist", "universal"])
def test_formats_of_megatron_are_refused(kind: str, config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Megatron has no model of family hf_t5; choose the format"):
        writer.write(tmp_path / "a", open_any(config.parent), kind, Target())
