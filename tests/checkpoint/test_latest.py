"""Pointer files that name the newest checkpoint."""

from pathlib import Path

import pytest

from tokamake.checkpoint.latest import candidates, latest, pointed_files
from tokamake.errors import UserError

MEGATRON = "latest_checkpointed_iteration.txt"


def make(folder: Path, name: str, *, pointer: str = "latest") -> Path:
    """Write a folder with a file, and a pointer to it."""
    (folder / name).mkdir()
    (folder / name / "a.bin").touch()
    (folder / pointer).write_text(f"{name}\n")
    return folder / name


def test_latest_names_a_folder_beside_it(tmp_path: Path) -> None:
    folder = make(tmp_path, "global_step3")
    assert latest(tmp_path) == folder
    assert candidates(tmp_path, "latest") == [tmp_path, folder]
    assert pointed_files(tmp_path, "latest") == [tmp_path / "latest", folder / "a.bin"]


def test_a_folder_without_a_pointer_is_the_checkpoint_itself(tmp_path: Path) -> None:
    folder = make(tmp_path, "global_step3")
    assert candidates(folder, "latest") == [folder]
    assert pointed_files(folder, "latest") == [folder / "a.bin"]
    with pytest.raises(
        UserError, match="global_step3: has no file latest, so it holds no finished"
    ):
        latest(folder)
    with pytest.raises(UserError, match=f"checkpoint {tmp_path}/none: no such folder; give the"):
        latest(tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "name"),
    [("12", "iter_0000012"), ("12345678", "iter_12345678"), ("release", "release")],
)
def test_megatrons_pointer_has_the_number_of_a_step(
    tmp_path: Path, content: str, name: str
) -> None:
    (tmp_path / MEGATRON).write_text(content)
    assert candidates(tmp_path, MEGATRON, "iter_{:07d}") == [tmp_path, tmp_path / name]
    assert candidates(tmp_path, MEGATRON) == [tmp_path, tmp_path / content]


def test_a_missing_checkpoint_is_reported_with_those_that_exist(tmp_path: Path) -> None:
    for name in ("global_step2", "global_step1"):
        make(tmp_path, name)
    (tmp_path / "latest").write_text("global_step3")
    with pytest.raises(UserError) as caught:
        latest(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/latest: names global_step3, which is missing; name an existing one "
        "(global_step1, global_step2)"
    )
    # `candidates` leaves it to its caller.
    assert candidates(tmp_path, "latest")[1] == tmp_path / "global_step3"


@pytest.mark.parametrize(
    "content", ["", "..", "../other", "/etc", "a/b", "x" * 256, "x" * 5000, "a\0b/c"]
)
def test_a_pointer_leaves_its_folder_never(tmp_path: Path, content: str) -> None:
    (tmp_path / "latest").write_text(content)
    for read in (latest, lambda path: candidates(path, "latest")):
        with pytest.raises(UserError, match="is not the name of a folder; give the folder"):
            read(tmp_path)


def test_the_longest_name_of_a_folder_is_read(tmp_path: Path) -> None:
    assert latest(make(tmp_path, "x" * 255).parent) == tmp_path / ("x" * 255)
