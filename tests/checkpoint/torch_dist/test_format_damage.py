"""Damaged checkpoints of megatron-core are refused with the file and the fault."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.torch_dist.conftest import edited
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.errors import UserError


def renamed(old: str, new: str) -> Callable[[Path], None]:
    """Rename a tensor, which keeps its length in the pickle."""
    assert len(old) == len(new)

    def rename(path: Path) -> None:
        content = (path / ".metadata").read_bytes()
        assert old.encode() in content
        (path / ".metadata").write_bytes(content.replace(old.encode(), new.encode()))

    return rename


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: (path / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            r"metadata\.json: sharded_backend: 'zarr': is not supported; load it with the Megatr",
        ),
        (
            lambda path: (path / "metadata.json").write_text("{"),
            r"metadata\.json: not valid JSON .*; fetch or write the checkpoint again",
        ),
        (
            without("metadata.json"),
            r"iter_0000007: has no metadata\.json, which Megatron-LM writes la",
        ),
        (without("common.pt"), r"common\.pt: no such file; fetch or write"),
        (without(".metadata"), r"\.metadata: no such file; name another checkpoint"),
        (without("__0_1.distcp"), r"__0_1\.distcp: no such file; name another checkpoint"),
        (
            lambda path: os.truncate(path / "__0_1.distcp", 1000),
            r"__0_1\.distcp: damaged: has 1,000 of [\d,]+ bytes",
        ),
        (
            edited(num_layers=5),
            r"linear_\w+\.\w+ has shape \[4, [\d, ]+\], the architecture calls ",
        ),
        (edited(hidden_size=48), r"has shape \[.*64\], the architecture calls for \[.*48\]"),
        (
            renamed("mlp.linear_fc2.weight", "mlp.linear_fc3.weight"),
            r"mlp\.linear_fc2\.weight is missing, and .*linear_fc3\.weight is not part of the mod",
        ),
        (renamed("word_embeddings", "word_embedding_"), r"has no embedding\.word_embeddings\.weig"),
        (
            lambda path: torch.save([1], path / "common.pt"),
            r"common\.pt: holds no state of a checkpoint",
        ),
    ],
)
def test_damage_is_one_clear_error(
    damage: Callable[[Path], None], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "llama-none", tmp_path / "a")
    damage(tmp_path / "a/iter_0000007")
    with pytest.raises(UserError, match=message):
        open_any(tmp_path / "a")


def test_a_state_of_another_kind_is_left_behind_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "llama-plain-bf16", tmp_path / "a")
    old = "optimizer.state.exp_avg.output_layer.weight"
    renamed(old, old.replace("output", "hidden"))(tmp_path / "a/iter_0000007")
    convert(source=tmp_path / "a", target=tmp_path / "b", format="native")
    left = "left behind: optimizer states in optimizer.state.exp_avg.hidden_layer.weight"
    assert left in capsys.readouterr().out
