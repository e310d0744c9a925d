"""The initial checkpoint of a run: its digest, damage, and that resuming does not read it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.dense import latent
from tests.support.engines import build
from tests.support.random_tensors import random_tensors
from tests.support.runs import ARCHITECTURE, losses, make_run, train_here, weights, write_start
from tests.support.tied_start import SAVED, TIED, prepare_tied
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.native import folder as native_folder
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.folder import DESCRIPTION, NativeCheckpoint, open_native
from tokamake.config.resolved_run import read_run
from tokamake.errors import UserError
from tokamake.preflight.initial_checkpoint import initial_architecture
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints import first_weights
from tokamake.train.checkpoints.first_weights import weights_digest

pytestmark = pytest.mark.usefixtures("lone_rank")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tied(tmp_path_factory.mktemp("start"))


def refuse(*_: Any, **__: Any) -> Any:
    pytest.fail("reads more than it needs")


# Digests.


def digest_of(folder: Path, note: Path | None = None) -> str:
    return weights_digest(folder, Ranks(0, 1, 0, 1), note=note)


def write(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    """Write an initial checkpoint and return its digest."""
    write_start(folder, ARCHITECTURE, weights)
    return digest_of(folder)


def test_the_digest_depends_on_every_weight(tmp_path: Path) -> None:
    weights = random_tensors(ARCHITECTURE, 5)
    digests = {write(tmp_path / "start", weights)}
    assert {write(tmp_path / "again", weights)} == digests
    for name, tensor in weights.items():
        changed = tensor.clone()
        changed.view(-1)[-1] += 1e-6
        digests.add(write(tmp_path / "start", {**weights, name: changed}))
    first, second = (f"model.layers.{number}.mlp.down_proj.weight" for number in (0, 1))
    swapped = {first: weights[second], second: weights[first]}
    digests.add(write(tmp_path / "start", weights | swapped))
    assert len(digests) == 1 + len(weights) + 1


def imitate(folder: Path, text: str = "weights", **state: Any) -> str:
    """Write files that look like a run's checkpoint, and return its digest."""
    path = folder / SAVED
    path.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text(SAVED)
    (path / DESCRIPTION).write_text("{}")
    (path / "__0_0.distcp").write_text(text)
    (path / "state.json").unlink(missing_ok=True)
    if state:
        whole = {"digest": "a", "step": 2, "consumed_samples": 16, "seconds": 1.0, "world_size": 1}
        (path / "state.json").write_text(json.dumps(whole | state))
    return digest_of(folder)


def test_digests_of_run_checkpoints_depend_on_run_and_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = {imitate(tmp_path / "strange"), imitate(tmp_path / "strange", "others")}
    monkeypatch.setattr(first_weights, "_hashes", refuse)
    before = imitate(tmp_path / "one", step=2)
    assert imitate(tmp_path / "two", "optimizer states", seconds=9.0, world_size=4) == before
    others = {imitate(tmp_path / "one", step=4), imitate(tmp_path / "one", digest="b")}
    assert len({before, *others, *strange}) == 5
    (tmp_path / "one" / SAVED / "state.json").write_text('"text"')
    with pytest.raises(UserError, match=r"state\.json: damaged: .*; name another checkpoint in"):
        digest_of(tmp_path / "one")


def test_an_initial_checkpoint_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(tmp_path / "a")
    note = tmp_path / "note"
    before = digest_of(tmp_path / "a", note)
    with monkeypatch.context() as patch:
        patch.setattr(first_weights, "_hashes", refuse)
        assert digest_of(tmp_path / "a", note) == before
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    imitate(tmp_path / "a", "others.")
    for path, written in times.items():
        os.utime(
            path, ns=(written, written + 1)
        )  # two writes within one clock tick have equal times
    assert digest_of(tmp_path / "a", note) == digest_of(tmp_path / "a") != before
    for damaged in ("", "[]", "null", "{half", '{"digest": 1}'):
        note.write_text(damaged)
        assert digest_of(tmp_path / "a", note) == digest_of(tmp_path / "a")


# Runs that start and resume.


@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_resuming_does_not_read_the_initial_checkpoint(
    root: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"train_steps": 4, "evaluation_steps": 0}
    config = make_run(root, f"continues-{backend}", backend=backend, **short)
    assert train_here(config) == 0
    before = losses(config)
    (read_run(config).output / "latest").write_text("global_step2")
    with monkeypatch.context() as patch:
        for module, name in (
            (native_folder, "open_native"),
            (first_weights, "_hashes"),
        ):
            patch.setattr(module, name, refuse)
        assert train_here(config) == 0
    assert losses(config) == before


