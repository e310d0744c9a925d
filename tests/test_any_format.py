"""A checkpoint that cannot be opened: what is said of it, and of complete ones beside it."""

import shutil
from pathlib import Path
from typing import Any

import llamas
import megatrons
import pytest

from tokamake.checkpoint.any_format import open_any
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.inspect import inspect
from tokamake.checkpoint.opened import Progress
from tokamake.checkpoint.tensors import random
from tokamake.errors import UserError

SHAPE = llamas.ARCHITECTURES[5]
FORMATS = {
    # name, what a step's folder is called, what names it
    "native": ("global_step{}", "latest"),
    "mds": ("global_step{}", "latest"),
    "mds_pipeline": ("global_step{}", "latest"),
    "universal": ("global_step{}_universal", "latest_universal"),
    "megatron": ("iter_{:07}", "latest_checkpointed_iteration.txt"),
}


def steps(root: Path, name: str) -> dict[int, Path]:
    """Folders of steps 4, 8 and 12, of which the last is the latest."""
    tensors = random(SHAPE, 1)
    for step in (4, 8, 12):
        made = root.with_name(f"step{step}")
        megatrons.write(made, name, SHAPE, tensors, Progress(step, 0, 0))
        shutil.copytree(made, root, dirs_exist_ok=True)
    return {step: root / FORMATS[name][0].format(step) for step in (4, 8, 12)}


def cut_off(folder: Path) -> None:
    """Cut all files with tensors."""
    for file in folder.rglob("*"):
        if file.suffix in (".pt", ".distcp"):
            file.write_bytes(file.read_bytes()[:40])


@pytest.mark.parametrize("spoil", [cut_off, shutil.rmtree])
@pytest.mark.parametrize("name", FORMATS)
def test_the_newest_complete_one_beside_is_named(name: str, spoil: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    folders = steps(root, name)
    assert open_any(root).path == folders[12]
    spoil(folders[12])

    def told(path: Path) -> list[str]:
        errors = []
        for read in (lambda: inspect(path), lambda: convert(source=path, target=out, format="hf")):
            with pytest.raises(UserError) as error:
                read()
            errors.append(str(error.value))
            assert "\n" not in errors[-1]
        return errors

    out = tmp_path / "out"
    assert told(root)[0].endswith(f", or give {folders[8]}, which is complete")
    assert told(root)[0] == told(root)[1]
    assert told(folders[12])[0].endswith(f", or give {folders[8]}, which is complete")
    cut_off(folders[8])
    assert told(root)[0].endswith(f", or give {folders[4]}, which is complete")
    convert(source=folders[4], target=out, format="hf")
    shutil.rmtree(folders[4])
    assert "which is complete" not in told(root)[0]


@pytest.mark.parametrize("name", ["universal", "megatron"])
def test_a_missing_step_is_named(name: str, tmp_path: Path) -> None:
    shutil.rmtree(steps(tmp_path / "root", name)[12])
    folder, pointer = FORMATS[name]
    with pytest.raises(UserError, match=f"here {pointer} names {folder.format(12)}, which is miss"):
        open_any(tmp_path / "root")


def test_what_is_no_checkpoint_has_none_beside(tmp_path: Path) -> None:
    steps(tmp_path / "root", "mds")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none", tmp_path):
        with pytest.raises(UserError) as error:
            open_any(path)
        assert "which is complete" not in str(error.value)
