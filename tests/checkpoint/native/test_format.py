"""Native checkpoints are opened, laid out and filled."""

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.support import native_weights
from tests.support.engines import build, coming, go, parts
from tests.support.layouts import laid_out, parallel
from tests.support.ranks import spawn
from tests.support.runs import ARCHITECTURE, make_run, train_here
from tokamake import files
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.native import dcp_storage
from tokamake.checkpoint.native import format as plug_in
from tokamake.checkpoint.native.folder import DESCRIPTION, read_description
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.copy import fill
from tokamake.checkpoint.tensors.extents import Chunk, Extent
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import pickle_reader
from tokamake.config.resolved_run import read_run
from tokamake.prove.engine_tensors import fragments

pytestmark = pytest.mark.usefixtures("lone_rank")

SAVED = "global_step2"


def by_torch(folder: Path) -> dict[str, Tensor]:
    """All whole tensors, as plain torch reads them."""
    known: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in known.items()
        if not key.startswith("rank.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def same(source: TensorSource, expected: dict[str, Tensor]) -> None:
    """Check that tensors are equal bit by bit."""
    assert {*source} == {*expected}
    for key, tensor in expected.items():
        assert source.dtype(key).torch == tensor.dtype
        stored = source.read(key)
        assert stored.shape == tensor.shape
        assert torch.equal(
            stored.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)
        ), key


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target | None = None) -> Path:
    """A new checkpoint of the same tensors."""
    folder.mkdir(parents=True)
    extents = plug_in.lay_out(folder, checkpoint, target=target or Target())
    source = checkpoint.source
    assert [*fill(extents, source, keys=source)] == [*source]
    return folder


# Reading.


def test_find_accepts_the_folder_and_its_parent(root: Path, saved: Path, tmp_path: Path) -> None:
    assert plug_in.find(saved) == plug_in.find(saved.parent) == saved
    for other in (root, root / "run", tmp_path / "missing", root / "weights.txt"):
        assert plug_in.find(other) is None
    (tmp_path / "latest").write_text("missing")
    assert plug_in.find(tmp_path) is None


