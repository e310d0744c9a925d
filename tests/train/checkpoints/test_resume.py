"""Checkpoints are moved into place complete, runs find theirs again, nothing is lost."""

import shutil
from pathlib import Path

import pytest

from tokamake import files
from tokamake.checkpoint.native.resume_state import LineageEntry, ResumeState
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.torch_files import dcp_metadata_writer
from tokamake.checkpoint.torch_files.dcp_metadata import StorageLocation, StoredChunk, WholeTensor
from tokamake.errors import UserError
from tokamake.train.checkpoints import resume
from tokamake.train.checkpoints.commit import SAVING, commit
from tokamake.train.checkpoints.resume import prepare_output


def state(step: int, digest: str = "a" * 64) -> ResumeState:
    return ResumeState(digest, step, 8 * step, 0.5, 1)


def save(output: Path, step: int, text: str = "weights", digest: str = "a" * 64) -> Path:
    grown = output / SAVING / f"global_step{step}"
    grown.mkdir(parents=True)
    write_native(grown, step, text)
    return commit(output, state(step, digest))


def write_native(folder: Path, step: int, text: str) -> None:
    """Write the least that a native checkpoint has, with a text as its only tensor."""
    location = StorageLocation("file", 0, len(text))
    chunk = StoredChunk((0,), (len(text),), location)
    dcp_metadata_writer.write(
        folder, {"model.x": WholeTensor((len(text),), dtypes.named("uint8"), (chunk,))}
    )
    description = {"version": 1, "world_size": 0, "architecture": {}, "iteration": step}
    files.write_json(folder / "tokamake.json", {**description, "loss_scale": [1.0, 0]})
    (folder / "file").write_text(text)
    (folder / "run.yaml").write_text("seed: 5\n")


def unexpected(line: str) -> None:
    pytest.fail(f"printed {line}")


def restart(state: ResumeState) -> tuple[str, None]:
    """Decide that a run starts again."""
    return f"step {state.step} has another rate", None


def refuse(state: ResumeState) -> tuple[str, None]:
    raise UserError(f"refused at step {state.step}")


def test_a_run_goes_on_with_a_change(tmp_path: Path) -> None:
    save(tmp_path, 2)
    said = list[str]()
    found = prepare_output(
        tmp_path,
        "b" * 64,
        say=said.append,
        decide=lambda _: ("new rate", ("rate 1 -> 2",)),
    )
    assert found is not None
    assert found == state(2, "b" * 64)._replace(
        lineage=(LineageEntry(2, 16, "a" * 64, ("rate 1 -> 2",)),)
    )
    assert said == [f"{tmp_path}: new rate"]
    grown = tmp_path / SAVING / "global_step4"
    grown.mkdir(parents=True)
    write_native(grown, 4, "weights")
    commit(tmp_path, found._replace(step=4, consumed_samples=32))
    assert files.read_json(tmp_path / "global_step4/state.json", "")["lineage"] == [
        {"step": 2, "consumed_samples": 16, "digest": "a" * 64, "changed": ["rate 1 -> 2"]}
    ]
    newest = prepare_output(tmp_path, "b" * 64, say=unexpected, decide=refuse)
    assert newest == found._replace(step=4, consumed_samples=32)
    # The checkpoint before the change is still one of this run, a later one of that digest is not.
    assert resume.state_at(tmp_path, 2, state=newest) == state(2)
    assert resume.state_before(tmp_path, newest) == found
    save(tmp_path, 3)
    assert resume.state_before(tmp_path, newest) == found
    with pytest.raises(UserError, match="global_step3: missing"):
        resume.state_at(tmp_path, 3, state=newest)


def test_a_checkpoint_before_a_change_takes_the_change_earlier() -> None:
    later = state(6).changed("b" * 64, ("rate 1 -> 2",))._replace(step=8, consumed_samples=70)
    earlier = state(4).in_place_of(later)
    assert (earlier.digest, earlier.step, earlier.consumed_samples) == ("b" * 64, 4, 32)
    assert earlier.lineage == (LineageEntry(4, 32, "a" * 64, ("rate 1 -> 2",)),)


def test_a_refused_run_keeps_its_folder(tmp_path: Path) -> None:
    save(tmp_path, 2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="refused at step 2"):
        prepare_output(tmp_path, "b" * 64, say=unexpected, decide=refuse)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_state_without_a_lineage_can_be_read(tmp_path: Path) -> None:
    """Earlier versions wrote none."""
    folder = save(tmp_path, 2)
    content = files.read_json(folder / "state.json", "")
    for name in ("lineage", "files", "sha256"):
        del content[name]
    files.write_json(folder / "state.json", content)
    assert prepare_output(tmp_path, "a" * 64, say=unexpected, decide=refuse) == state(2)


def test_a_new_folder_starts_from_the_beginning(tmp_path: Path) -> None:
    assert prepare_output(tmp_path / "new", "a" * 64, say=unexpected, decide=refuse) is None
    assert (tmp_path / "new").is_dir()


def test_a_run_resumes_from_latest(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    assert prepare_output(tmp_path, "a" * 64, say=unexpected, decide=refuse) == state(4)
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert not (tmp_path / SAVING).exists()


def test_an_incomplete_checkpoint_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / SAVING / "global_step4").mkdir(parents=True)
    assert prepare_output(tmp_path, "a" * 64, say=unexpected, decide=refuse) == state(2)
    assert not (tmp_path / SAVING).exists()


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
    assert prepare_output(output, "b" * 64, say=unexpected, decide=refuse) is None
    save(output, 2, "first", "b" * 64)
    assert prepare_output(output, "a" * 64, say=said.append, decide=restart) is None
    assert output.is_symlink()
    assert list(output.iterdir()) == []
    assert (scratch / "run.bbbbbbbb/global_step2/file").read_text() == "first"
    assert f"moved to {scratch}/run.bbbbbbbb" in said[0]


