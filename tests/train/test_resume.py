"""Checkpoints are moved into place complete, runs find theirs again, nothing is lost."""

import shutil
from pathlib import Path

import pytest

from tests.support.runs import make_run, prepare
from tokamake import files
from tokamake.checkpoint.native import dcp_metadata
from tokamake.checkpoint.native.dcp_metadata import StorageLocation, StoredChunk, WholeTensor
from tokamake.checkpoint.tensors import dtypes
from tokamake.config.resolved_run import read_run, write_run
from tokamake.errors import UserError
from tokamake.train import resume
from tokamake.train.resume import ResumeState, claim, commit, differences


def state(step: int, digest: str = "a" * 64) -> ResumeState:
    return ResumeState(digest, step, 8 * step, 0.5, 1)


def save(output: Path, step: int, text: str = "weights", digest: str = "a" * 64) -> Path:
    grown = output / resume.SAVING / f"global_step{step}"
    grown.mkdir(parents=True)
    write_native(grown, step, text)
    return commit(output, state(step, digest))


def write_native(folder: Path, step: int, text: str) -> None:
    """Write the least that a native checkpoint has, with a text as its only tensor."""
    location = StorageLocation("file", 0, len(text))
    chunk = StoredChunk((0,), (len(text),), location)
    dcp_metadata.write(folder, {"x": WholeTensor((len(text),), dtypes.named("uint8"), (chunk,))})
    description = {"version": 1, "world_size": 1, "architecture": {}, "iteration": step}
    files.write_json(folder / "tokamake.json", {**description, "loss_scale": [1.0, 0]})
    (folder / "file").write_text(text)


def unexpected(line: str) -> None:
    pytest.fail(f"printed {line}")


def settings(earlier: Path) -> str:
    """Stand-in for `differences`: these checkpoints have no run.yaml."""
    return f"rate of {earlier.name}"


def test_a_new_folder_starts_from_the_beginning(tmp_path: Path) -> None:
    assert claim(tmp_path / "new", "a" * 64, unexpected, settings) is None
    assert (tmp_path / "new").is_dir()


def test_a_run_resumes_from_latest(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    assert claim(tmp_path, "a" * 64, unexpected, settings) == state(4)
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert not (tmp_path / resume.SAVING).exists()


def test_an_incomplete_checkpoint_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / resume.SAVING / "global_step4").mkdir(parents=True)
    assert claim(tmp_path, "a" * 64, unexpected, settings) == state(2)
    assert not (tmp_path / resume.SAVING).exists()


def test_a_step_saved_again_replaces_the_checkpoint_of_this_run(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4, "first")
    files.write_text(tmp_path / "latest", "global_step2")  # the user goes back
    save(tmp_path, 4, "second")
    assert (tmp_path / "global_step4" / "file").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "global_step2",
        "global_step4",
    ]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_step_saved_again_keeps_the_checkpoint_of_another_run(
    tmp_path: Path, damaged: bool
) -> None:
    earlier = save(tmp_path, 4, "first", digest="b" * 64)
    if damaged:
        (earlier / "state.json").write_text("{half")
    save(tmp_path, 4, "second")
    assert (tmp_path / "global_step4" / "file").read_text() == "second"
    assert (tmp_path / "global_step4.old" / "file").read_text() == "first"


def test_an_output_folder_on_another_disk_stays_a_link(tmp_path: Path) -> None:
    output, scratch, said = tmp_path / "training", tmp_path / "scratch", list[str]()
    scratch.mkdir()
    output.symlink_to(scratch / "run")
    assert claim(output, "b" * 64, unexpected, settings) is None
    save(output, 2, "first", "b" * 64)
    assert claim(output, "a" * 64, said.append, settings) is None
    assert output.is_symlink()
    assert list(output.iterdir()) == []
    assert (scratch / "run.bbbbbbbb/global_step2/file").read_text() == "first"
    assert f"moved to {scratch}/run.bbbbbbbb" in said[0]


def test_other_runs_are_moved_aside(tmp_path: Path) -> None:
    output, said = tmp_path / "training", []
    for digest in ("b" * 64, "b" * 64, "c" * 64):
        claim(output, "a" * 64, said.append, settings)
        save(output, 2, digest, digest)
    assert claim(output, "a" * 64, said.append, settings) is None
    assert len(said) == 3
    assert all(
        f"{output}: holds another" in line and "rate of global_step2" in line for line in said
    )
    for name, digest in (("bbbbbbbb", "b"), ("bbbbbbbb.2", "b"), ("cccccccc", "c")):
        aside = tmp_path / f"training.{name}" / "global_step2" / "file"
        assert aside.read_text() == digest * 64


def test_a_checkpoint_of_another_program_is_moved_aside(tmp_path: Path) -> None:
    output, said = tmp_path / "training", []
    (output / "global_step9").mkdir(parents=True)
    (output / "latest").write_text("global_step9")
    assert claim(output, "a" * 64, said.append, settings) is None
    assert (tmp_path / "training.unknown" / "global_step9").is_dir()
    assert len(said) == 1


def test_latest_naming_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(UserError, match=r"latest: names global_step9, which is missing"):
        claim(tmp_path, "a" * 64, unexpected, settings)


@pytest.mark.parametrize("lost", ["", ".metadata", "tokamake.json", "file", "end of file"])
def test_an_incomplete_checkpoint_is_not_published(lost: str, tmp_path: Path) -> None:
    save(tmp_path, 2)
    grown = tmp_path / resume.SAVING / "global_step4"
    grown.mkdir(parents=True)
    write_native(grown, 4, "weights")
    if lost == "end of file":
        (grown / "file").write_text("weight")
    else:  # "": another trainer has removed the whole folder
        (grown / lost).unlink() if lost else shutil.rmtree(grown)
    with pytest.raises(UserError, match="global_step4: not saved, because its files are not"):
        commit(tmp_path, state(4))
    assert not (tmp_path / "global_step4").exists()
    assert claim(tmp_path, "a" * 64, unexpected, settings) == state(2)


def test_differing_settings_are_named(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    earlier = read_run(make_run(root, "earlier"))
    write_run(tmp_path / "run.yaml", earlier)
    same = read_run(make_run(root, "same", log_interval=3, zero_stage=3))
    assert differences(tmp_path, same) == "its start or its data differ"
    other = read_run(make_run(root, "other", precision="bf16", gradient_clipping=2.0))
    message = differences(tmp_path, other)
    assert "train.gradient_clipping: 0.5 there, 2.0 here" in message
    assert "train.precision: empty there, bf16 here" in message
    several = read_run(make_run(root, "several", optimizer={"name": "sgd"}))
    assert differences(tmp_path, several).endswith(" more")
    assert differences(tmp_path / "none", other) == "its settings are not known"