def test_saved_tensors_are_read_back(saved: Path) -> None:
    checkpoint = plug_in.open_checkpoint(saved)
    assert checkpoint.architecture == ARCHITECTURE
    assert vars(checkpoint.progress) == {
        "iteration": 2,
        "consumed_samples": 16,
        "consumed_tokens": 256,
    }
    assert checkpoint.notes["world_size"] == 1
    expected = by_torch(saved)
    assert {key.split(".")[1] for key in expected} == {"model", "lm_head"} | {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    same(checkpoint.source, expected)
    for name, tensor in native_weights.read(saved)[1].items():
        assert torch.equal(checkpoint.source.read(f"model.{name}"), tensor)


def test_archives_with_the_same_head_are_parsed_once(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, reads = pickle_reader.parse, list[Any]()

    def count(stream: Any) -> Any:
        reads.append(stream)
        return parse(stream)

    monkeypatch.setattr(pickle_reader, "parse", count)
    shapes = {*plug_in.open_checkpoint(saved).source.shapes.values()}
    assert len(reads) == len(shapes) == 7


def test_strided_tensors_are_read(saved: Path, tmp_path: Path) -> None:
    # As torch.save writes them: what is dense as it is, with strides.
    tensors = {
        "model.a": torch.arange(12.0).view(3, 4).t(),
        "model.b": torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4).permute(1, 2, 0),
        "model.c": torch.arange(20).view(4, 5)[1:, ::2],
        **{f"optimizer.d.{name}": torch.tensor(3.0, dtype=torch.float64) for name in "ab"},
    }
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    description = files.read_sealed_json(saved / DESCRIPTION, "")
    files.write_json(tmp_path / DESCRIPTION, {**description, "files": None, "world_size": 0})
    source = plug_in.open_checkpoint(tmp_path).source
    assert not all(chunk.stride == (3, 1) for extent in source.extents for chunk in extent.chunks)
    same(source, {key: tensor.contiguous() for key, tensor in tensors.items()})


LAYOUTS = [{"zero_stage": 3}, parallel(tp=2), parallel(pp=2)]


def save_all(config: Path, folder: Path) -> None:
    """Save checkpoints of several layouts after two steps each."""
    for number, changes in enumerate(LAYOUTS):
        run = laid_out(read_run(config), changes)
        engine = build(run)
        go(engine, coming(engine, run), 2)
        engine.save(folder / f"{number}", {"iteration": 2}).wait()
        dist.barrier()


@pytest.mark.ranks
def test_checkpoints_of_two_ranks_are_read(root: Path, tmp_path: Path) -> None:
    spawn(save_all, 2, make_run(root, "two-ranks"), tmp_path)
    for number, changes in enumerate(LAYOUTS):
        folder = tmp_path / f"{number}"
        checkpoint, expected = plug_in.open_checkpoint(folder), by_torch(folder)
        assert checkpoint.notes["world_size"] == 2
        same(checkpoint.source, expected)
        in_parts = len(checkpoint.source.extents) > len(expected)
        assert in_parts == (changes != LAYOUTS[2])
        again = lay_out(tmp_path / f"again-{number}", checkpoint)
        same(plug_in.open_checkpoint(again).source, expected)
        assert len([*folder.glob("*.distcp")]) == 2 * len([*again.glob("*.distcp")]) == 2


# Writing.


@pytest.mark.parametrize("most", [5 * 10**9, 60_000])
def test_laid_out_checkpoints_are_read_back(saved: Path, tmp_path: Path, most: int) -> None:
    before = plug_in.open_checkpoint(saved)
    folder = lay_out(tmp_path / SAVED, before, target=Target(max_shard_bytes=most))
    after, expected = plug_in.open_checkpoint(folder), by_torch(saved)
    assert replace(after, source=before.source, path=saved, notes=before.notes) == before
    same(after.source, expected)
    read = by_torch(folder)
    assert [*read] == [*expected]
    for key, tensor in expected.items():
        assert torch.equal(read[key], tensor), key
    architecture, weights, step = native_weights.read(folder)
    assert (architecture, step) == (ARCHITECTURE, 2)
    for name, tensor in native_weights.read(saved)[1].items():
        assert torch.equal(weights[name], tensor)
    sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
    assert max(sizes) <= most
    assert (len(sizes) > 5) == (most == 60_000)
    assert sorted(path.name for path in folder.iterdir())[:2] == [".metadata", "__0_0.distcp"]


def test_the_same_checkpoint_gives_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    one, two = (lay_out(tmp_path / name / SAVED, plug_in.open_checkpoint(saved)) for name in "ab")
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()


def test_weights_get_the_requested_dtype(saved: Path, tmp_path: Path) -> None:
    folder = lay_out(tmp_path / SAVED, plug_in.open_checkpoint(saved), target=Target(dtype="bf16"))
    for key, tensor in by_torch(saved).items():
        expected = tensor.bfloat16() if key.startswith("model.") else tensor
        assert torch.equal(plug_in.open_checkpoint(folder).source.read(key), expected)
    assert native_weights.read(folder)[1]["lm_head.weight"].dtype == torch.bfloat16


def test_holes_take_no_space_until_they_are_filled(saved: Path, tmp_path: Path) -> None:
    file, rows = tmp_path / "large", 2**20
    file.touch()
    os.truncate(file, rows * 2**13)  # more than 4 GiB
    chunk = Chunk("model.large", (slice(0, rows), slice(0, 2**11)))
    extent = Extent(file, "large", 0, (rows, 2**11), dtypes.FLOAT32, (chunk,))
    source = TensorSource([extent], {"model.large": extent.shape})
    folder = tmp_path / SAVED
    folder.mkdir()
    checkpoint = replace(plug_in.open_checkpoint(saved), source=source)
    (planned,) = plug_in.lay_out(folder, checkpoint, target=Target())
    stat = planned.file.stat()
    assert stat.st_blocks * 512 < 2**17 < rows * 2**13 < stat.st_size
    (again,) = plug_in.open_checkpoint(folder).source.extents
    assert (again.file, again.offset, again.numel) == (planned.file, planned.offset, planned.numel)
    assert planned.offset % 64 == 0


def test_a_converted_checkpoint_has_the_hashes_of_its_files(saved: Path, tmp_path: Path) -> None:
    convert(source=saved, target=tmp_path / "a", format="native")
    folder = tmp_path / "a" / SAVED
    names = {path.name for path in folder.iterdir()} - {DESCRIPTION}
    assert read_description(folder)["files"].keys() == names


def test_a_run_starts_from_a_laid_out_checkpoint(root: Path, saved: Path, tmp_path: Path) -> None:
    folder = lay_out(
        tmp_path / SAVED, plug_in.open_checkpoint(saved), target=Target(max_shard_bytes=60_000)
    )
    files.write_text(tmp_path / "latest", SAVED)
    config = make_run(root, "starts", train_steps=2)
    start = read_run(config).checkpoint
    config.write_text(config.read_text().replace(str(start), str(tmp_path)))
    run = read_run(config)
    assert run.checkpoint == tmp_path
    expected = native_weights.read(folder)[1]
    for fragment in fragments(build(run)):
        for name, _, slices, tensor in parts(fragment, fragment.local):
            assert torch.equal(expected[name][slices], tensor)
    assert train_here(config) == 0


def test_a_run_continues_from_a_laid_out_checkpoint(
    root: Path, saved: Path, tmp_path: Path
) -> None:
    run, losses = read_run(make_run(root, "continues")), []
    for folder in (saved, lay_out(tmp_path / SAVED, plug_in.open_checkpoint(saved))):
        engine = build(run, continues=True)
        engine.load(folder)
        losses.append(go(engine, coming(engine, run, done=2), 3))
    assert losses[0] == losses[1]


def test_reading_agrees_with_dcp(saved: Path) -> None:
    metadata, expected = (
        dcp_storage.DcpReader(saved).read_metadata(),
        dcp.FileSystemReader(saved).read_metadata(),
    )
    for name in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(metadata, name) == getattr(expected, name)
