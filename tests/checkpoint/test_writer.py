"""Conversions are atomic, refuse existing targets, and continue after interruptions."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import hf_folder
from tests.support.families import FAMILIES, assert_same, weights
from tests.support.faults import Inject
from tests.support.programs import torch_python
from tokamake import plugins
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors import chunks, copy
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.errors import UserError


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A Hugging Face checkpoint."""
    architecture = FAMILIES["llama"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    return tmp_path / "hf"


def cut_off(start: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(copy, "_copy_tensor", stops)
        with pytest.raises(KeyboardInterrupt):
            writer.write(target, open_any(start), "mds", Target(ParallelLayout(2)))


def test_a_changed_source_starts_the_conversion_over(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(start, tmp_path / "a", monkeypatch)
    text = (start / "config.json").read_text()
    (start / "config.json").write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 0.5'))
    opened = open_any(start)
    assert opened.architecture.rms_norm_eps == 0.5
    writer.write(tmp_path / "a", opened, "mds", Target(ParallelLayout(2)))
    assert open_any(tmp_path / "a").architecture.rms_norm_eps == 0.5


@pytest.mark.fault("kill of a stage")
def test_a_conversion_killed_after_the_rename_runs_again_if_the_target_is_gone(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writer.shutil, "rmtree", stops)
        with pytest.raises(KeyboardInterrupt):
            convert(source=start, target=tmp_path / "a", format="mds")
    shutil.rmtree(tmp_path / "a")
    convert(source=start, target=tmp_path / "a", format="mds")
    assert_same(open_any(tmp_path / "a"), FAMILIES["llama"])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "hf"}


def test_laid_out_files_are_synced_before_the_plan(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, plans = set[Path](), list[set[Path]]()
    write_text = writer.files.write_text

    def writes(path: Path, text: str) -> None:
        if path.name == "plan.json":
            plans.append({*synced})
        write_text(path, text)

    monkeypatch.setattr(writer.files, "sync", synced.add)
    monkeypatch.setattr(writer.files, "write_text", writes)
    writer.write(tmp_path / "a", open_any(start), "mds", Target())
    (before,) = plans
    assert {path.name for path in before} >= {"mp_rank_00_model_states.pt", "latest", "content"}


def test_the_target_of_a_concurrent_conversion_is_kept(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = writer.refuse_existing

    def refuses(path: Path) -> None:
        refuse(path)
        path.mkdir()
        (path / "theirs").touch()

    monkeypatch.setattr(writer, "refuse_existing", refuses)
    with pytest.raises(UserError, match="a: already exists; name another folder"):
        convert(source=start, target=tmp_path / "a", format="mds")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["theirs"]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "hf"}


def test_existing_targets_and_full_disks_are_refused(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/a: .*file is a file, not a folder; name another"):
        convert(source=start, target=tmp_path / "file/a", format="mds")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link: already exists; name another folder"):
        convert(source=start, target=tmp_path / "link", format="mds")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match=r"needs [\d,]+ bytes, but 1,000 are free;"):
            convert(source=start, target=tmp_path / "a", format="mds")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "file", "link"}
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    convert(source=start, target=Path(), format="mds")
    assert_same(open_any(tmp_path / "empty"), FAMILIES["llama"])


@pytest.mark.parametrize("name", ["mds", "mds_pipeline", "megatron"])
def test_ranks_of_different_steps_are_refused(name: str, start: Path, tmp_path: Path) -> None:
    layout = ParallelLayout(1 if name == "mds_pipeline" else 2, 2 if name == "mds_pipeline" else 1)
    opened = open_any(start)
    for folder, step in (("early", 10), ("late", 20)):
        at = replace(opened, progress=replace(opened.progress, iteration=step))
        writer.write(tmp_path / folder, at, name, Target(layout))
    (late,) = (tmp_path / "late").rglob("*mp_rank_01*")
    (early,) = (tmp_path / "early").rglob("*mp_rank_01*")
    shutil.rmtree(early) if early.is_dir() else early.unlink()
    late.rename(early)
    with pytest.raises(UserError, match=r"mp_rank_01.*: is of step 20 .*mp_rank_00.* of step 10"):
        open_any(tmp_path / "early")


def test_a_lock_on_a_removed_file_is_taken_again(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, flock = tmp_path / ".a.lock", fcntl.flock
    with ExitStack() as stack:

        def late(stream: Any, operation: int) -> None:
            """Between this one's opening and locking, one conversion ends and another begins."""
            monkeypatch.setattr(writer.fcntl, "flock", flock)
            lock.unlink()
            flock(stack.enter_context(lock.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            flock(stream, operation)

        monkeypatch.setattr(writer.fcntl, "flock", late)
        with pytest.raises(UserError, match="a: another conversion writes it; wait for its end"):
            convert(source=start, target=tmp_path / "a", format="mds")
        assert lock.exists()
    convert(source=start, target=tmp_path / "a", format="mds")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "hf"}


def test_a_refused_conversion_leaves_nothing(tmp_path: Path) -> None:
    tensors = weights(FAMILIES["llama"], torch.float32)
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = 70000.0
    hf_folder.write(tmp_path / "hf", FAMILIES["llama"], tensors)
    with pytest.raises(
        UserError, match=r"model\.layers\.2\.mlp\.up_proj\.weight: has numbers beyond"
    ):
        convert(source=tmp_path / "hf", target=tmp_path / "a", format="mds", dtype="fp16")
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


@pytest.mark.fault("full disk")
def test_a_full_disk_is_one_error_and_finished_work_is_kept(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_bytes, pwrite, keys = [0], os.pwrite, list[str]()

    def full(descriptor: int, content: Any, place: int) -> int:
        written_bytes[0] += len(content)
        if written_bytes[0] > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, content, place)

    monkeypatch.setattr(writer, "_SYNC_BYTES", 0)
    with monkeypatch.context() as patched:
        patched.setattr(chunks.os, "pwrite", full)
        with pytest.raises(
            UserError, match=r"a: No space left .* free some space and run the same"
        ):
            convert(source=start, target=tmp_path / "a", format="mds", workers=1)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", ".a.converting"}
    move = copy._copy_tensor

    def moves(key: str, *rest: Any, **options: Any) -> bool:
        keys.append(key)
        return move(key, *rest, **options)

    monkeypatch.setattr(copy, "_copy_tensor", moves)
    convert(source=start, target=tmp_path / "a", format="mds")
    assert 0 < len(keys) < len(weights(FAMILIES["llama"]))
    assert_same(open_any(tmp_path / "a"), FAMILIES["llama"])
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "a"}


ON_A_SMALL_DISK = """
import shutil, sys
from types import SimpleNamespace
from tokamake.cli import main

shutil.disk_usage = lambda _: SimpleNamespace(free=10**12)  # As it was before others wrote there.
main()
"""


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_real_full_disk_ends_no_process_by_a_signal(family: str, tmp_path: Path) -> None:
    mounted = ["unshare", "--map-root-user", "--user", "--mount", "sh", "-c"]
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=128k tmpfs '{disk}'"
    if not shutil.which("unshare") or subprocess.run([*mounted, mount], check=False).returncode:
        pytest.skip("this host does not let us mount anything")
    architecture = FAMILIES[family]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    convert(source=tmp_path / "hf", target=tmp_path / "start", format="megatron")
    program = [sys.executable, "-c", ON_A_SMALL_DISK, "convert", "--format=hf"]
    paths = [f"--from={tmp_path / 'start'}", f"--to={disk / 'a'}"]
    done = subprocess.run(
        [*mounted, f'{mount} && exec "$@"', "sh", *program, *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"tokamake convert: {disk / 'a'}: No space left on device")
    assert done.stderr.count("\n") == 1


def test_tensors_with_nan_are_named_also_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture = FAMILIES["llama"]
    tensors = weights(architecture)
    bad = ["model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight"]
    tensors[bad[0]][-1, -1] = float("nan")
    tensors[bad[1]][5, 7] = -float("inf")
    hf_folder.write(tmp_path / "hf", architecture, tensors)
    named = ", ".join(key for key in open_any(tmp_path / "hf").source if key[6:] in bad)
    told = f"holds NaN or infinity: {named}\n"
    for number, (form, dtype) in enumerate(
        [("mds", None), ("hf", None), ("mds", "fp16"), ("universal", None)]
    ):
        options: dict[str, Any] = {"format": form, "dtype": dtype}
        convert(source=tmp_path / "hf", target=tmp_path / f"{number}", **options)
        assert capsys.readouterr().err == told
    move, asked = copy._copy_tensor, list[str]()

    def moves(key: str, *rest: Any, **options: Any) -> bool:
        asked.append(key)
        if len(asked) == len(tensors):
            raise KeyboardInterrupt
        return move(key, *rest, **options)

    monkeypatch.setattr(writer, "_SYNC_BYTES", 0)
    with monkeypatch.context() as patched:
        patched.setattr(copy, "_copy_tensor", moves)
        with pytest.raises(KeyboardInterrupt):
            convert(source=tmp_path / "hf", target=tmp_path / "a", format="mds", workers=1)
    assert "unsound " in (tmp_path / ".a.converting/notes/done.txt").read_text()
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="mds")
    assert capsys.readouterr().err == told


KILLED = """
import os, signal, sys
from tokamake import plugins
from tokamake.checkpoint import writer
from tokamake.cli import main

left = [int(sys.argv.pop(1))]
number = left[0]

def counted(function):
    def call(*arguments, **options):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

for name in ("pwrite", "fsync", "rename", "replace", "unlink", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
writer._SYNC_BYTES = 0
try:
    main()
finally:
    print(number - left[0], file=sys.stderr)
"""


@pytest.mark.grid
@pytest.mark.fault("kill of a stage")
def test_a_conversion_killed_anywhere_is_whole_or_absent_and_continues_to_the_same_bytes(
    tmp_path: Path, inject: Inject
) -> None:
    shape = FAMILIES["llama"].model_copy(update={"num_hidden_layers": 1})
    hf_folder.write(tmp_path / "hf", shape, weights(shape))

    def run(number: int, target: Path) -> subprocess.CompletedProcess[str]:
        options = ["--format=mds", "--tensor-parallel-size=2", "--workers=1"]
        paths = [f"--from={tmp_path / 'hf'}", f"--to={target}"]
        command = [torch_python(), "-c", KILLED, str(number), "convert", *paths, *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    calm = run(10**9, tmp_path / "calm")
    expected, calls = contents(tmp_path / "calm"), int(calm.stderr)
    killed = 0
    for number in [*range(1, calls - 8, max(1, calls // 10)), *range(calls - 8, calls + 1)]:
        target = tmp_path / f"{number}"
        target.mkdir()
        inject()
        if run(number, target).returncode == 0:
            continue  # how many calls there are may change with threads' turns
        killed += 1
        assert contents(target) in ({}, expected)
        if not contents(target):
            convert(source=tmp_path / "hf", target=target, format="mds", tensor_parallel_size=2)
        assert contents(target) == expected
        assert not (tmp_path / f".{number}.converting/notes/plan.json").exists()
    assert killed > 12


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", ["mds", "megatron", "torch_dist", "universal"])
def test_a_misspelled_module_of_a_format_loses_no_weights(
    name: str, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = plugins.load("models/*/megatron", "llama")
    *others, last = family.LAYER
    assert last.ours == ("mlp.down_proj",)
    monkeypatch.setattr(family, "LAYER", (*others, last._replace(ours=("mlp.down",))))
    lost = r"no place for the weights model\.layers\.0\.mlp\.down_proj\.weight, model\.layers\.1"
    with pytest.raises(AssertionError, match=f"format {name} has {lost}"):
        writer.write(tmp_path / "a", open_any(start), name, Target())
    assert not (tmp_path / "a").exists()
