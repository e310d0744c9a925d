"""Checkpoints of Megatron that do not record their vocabulary size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_folder, megatron_names
from tests.support.families import FAMILIES, weights
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.inspect import inspect
from tokamake.errors import UserError

ROW_PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
KINDS: dict[str, dict[str, Any]] = {
    "mds": {"tensor_parallel_size": 2},
    "mds-pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "megatron": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
    "universal": {},
}


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
