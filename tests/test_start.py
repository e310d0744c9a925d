"""A run's start: each rank reads what it holds, no more, and nothing of it where it continues."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build
from gpts import ARCHITECTURES as GPTS
from llamas import ARCHITECTURES as LLAMAS
from runs import ARCHITECTURE, losses, make_run, train_here
from starts import SAVED, prepare_tied

from tokamake import files
from tokamake.checkpoint import latest, megatron_deepspeed, native, tensors
from tokamake.checkpoint.megatron_layout import Unfused
from tokamake.config import read_run
from tokamake.errors import UserError
from tokamake.train.restart import weights_digest

STATES = Path("global_step0") / "mp_rank_00_model_states.pt"


pytestmark = pytest.mark.usefixtures("lone_rank")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tied(tmp_path_factory.mktemp("start"))


def refuse(*_: Any, **__: Any) -> Any:
    pytest.fail("reads what it need not")


# What tells starts apart.


def write(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    """Make a start; its digest."""
    megatron_deepspeed.write(folder, ARCHITECTURE, weights)
    return weights_digest(folder)


def test_every_weight_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "sha256", refuse)
    weights = tensors.random(ARCHITECTURE, 5)
    found = {write(tmp_path / "start", weights)}
    assert {write(tmp_path / "again", weights)} == found
    for name, tensor in weights.items():
        changed = tensor.clone()
        changed.view(-1)[-1] += 1e-6
        found.add(write(tmp_path / "start", {**weights, name: changed}))
    first, second = (f"model.layers.{number}.mlp.down_proj.weight" for number in (0, 1))
    swapped = {first: weights[second], second: weights[first]}
    found.add(write(tmp_path / "start", weights | swapped))
    assert len(found) == 1 + len(weights) + 1


def test_what_lies_beside_the_weights_does_not_count(tmp_path: Path) -> None:
    before = write(tmp_path, tensors.random(ARCHITECTURE, 5))
    torch.save(torch.ones(9), tmp_path / "global_step0/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert weights_digest(tmp_path) == before
    (tmp_path / "global_step0").rename(tmp_path / "global_step7")
    (tmp_path / "latest").write_text("global_step7")
    assert weights_digest(tmp_path) == before


def test_the_name_of_the_file_does_not_count(tmp_path: Path) -> None:
    # torch calls the folder inside the file after it.
    write(tmp_path, tensors.random(ARCHITECTURE, 5))
    state, found = torch.load(tmp_path / STATES, weights_only=False), set()
    for number in range(2):
        (path,) = tmp_path.glob("*/*.pt")
        path.unlink()
        torch.save(state, path.with_name(f"mp_rank_0{number}_model_states.pt"))
        found.add(weights_digest(tmp_path))
    assert len(found) == 1


def num_read() -> int:
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_no_weights_are_read_to_tell_them(tmp_path: Path) -> None:
    wide = ARCHITECTURE.model_copy(update={"vocab_size": 100_000})
    megatron_deepspeed.write(tmp_path, wide, tensors.random(wide, 5))
    before = num_read()
    weights_digest(tmp_path)
    assert num_read() - before < 100_000 < (tmp_path / STATES).stat().st_size / 100


@pytest.mark.parametrize("zipped", [False, True])
def test_files_without_checksums_are_read(tmp_path: Path, zipped: bool) -> None:
    weights, found = tensors.random(ARCHITECTURE, 5), set()
    torch.serialization.set_crc32_options(False)
    try:
        for _ in range(2):
            megatron_deepspeed.write(tmp_path, ARCHITECTURE, weights)
            state = torch.load(tmp_path / STATES, weights_only=False)
            torch.save(state, tmp_path / STATES, _use_new_zipfile_serialization=zipped)
            assert zipfile.is_zipfile(tmp_path / STATES) == zipped
            found.add(weights_digest(tmp_path))
            weights["model.norm.weight"] += 1
    finally:
        torch.serialization.set_crc32_options(True)
    assert len(found) == 2


def imitate(folder: Path, text: str = "weights", **state: Any) -> str:
    """Make what looks like a run's checkpoint; its digest as a start."""
    path = folder / SAVED
    path.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text(SAVED)
    (path / native.DESCRIPTION).write_text("{}")
    (path / "__0_0.distcp").write_text(text)
    (path / "state.json").unlink(missing_ok=True)
    if state:
        whole = {"digest": "a", "step": 2, "consumed_samples": 16, "seconds": 1.0, "world_size": 1}
        (path / "state.json").write_text(json.dumps(whole | state))
    return weights_digest(folder)


