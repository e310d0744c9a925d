"""Checkpoints are moved into place complete, runs find theirs again, nothing is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import make_run, prepare
from tokamake import files
from tokamake.config.resolved_run import read_run, write_run
from tokamake.errors import UserError
from tokamake.train import resume
from tokamake.train.resume import ResumeState, claim, commit, differences, locked


def state(step: int, digest: str = "a" * 64) -> ResumeState:
    return ResumeState(digest, step, 8 * step, 0.5, 1)


def save(output: Path, step: int, text: str = "weights", digest: str = "a" * 64) -> Path:
    grown = output / resume.SAVING / f"global_step{step}"
    grown.mkdir(parents=True)
    (grown / "file").write_text(text)
    return commit(output, state(step, digest))


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


def test_only_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    child = "import sys; from pathlib import Path; from tokamake.train.resume import locked\n"
    child += "with locked(Path(sys.argv[1])): pass"
    command = [sys.executable, "-c", child, str(tmp_path / "training")]
    with locked(tmp_path / "training"):
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"another process trains there; end it (pid {os.getpid()} on" in refused.stderr
    subprocess.run(command, check=True)


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
