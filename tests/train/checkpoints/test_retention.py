"""Old checkpoints are deleted, but none that is still needed; saves need room on the disk first."""

import os
import shutil
import signal
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.faulty import dying
from tests.support.forked import train
from tests.support.runs import losses, make_run, train_here
from tests.train.checkpoints.test_resume import save
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import read_run
from tokamake.errors import TemporaryError, UserError
from tokamake.train.backends.native import Engine
from tokamake.train.checkpoints import retention
from tokamake.train.checkpoints.retention import Retention
from tokamake.train.metrics import FILE, validation_losses

pytestmark = pytest.mark.usefixtures("lone_rank")

Usage = namedtuple("Usage", "total used free")
DIGEST = "a" * 64


def steps(config: Path) -> list[int]:
    """Steps of the checkpoints of a run; all of them are whole."""
    folders = [*read_run(config).output.glob("global_step*")]
    assert all((folder / "state.json").is_file() for folder in folders)
    return sorted(int(folder.name.removeprefix("global_step")) for folder in folders)


def state(step: int) -> ResumeState:
    return ResumeState(DIGEST, step, 8 * step, 0.5, 1)


@pytest.fixture
def keep(root: Path, tmp_path: Path) -> Any:
    """Save checkpoints at some steps without training; return those that a run keeps."""
    template = read_run(make_run(root, "template"))

    def kept(*saved: int, later: tuple[int, ...] = (), **settings: Any) -> list[int]:
        train_settings = template.train.model_copy(update=settings)
        output = tmp_path / "run/training"
        run = template.model_copy(update={"output": output, "train": train_settings})
        for step in later:
            save(output, step)
        keeper = Retention(
            run, state(saved[0] - 1), losses=partial(validation_losses, output / FILE)
        )
        for step in saved:
            save(output, step)
            keeper.note_commit(step)
        keeper.close()
        assert not (output / retention.DELETING).exists()
        names = [path.name.removeprefix("global_step") for path in output.glob("global_step*")]
        return sorted(int(name) for name in names if name.isdecimal())

    return kept


def test_the_newest_checkpoints_are_kept_and_one_every_so_many_steps(keep: Any) -> None:
    assert keep(1, 2, 3, 4) == [1, 2, 3, 4]
    assert keep(5, 6, 7, 8, keep_last=2) == [7, 8]
    assert keep(11, 12, 13, 14, 15, 16, 17, keep_last=2, keep_every=3) == [12, 15, 16, 17]


@pytest.mark.parametrize("name", ["validation_loss", "validation_loss/code"])
def test_the_best_by_validation_are_kept(name: str, keep: Any, tmp_path: Path) -> None:
    measured = {1: 5.0, 2: 3.0, 3: float("nan"), 4: 4.0, 6: 3.5, 7: 6.0}
    (tmp_path / "run/training").mkdir(parents=True)
    lines = (f'{{"step": {step}, "{name}": {loss}}}\n' for step, loss in measured.items())
    (tmp_path / "run/training/metrics.jsonl").write_text("".join(lines).replace("nan", "NaN"))
    assert keep(1, 2, 3, 4, 5, 6, 7, 8, keep_last=2, keep_best=2) == [2, 6, 7, 8]