def test_other_runs_are_moved_aside(tmp_path: Path) -> None:
    output, said = tmp_path / "training", []
    for digest in ("b" * 64, "b" * 64, "c" * 64):
        prepare_output(output, "a" * 64, say=said.append, decide=restart)
        save(output, 2, digest, digest)
    assert prepare_output(output, "a" * 64, say=said.append, decide=restart) is None
    assert len(said) == 3
    assert all(
        line.startswith(f"{output}: step 2 has another rate; moved to {output}.") for line in said
    )
    for name, digest in (("bbbbbbbb", "b"), ("bbbbbbbb.2", "b"), ("cccccccc", "c")):
        aside = tmp_path / f"training.{name}" / "global_step2" / "file"
        assert aside.read_text() == digest * 64


def test_a_checkpoint_of_another_program_is_moved_aside(tmp_path: Path) -> None:
    output, said = tmp_path / "training", []
    (output / "global_step9").mkdir(parents=True)
    (output / "latest").write_text("global_step9")
    assert prepare_output(output, "a" * 64, say=said.append, decide=restart) is None
    assert (tmp_path / "training.unknown" / "global_step9").is_dir()
    assert len(said) == 1


def test_latest_naming_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(UserError, match=r"latest: names global_step9, which is missing"):
        prepare_output(tmp_path, "a" * 64, say=unexpected, decide=refuse)


@pytest.mark.parametrize("damage", ["lost", "empty", "nul", "a path", "other name"])
def test_without_a_readable_latest_the_newest_checkpoint_counts(
    damage: str, tmp_path: Path
) -> None:
    said: list[str] = []
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / "latest").unlink()
    if damage != "lost":
        content = {"empty": "", "nul": "\0" * 12, "a path": "../other/global_step2"}
        content["other name"] = "glocal_step4"
        (tmp_path / "latest").write_text(content[damage])
    assert prepare_output(tmp_path, "a" * 64, say=said.append, decide=refuse) == state(4)
    (line,) = said
    assert line.startswith(f"{tmp_path / 'latest'}: ")
    assert line.endswith(f": going back to {tmp_path / 'global_step4'}")
    assert (tmp_path / "latest").read_text() == "global_step4"


@pytest.mark.parametrize("content", [None, "", "{}", '{"digest": "aaaa", "st'])
def test_a_checkpoint_whose_state_is_damaged_is_not_the_newest(
    content: str | None, tmp_path: Path
) -> None:
    said: list[str] = []
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / "global_step4/run.yaml").touch()
    path = tmp_path / "global_step4/state.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert prepare_output(tmp_path, "a" * 64, say=said.append, decide=refuse) == state(2)
    (line,) = said
    assert line.startswith(f"{path}: ")
    assert line.endswith(f": going back to {tmp_path / 'global_step2'}")
    assert (tmp_path / "latest").read_text() == "global_step2"
    (tmp_path / "latest").write_text("global_step4")
    (tmp_path / "global_step2/state.json").unlink()
    if content is not None:  # damaged, so it is not a checkpoint of another program
        (tmp_path / "global_step4/run.yaml").unlink()
    with pytest.raises(UserError, match=r"global_step4/state.json: "):
        prepare_output(tmp_path, "a" * 64, say=unexpected, decide=refuse)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("state.json", '"consumed_samples": 32', '"consumed_samples": 36'),
        ("state.json", '"rate_factor": 1.0', '"rate_factor": 1.5'),
        ("state.json", '"sha256"', '"sha257"'),
        ("run.yaml", "seed: 5", "seed: 7"),
        ("tokamake.json", '"iteration": 4', '"iteration": 6'),
    ],
)
def test_a_changed_digit_beside_the_weights_is_noticed(
    file: str, old: str, new: str, tmp_path: Path
) -> None:
    said: list[str] = []
    for step in (2, 4):
        save(tmp_path, step)
    path = tmp_path / "global_step4" / file
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    assert prepare_output(tmp_path, "a" * 64, say=said.append, decide=refuse) == state(2)
    (line,) = said
    assert line.startswith(f"{path}: ")
    assert line.endswith(f": going back to {tmp_path / 'global_step2'}")


@pytest.mark.parametrize("lost", ["", ".metadata", "tokamake.json", "file", "end of file"])
def test_an_incomplete_checkpoint_is_not_published(lost: str, tmp_path: Path) -> None:
    save(tmp_path, 2)
    grown = tmp_path / SAVING / "global_step4"
    grown.mkdir(parents=True)
    write_native(grown, 4, "weights")
    if lost == "end of file":
        (grown / "file").write_text("weight")
    else:  # "": another trainer has removed the whole folder
        (grown / lost).unlink() if lost else shutil.rmtree(grown)
    with pytest.raises(UserError, match="global_step4: not saved, because its files are not"):
        commit(tmp_path, state(4))
    assert not (tmp_path / "global_step4").exists()
    assert prepare_output(tmp_path, "a" * 64, say=unexpected, decide=refuse) == state(2)
