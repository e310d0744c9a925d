"""Odd files beside a checkpoint, and odd values in it, give one clear error or none."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import megatron_names
from tests.support.families import FAMILIES, weights
from tokamake.checkpoint.detect import open_any
from tokamake.errors import UserError

STATES = Path("global_step0/mp_rank_00_model_states.pt")
RANK = Path("iter_0000000/mp_rank_00")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in each format of Megatron's."""
    root = tmp_path_factory.mktemp("odd")
    for kind in ("mds", "mds_pipeline", "megatron", "universal"):
        megatron_names.write(root / kind, kind, FAMILIES["llama"], weights(FAMILIES["llama"]))
    return root


def renamed(folder: Path, pattern: str, suffix: str) -> None:
    for each in folder.glob(pattern):
        each.rename(each.with_name(f"{each.name}{suffix}"))


def changed(**values: Any) -> Callable[[Path], None]:
    """Change values of all ranks' states; those of arguments are called args_NAME."""

    def change(folder: Path) -> None:
        for file in folder.rglob("m*_rank_*"):
            file = file / "model_optim_rng.pt" if file.is_dir() else file
            state = torch.load(file, weights_only=False)
            for name, value in values.items():
                if name.startswith("args_"):
                    setattr(state["args"], name.removeprefix("args_"), value)
                else:
                    state[name] = value
            torch.save(state, file)

    return change


BROKEN = [
    (
        "mds_pipeline",
        lambda f: renamed(f, "*/layer_*", ".partial"),
        r"has no layer_\*-model_\*-model_states\.pt, but layer_01-model_00-model_states\.pt\.part",
    ),
    ("mds", lambda f: renamed(f, "*/mp_rank_*", ".bak"), r"which has no file of the first rank"),
    ("megatron", lambda f: renamed(f, "*/mp_rank_*", ".bak"), r"no checkpoint of a known format"),
    *(
        (kind, changed(**values), message)
        for kind in ("mds", "mds_pipeline", "megatron", "universal")
        for values, message in [
            ({"iteration": "abc"}, r"\.pt: iteration: 'abc': is not a whole number; fetch"),
            ({"iteration": 1.5}, r"\.pt: iteration: 1\.5: is not a whole number"),
            (
                {"args_consumed_train_samples": "abc"},
                r"\.pt: consumed_train_samples: 'abc': is not a whole number",
            ),
        ]
    ),
    *(
        (
            kind,
            changed(checkpoint_version="abc"),
            r"\.pt: checkpoint_version: 'abc': is not a number",
        )
        for kind in ("mds", "megatron")
    ),
    (
        "universal",
        changed(args_hidden_size="abc"),
        r"\.pt: args\.hidden_size: 'abc': is not a whole number",
    ),
]


@pytest.mark.parametrize(("kind", "change", "message"), BROKEN)
def test_odd_content_is_one_error(
    kind: str, change: Callable[[Path], None], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / kind, tmp_path / kind)
    change(tmp_path / kind)
    with pytest.raises(UserError, match=message) as error:
        open_any(tmp_path / kind)
    assert str(error.value).startswith(str(tmp_path / kind))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("mds", STATES, "mp_rank_00_model_states.pt.bak"),
        ("mds", STATES, "mp_rank_01.bak"),
        (
            "mds_pipeline",
            Path("global_step0/layer_01-model_00-model_states.pt"),
            "layer_01-model_01-model_states.pt.partial",
        ),
        ("mds_pipeline", STATES, "layer_x-model_y-model_states.pt"),
        ("megatron", RANK, "mp_rank_00.bak"),
        ("megatron", RANK, "mp_rank_01.bak"),
    ],
)
def test_unrelated_files_are_ignored(
    kind: str, name: Path, other: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / kind, tmp_path / kind)
    known = tmp_path / kind / name
    (shutil.copytree if known.is_dir() else shutil.copy)(known, known.with_name(other))
    checkpoint, expected = open_any(tmp_path / kind), open_any(folder / kind)
    assert checkpoint.layout == expected.layout
    key = "model.model.norm.weight"
    assert torch.equal(checkpoint.source.read(key), expected.source.read(key))


def test_an_invalid_number_of_data_parallel_ranks_is_ignored(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mds", tmp_path / "mds")
    changed(dp_world_size="abc")(tmp_path / "mds")
    assert open_any(tmp_path / "mds").layout.data_parallel_size == 1