def test_a_run_starts_from_the_checkpoint_of_another(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = read_run(make_run(root, "first", train_steps=2))
    assert train_here(root / "first" / "run.yaml") == 0
    config = make_run(root, "second", train_steps=2)
    text = config.read_text().replace(str(first.checkpoint), str(first.output))
    config.write_text(text)
    assert train_here(config) == 0
    assert train_here(config) == 0
    assert "already at step 2" in capsys.readouterr().out


def test_resolve_reads_no_tensors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(make_run(root, "resolved", train_steps=2))
    assert train_here(root / "resolved" / "run.yaml") == 0
    monkeypatch.setattr(training_state, "fill", refuse)
    make_run(root, "resolved-again")
    path = open_native(run.output).path
    assert open_native(run.output) == NativeCheckpoint(path, run.architecture, 2)
    (path / ".metadata").unlink()
    with pytest.raises(UserError, match=r"\.metadata: no such file; name another checkpoint"):
        open_native(run.output)


def start_without(file: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (start_without("__0_0.distcp"), r"__0_0\.distcp: no such file; name another checkpoint"),
        (lambda f: os.truncate(f / "__0_0.distcp", 999), r"__0_0\.distcp: damaged: has 999 of"),
        (lambda f: os.truncate(f / ".metadata", 99), r"global_step2: no complete checkpoint"),
    ],
)
def test_damaged_initial_checkpoints_are_refused(
    root: Path, change: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    run = read_run(make_run(root, "broken"))
    build(run).save(tmp_path / SAVED, {"iteration": 2}).wait()
    (tmp_path / "latest").write_text(SAVED)
    change(tmp_path / SAVED)
    with pytest.raises(UserError, match=message) as error:
        build(run.model_copy(update={"checkpoint": tmp_path}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_an_initial_checkpoint_with_nan_is_refused(
    root: Path, tmp_path: Path, backend: str
) -> None:
    """Or the first step would have a bad loss, and its documents would be blamed."""
    weights = random_tensors(TIED, 5)
    weights["model.norm.weight"][3] = float("inf")
    write_start(tmp_path / "start", TIED, weights)
    run = read_run(make_run(root, f"nan-{backend}", backend=backend))
    run = run.model_copy(update={"checkpoint": tmp_path / "start"})
    with pytest.raises(UserError, match=r"start.*: model\.model\.norm\.weight holds NaN or infin"):
        build(run)


def test_an_initial_checkpoint_of_another_architecture_is_refused(root: Path) -> None:
    run = read_run(make_run(root, "other-architecture"))
    with pytest.raises(UserError, match=r"not of the architecture .* run `tokamake resolve` again"):
        build(run.model_copy(update={"checkpoint": root / "other"}))


def test_a_run_has_as_many_layers_for_further_tokens_as_its_checkpoint(tmp_path: Path) -> None:
    shapes = [latent(num_nextn_predict_layers=number) for number in (0, 1)]
    for start, wanted in (shapes, shapes[::-1]):
        stated = tmp_path / "model.yaml"
        stated.write_text(yaml.safe_dump(wanted.model_dump(mode="json", exclude_none=True)))
        number = start.num_mtp_layers
        has = f"it has {number or 'no'} layers that predict further tokens"
        with pytest.raises(UserError, match=f"{has}: set num_nextn_predict_layers to {number}\n"):
            initial_architecture(start, stated, source="start")


def test_an_initial_checkpoint_in_bf16_trains_in_fp32(root: Path, tmp_path: Path) -> None:
    convert(source=root / "start", target=tmp_path / "a", format="native", dtype="bf16")
    config = make_run(root, "low", start=tmp_path / "a", train_steps=2)
    (tmp_path / "b").mkdir()
    rounded = {name: tensor.bfloat16().float() for name, tensor in random_tensors(TIED, 5).items()}
    write_start(tmp_path / "b" / "start", TIED, rounded)
    rounded_config = make_run(root, "high", start=tmp_path / "b" / "start", train_steps=2)
    for path in (config, rounded_config):
        assert train_here(path) == 0
    assert losses(config) == losses(rounded_config)
    rounded = weights(rounded_config)
    for name, tensor in weights(config).items():
        assert torch.equal(tensor, rounded[name])


def test_an_initial_checkpoint_of_another_format_is_refused(root: Path, tmp_path: Path) -> None:
    convert(source=root / "start", target=tmp_path / "a", format="mds")
    run = read_run(make_run(root, "other-format")).model_copy(update={"checkpoint": tmp_path / "a"})
    with pytest.raises(
        UserError, match=r"not in tokamake's native format; .* convert --format nat"
    ):
        build(run)
    with pytest.raises(UserError, match=r"no weights in tokamake's own format; .* --format native"):
        digest_of(run.checkpoint)