def test_a_validation_after_the_save_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint is saved before its loss is known, and is the best."""
    validate, measured = Engine.validate, iter([9.0, 5.0, 7.0, 1.0])
    monkeypatch.setattr(
        Engine, "validate", lambda *args: validate(*args)._replace(loss=next(measured))
    )
    settings = {"save_interval": 2, "evaluation_interval": 2, "keep_last": 2, "keep_best": 1}
    config = make_run(root, "best", **settings)
    assert train_here(config) == 0
    assert steps(config) == [4, 6]


def test_ends_of_segments_are_kept(keep: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/train.2.json").write_text("{}")
    assert keep(1, 2, 3, 4, 5, keep_last=2) == [2, 4, 5]


def test_checkpoints_that_other_runs_start_from_are_kept(keep: Any, tmp_path: Path) -> None:
    (tmp_path / "branch").mkdir()
    start = tmp_path / "branch/../run/training/global_step1"
    (tmp_path / "branch/run.yaml").write_text(yaml.safe_dump({"checkpoint": str(start)}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/run.yaml").write_text("[")
    assert keep(1, 2, 3, 4, keep_last=2) == [1, 3, 4]


def test_checkpoints_of_other_runs_and_programs_are_kept(keep: Any, tmp_path: Path) -> None:
    output = tmp_path / "run/training"
    save(output, 1, digest="b" * 64)
    (output / "global_step2").mkdir()
    (save(output, 3) / "state.json").write_text("{half")
    save(tmp_path / "scratch", 4)
    (output / "global_step4").symlink_to(tmp_path / "scratch/global_step4")
    assert keep(5, 6, 7, keep_last=2) == [1, 2, 3, 4, 6, 7]


def test_replaced_checkpoints_of_the_run_are_deleted(keep: Any, tmp_path: Path) -> None:
    """`commit` renames a checkpoint from before a change that a new one replaces."""
    output = tmp_path / "run/training"
    save(output, 8).rename(output / "global_step8.old")
    save(output, 9).rename(output / "global_step9.old.2")
    save(output, 7, digest="b" * 64).rename(output / "global_step7.old")
    keep(10, 11)
    assert len([*output.glob("*.old*")]) == 3
    assert keep(12, 13, keep_last=2) == [12, 13]
    assert [path.name for path in output.glob("*.old*")] == ["global_step7.old"]


def test_checkpoints_after_the_one_that_the_user_went_back_to_are_kept(keep: Any) -> None:
    assert keep(3, 4, 5, later=(2, 4, 8, 9), keep_last=2) == [4, 5, 8, 9]


def test_abandoned_checkpoints_do_not_count_as_the_newest(keep: Any) -> None:
    assert keep(3, 6, 8, later=(4, 7), keep_last=2) == [6, 8]


def test_nothing_is_deleted_while_the_newest_is_incomplete(root: Path, tmp_path: Path) -> None:
    template = read_run(make_run(root, "incomplete", keep_last=2))
    run = template.model_copy(update={"output": tmp_path / "run/training"})
    for step in (1, 2, 3, 4):
        newest = save(run.output, step)
    (newest / "file").write_text("weig")
    keeper = Retention(run, state(4), losses=list)
    keeper.note_commit(4)
    keeper.close()
    assert len([*run.output.glob("global_step*")]) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_last": 1}, "keep_last"),
        ({"keep_every": 4}, "keep_every: 4: without keep_last"),
        ({"keep_best": 1}, "keep_best: 1: without keep_last"),
        ({"keep_last": 2, "keep_every": 3}, "keep_every: 3: is not a multiple of save_interval 2"),
        ({"keep_last": 2, "keep_best": 1, "evaluation_steps": 0}, "keep_best: 1: with evaluation"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    settings: dict[str, Any], message: str, root: Path
) -> None:
    with pytest.raises(UserError, match=message):
        make_run(root, "refused", **settings)


# ---- Whole runs ----


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["native", pytest.param("deepspeed", marks=pytest.mark.grid)])
def test_a_run_of_two_ranks_keeps_the_newest(backend: str, root: Path) -> None:
    config = make_run(root, backend, backend=backend, train_steps=10, keep_last=2)
    printed = train(config, ranks=2)
    assert steps(config) == [8, 10]
    output = read_run(config).output
    assert printed.count(f"deleted {output}/global_step2\n") == 1
    assert sorted(path.name for path in output.iterdir() if path.name.startswith(".")) == []


def test_a_setting_that_is_new_to_a_run_does_not_restart_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(root, "later", train_steps=10)
    assert train_here(config, until_step=6) == 0
    make_run(root, "later", train_steps=10, keep_last=2, keep_every=4)
    assert train_here(config) == 0
    assert "continuing at step 6" in capsys.readouterr().out
    assert steps(config) == [4, 6, 8, 10]  # at 6, a segment has ended


@pytest.mark.fault("damaged checkpoint")
def test_a_damaged_newest_checkpoint_costs_no_other(root: Path) -> None:
    expected = make_run(root, "expected", train_steps=10)
    assert train_here(expected) == 0
    config = make_run(root, "damaged", train_steps=10, keep_last=2)
    assert train_here(config, until_step=8) == 0
    config.with_name("train.8.json").unlink()
    (tensors,) = config.parent.glob("training/global_step8/*.distcp")
    with tensors.open("r+b") as stream:
        stream.seek(tensors.stat().st_size // 2)
        stream.write(bytes(4096))
    assert train_here(config) == 0
    assert steps(config) == [8, 10]
    assert losses(config) == losses(expected)


def killed_in_deletion(number: int) -> None:
    """Kill the process at a call of a function that removes files, while it deletes step 2."""
    rmtree, rename = shutil.rmtree, Path.rename

    def dying_rmtree(path: Any, **options: Any) -> None:
        if "global_step2" in str(path) and number:
            calls = [number]
            for name in ("unlink", "rmdir"):
                setattr(os, name, dying(getattr(os, name), calls))
        rmtree(path, **options)

    def dying_rename(self: Path, target: Path) -> Path:
        if retention.DELETING in str(target) and not number:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    shutil.rmtree = dying_rmtree  # type: ignore[assignment]
    Path.rename = dying_rename  # type: ignore[assignment]


@pytest.mark.fault("kill in a save")
@pytest.mark.grid
@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_kill_in_the_middle_of_a_deletion(number: int, root: Path) -> None:
    expected = make_run(root, f"whole-{number}", train_steps=10)
    train(expected)
    config = make_run(root, f"killed-{number}", train_steps=10, keep_last=2)
    train(config, fault=partial(killed_in_deletion, number), code=-9)
    assert steps(config) in ([2, 4, 6], [4, 6], [2, 4, 6, 8], [4, 6, 8])
    assert (2 in steps(config)) == (number == 0)
    assert "continuing at step " in train(config)
    assert steps(config) == [8, 10]
    assert not (read_run(config).output / retention.DELETING).exists()
    for key in ("loss", "validation_loss"):
        assert losses(config, key) == losses(expected, key)


# ---- Room on the disk ----


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


def small_disk(output: Path, total: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a folder's file system has `total` bytes; the folder's files take theirs."""

    def usage(_: Any) -> Usage:
        used = sum(path.stat().st_size for path in output.rglob("global_step*/**/*"))
        return Usage(int(total), used, int(total - used))

    monkeypatch.setattr(retention.shutil, "disk_usage", usage)
    monkeypatch.setattr(retention, "_WAIT_SECONDS", 0)