def test_checkpoints_of_runs_are_told_by_run_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = {imitate(tmp_path / "strange"), imitate(tmp_path / "strange", "others")}
    monkeypatch.setattr(files, "sha256", refuse)
    before = imitate(tmp_path / "one", step=2)
    assert imitate(tmp_path / "two", "optimizer states", seconds=9.0, world_size=4) == before
    others = {imitate(tmp_path / "one", step=4), imitate(tmp_path / "one", digest="b")}
    assert len({before, *others, *strange}) == 5
    (tmp_path / "one" / SAVED / "state.json").write_text('"text"')
    with pytest.raises(UserError, match=r"state\.json: damaged; name another checkpoint in"):
        weights_digest(tmp_path / "one")


def test_a_start_is_read_once_to_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(tmp_path / "a")
    note = tmp_path / "note"
    before = weights_digest(tmp_path / "a", note)
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", refuse)
        assert weights_digest(tmp_path / "a", note) == before
    imitate(tmp_path / "a", "others.")
    assert weights_digest(tmp_path / "a", note) == weights_digest(tmp_path / "a") != before


# Tensors that are taken out of Megatron's when they are asked for.


@pytest.mark.parametrize("architecture", [*LLAMAS[::3], *GPTS.values()], ids=str)
def test_lazy_tensors_are_the_whole_ones(
    tmp_path: Path, architecture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tensors.random(architecture, 5)
    megatron_deepspeed.write(tmp_path, architecture, expected)
    with monkeypatch.context() as patch:
        patch.setattr(Unfused, "__getitem__", refuse)
        found = latest.describe(tmp_path)
    assert (found.path.name, found.architecture, found.iteration) == (
        "global_step0",
        architecture,
        0,
    )
    assert found.tensors is not None
    assert [*found.tensors] == [*expected]
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor, expected[name]), name


def test_asking_for_a_tensor_copies_it_alone(tmp_path: Path) -> None:
    megatron_deepspeed.write(tmp_path, ARCHITECTURE, tensors.random(ARCHITECTURE, 5))
    found = latest.describe(tmp_path).tensors
    assert isinstance(found, Unfused)
    for name, tensor in found.items():
        stored = found.stored[name].untyped_storage()
        if any(f"{part}_proj" in name for part in "qkv"):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        else:
            assert tensor.untyped_storage().data_ptr() == stored.data_ptr(), name


# Runs that begin and continue.


@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_continuing_reads_nothing_of_the_start(
    root: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(root, f"continues-{backend}", backend=backend)
    assert train_here(config) == 0
    before = losses(config)
    (read_run(config).output / "latest").write_text("global_step4")
    with monkeypatch.context() as patch:
        for module, name in (
            (latest, "describe"),
            (latest, "read"),
            (megatron_deepspeed, "lazily"),
            (files, "sha256"),
        ):
            patch.setattr(module, name, refuse)
        assert train_here(config) == 0
    assert losses(config) == before


def test_a_run_starts_from_another(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = read_run(make_run(root, "first", train_steps=2))
    assert train_here(root / "first" / "run.yaml") == 0
    config = make_run(root, "second", train_steps=2)
    text = config.read_text().replace(str(first.checkpoint), str(first.output))
    config.write_text(text)
    assert train_here(config) == 0
    assert train_here(config) == 0
    assert "already at step 2" in capsys.readouterr().out


def test_resolving_reads_no_tensors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(make_run(root, "resolved", train_steps=2))
    assert train_here(root / "resolved" / "run.yaml") == 0
    for module, name in ((native, "read"), (native, "fill"), (megatron_deepspeed, "read")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(Unfused, "__getitem__", refuse)
    make_run(root, "resolved-again")
    path = latest.describe(run.output).path
    assert latest.describe(run.output) == latest.Description(path, run.architecture, 2, None)
    (path / ".metadata").unlink()
    with pytest.raises(UserError, match=r"\.metadata: no such file; name another checkpoint"):
        latest.describe(run.output)


def start_without(file: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (start_without("__0_0.distcp"), r"global_step2: damaged \(.*; name another checkpoint"),
        (lambda f: os.truncate(f / "__0_0.distcp", 999), r"global_step2: damaged \("),
        (lambda f: os.truncate(f / ".metadata", 99), r"global_step2: no whole checkpoint"),
    ],
)
def test_broken_starts_are_refused(
    root: Path, change: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    run = read_run(make_run(root, "broken"))
    build(run).save(tmp_path / SAVED, {"iteration": 2}).wait()
    (tmp_path / "latest").write_text(SAVED)
    change(tmp_path / SAVED)
    with pytest.raises(UserError, match=message) as error:
        build(run.model_copy(update={"checkpoint": tmp_path}))
    assert "\n" not in str(error.value)


def test_a_start_of_another_architecture_is_refused(root: Path) -> None:
    run = read_run(make_run(root, "other-architecture"))
    with pytest.raises(UserError, match=r"not of the architecture .* run `tokamake resolve` again"):
        build(run.model_copy(update={"checkpoint": root / "other"}))
