"""A converted checkpoint is published only if its logits equal the source's."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support import hf_folder
from tests.support.families import FAMILIES, weights
from tokamake.checkpoint import compare_logits
from tokamake.checkpoint.compare_logits import compare_logits as compare
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.errors import UserError

NAMES = ["llama-gqa", "gpt2", "bloom"]


@pytest.fixture(params=NAMES)
def native(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shape = FAMILIES[request.param]
    hf_folder.write(tmp_path / "start", shape, weights(shape))
    convert(source=tmp_path / "start", target=tmp_path / "native", format="native")
    return tmp_path / "native"


READ = [*product((None, "bf16", "fp16"), ("transformers", "tokamake"))]


def of_models(cases: list[Any], kept: list[tuple[str, Any]]) -> list[Any]:
    """Each case of each model; those that are not kept are of the grid."""
    return [
        pytest.param(*pair, marks=() if pair in kept else pytest.mark.grid)
        for pair in product(NAMES, cases)
    ]


@pytest.mark.parametrize(
    ("native", "case"),
    of_models(READ, [*zip(NAMES, (READ[0], READ[3], READ[4]), strict=True)]),
    indirect=["native"],
    ids=str,
)
def test_an_export_has_the_logits_of_its_source(
    native: Path,
    tmp_path: Path,
    case: tuple[str | None, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dtype, reader = case
    if reader == "tokamake":
        monkeypatch.setattr(compare_logits, "find_spec", lambda _: None)
    target = tmp_path / "export"
    convert(source=native, target=target, format="hf", dtype=dtype, compare_logits=True)
    assert f"logits: equal to the source, by {reader} (" in capsys.readouterr().out
    assert (target / "config.json").exists()


NAN = float("nan")


@pytest.mark.parametrize(
    ("native", "value"),
    of_models([0.5, NAN], [*zip(NAMES, (0.5, NAN, 0.5), strict=True)]),
    indirect=["native"],
)
def test_a_wrong_weight_is_noticed(native: Path, tmp_path: Path, value: float) -> None:
    export = tmp_path / "export"
    convert(source=native, target=export, format="hf")
    tensors = load_file(export / "model.safetensors")
    next(tensor for name, tensor in tensors.items() if "ln" in name or "norm" in name)[0] += value
    save_file(tensors, export / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="export: its logits, as transformers computes them, diffe"):
        compare(open_any(native), export, dtype=None)


def test_what_differs_is_not_published(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(checkpoint: Checkpoint, folder: Path, *, dtype: str | None) -> str:
        assert (folder / "model.safetensors").exists()
        raise UserError(f"other logits than {checkpoint.path}, {dtype}")

    monkeypatch.setattr(compare_logits, "compare_logits", refuse)
    with pytest.raises(UserError, match="other logits"):
        convert(source=native, target=tmp_path / "export", format="hf", compare_logits=True)
    assert not [path for path in tmp_path.iterdir() if "export" in path.name]


def test_too_little_memory_is_said(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source=native, target=tmp_path / "export", format="hf")
    monkeypatch.setattr(compare_logits, "_free_memory", lambda: 1000)
    line = compare(open_any(native), tmp_path / "export", dtype=None)
    assert line.startswith("logits: not compared: needs ")
    assert line.endswith(" of memory, 1.0 kB is free")


def test_other_formats_are_not_compared(native: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="--compare-logits: a checkpoint of format mds has no logits"
    ):
        convert(source=native, target=tmp_path / "mds", format="mds", compare_logits=True)