@pytest.fixture(scope="module")
def checkpoint_bytes(root: Path) -> int:
    config = make_run(root, "measured", train_steps=2)
    train_here(config)
    return folder_bytes(read_run(config).output / "global_step2")


def test_a_run_of_any_length_needs_room_for_two_checkpoints(
    root: Path, checkpoint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(root, "two", train_steps=10, keep_last=3)
    small_disk(read_run(config).output, 2.1 * checkpoint_bytes, monkeypatch)
    assert train_here(config) == 0
    assert steps(config) == [8, 10]


@pytest.mark.fault("full disk")
def test_too_little_room_is_one_error_before_anything_is_written(
    root: Path, checkpoint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(root, "full", train_steps=10)
    output = read_run(config).output
    with monkeypatch.context() as patch:
        small_disk(output, 2.1 * checkpoint_bytes, patch)
        with pytest.raises(
            TemporaryError, match=r"step 6 is not saved: .*keep_last.*4 is complete"
        ):
            train_here(config)
    assert steps(config) == [2, 4]
    assert (output / "latest").read_text() == "global_step4"
    assert not (output / ".saving").exists()
    assert train_here(config) == 0
    assert steps(config) == [2, 4, 6, 8, 10]


def test_the_first_checkpoint_is_estimated(
    root: Path, checkpoint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(root, "first", train_steps=2)
    small_disk(read_run(config).output, 0.5 * checkpoint_bytes, monkeypatch)
    with pytest.raises(TemporaryError, match=r"step 2 is not saved: .* has no checkpoint yet"):
        train_here(config)
    small_disk(read_run(config).output, 1.1 * checkpoint_bytes, monkeypatch)
    assert train_here(config) == 0


@pytest.mark.fault("damaged checkpoint")
def test_the_only_whole_checkpoint_is_not_deleted_for_a_damaged_one(
    root: Path, checkpoint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(root, "only", train_steps=10, keep_last=2)
    output, make_room = read_run(config).output, Retention.make_room

    def make_room_after_damage(keeper: Retention, step: int, estimate: float) -> None:
        if step == 6:
            (tensors,) = output.glob("global_step4/*.distcp")
            with tensors.open("r+b") as stream:
                stream.seek(tensors.stat().st_size // 2)
                stream.write(bytes(4096))
            keeper.wait()
            keeper._verified = None
        make_room(keeper, step, estimate)

    with monkeypatch.context() as patch:
        small_disk(output, 2.1 * checkpoint_bytes, patch)
        patch.setattr(Retention, "make_room", make_room_after_damage)
        with pytest.raises(TemporaryError, match=r"older checkpoints stay.*global_step4.*damaged"):
            train_here(config)
    assert steps(config) == [2, 4]
    assert train_here(config) == 0
    assert steps(config) == [8, 10]


def test_a_checkpoint_that_was_loaded_is_not_verified_again(
    root: Path, checkpoint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(root, "loaded", train_steps=8, keep_last=2)
    assert train_here(config, until_step=4) == 0
    (read_run(config).output.parent / "train.4.json").unlink()  # no end of a segment, which stays
    verified = list[str]()
    check = retention.check_checksums

    def note(checkpoint: Any, *, workers: int) -> None:
        verified.append(checkpoint.path.name)
        check(checkpoint, workers=workers)

    monkeypatch.setattr(retention, "check_checksums", note)
    small_disk(read_run(config).output, 2.1 * checkpoint_bytes, monkeypatch)
    assert train_here(config) == 0
    assert "global_step4" not in verified
    assert "global_step6" in verified


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Any]:
    """Function that mounts a file system of some bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: float) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={int(size)}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this user cannot mount a tmpfs")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


@pytest.mark.grid
@pytest.mark.fault("full disk")
@pytest.mark.ranks
def test_two_ranks_train_on_a_real_disk_with_room_for_two(root: Path, tmpfs: Any) -> None:
    expected = make_run(root, "roomy", train_steps=10)
    train(expected, ranks=2)
    config = make_run(root, "cramped", train_steps=10, keep_last=2)
    size = folder_bytes(read_run(expected).output / "global_step2")
    config.with_name("training").symlink_to(tmpfs(2.4 * size))  # with room for metrics
    printed = train(config, ranks=2)
    assert steps(config) == [8, 10], printed
    assert losses(config) == losses(expected)
