"""Native checkpoints are opened, laid out and filled; no code in them runs."""

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.support.engines import build, coming, go, parts, pieces
from tests.support.layouts import laid_out, parallel
from tests.support.ranks import spawn
from tests.support.runs import ARCHITECTURE, make_run, prepare, train_here
from tokamake import files
from tokamake.checkpoint.native import dcp_reader, training_state
from tokamake.checkpoint.native import format as plug_in
from tokamake.checkpoint.native.folder import DESCRIPTION
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.copy import fill
from tokamake.checkpoint.tensors.extents import Chunk, Extent, TensorSource
from tokamake.checkpoint.torch_files import pickle_reader
from tokamake.config.resolved_run import read_run
from tokamake.errors import UserError

pytestmark = pytest.mark.usefixtures("lone_rank")

SAVED = "global_step2"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of two steps."""
    folder = prepare(tmp_path_factory.mktemp("native"))
    assert train_here(make_run(folder, "run", train_steps=2)) == 0
    return folder


@pytest.fixture(scope="module")
def saved(root: Path) -> Path:
    """Its checkpoint; do not write there."""
    return read_run(root / "run/run.yaml").output / SAVED


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to write in."""
    return Path(shutil.copytree(saved, tmp_path / "training" / SAVED))


def by_torch(folder: Path) -> dict[str, Tensor]:
    """All whole tensors, as plain torch reads them."""
    known: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in known.items()
        if not key.startswith("rank.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def same(found: TensorSource, expected: dict[str, Tensor]) -> None:
    """See that tensors equal bit by bit."""
    assert {*found} == {*expected}
    for key, tensor in expected.items():
        assert found.dtype(key).torch == tensor.dtype
        one = found.read(key)
        assert one.shape == tensor.shape
        assert torch.equal(one.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), key


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target | None = None) -> Path:
    """A new checkpoint of the same tensors."""
    folder.mkdir(parents=True)
    regions = plug_in.lay_out(folder, checkpoint, target or Target())
    source = checkpoint.source
    assert [*fill(regions, source, keys=source)] == [*source]
    return folder


# Reading.


def test_find_accepts_the_folder_and_its_parent(root: Path, saved: Path, tmp_path: Path) -> None:
    assert plug_in.find(saved) == plug_in.find(saved.parent) == saved
    for other in (root, root / "run", tmp_path / "missing", root / "weights.txt"):
        assert plug_in.find(other) is None
    (tmp_path / "latest").write_text("missing")
    assert plug_in.find(tmp_path) is None


def test_saved_tensors_are_read_back(saved: Path) -> None:
    found = plug_in.open_checkpoint(saved)
    assert found.architecture == ARCHITECTURE
    assert vars(found.progress) == {
        "iteration": 2,
        "consumed_samples": 16,
        "consumed_tokens": 256,
    }
    assert found.notes["world_size"] == 1
    expected = by_torch(saved)
    assert {key.split(".")[1] for key in expected} == {"model", "lm_head"} | {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    same(found.source, expected)
    for name, tensor in training_state.read(saved)[1].items():
        assert torch.equal(found.source.read(f"model.{name}"), tensor)


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
        "optimizer.d.x": torch.tensor(3.0, dtype=torch.float64),
    }
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    shutil.copy(saved / DESCRIPTION, tmp_path)
    found = plug_in.open_checkpoint(tmp_path).source
    assert not all(block.stride == (3, 1) for each in found.extents for block in each.chunks)
    same(found, {key: tensor.contiguous() for key, tensor in tensors.items()})


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
        found, expected = plug_in.open_checkpoint(folder), by_torch(folder)
        assert found.notes["world_size"] == 2
        same(found.source, expected)
        in_parts = len(found.source.extents) > len(expected)
        assert in_parts == (changes != LAYOUTS[2])
        again = lay_out(tmp_path / f"again-{number}", found)
        same(plug_in.open_checkpoint(again).source, expected)
        assert len([*folder.glob("*.distcp")]) == 2 * len([*again.glob("*.distcp")]) == 2


# Writing.


@pytest.mark.parametrize("most", [5 * 10**9, 60_000])
def test_laid_out_checkpoints_are_read_back(saved: Path, tmp_path: Path, most: int) -> None:
    before = plug_in.open_checkpoint(saved)
    folder = lay_out(tmp_path / SAVED, before, Target(max_shard_bytes=most))
    after, expected = plug_in.open_checkpoint(folder), by_torch(saved)
    assert replace(after, source=before.source, path=saved, notes=before.notes) == before
    same(after.source, expected)
    read = by_torch(folder)
    assert [*read] == [*expected]
    for key, tensor in expected.items():
        assert torch.equal(read[key], tensor), key
    architecture, weights, step = training_state.read(folder)
    assert (architecture, step) == (ARCHITECTURE, 2)
    for name, tensor in training_state.read(saved)[1].items():
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
    folder = lay_out(tmp_path / SAVED, plug_in.open_checkpoint(saved), Target(dtype="bf16"))
    for key, tensor in by_torch(saved).items():
        wanted = tensor.bfloat16() if key.startswith("model.") else tensor
        assert torch.equal(plug_in.open_checkpoint(folder).source.read(key), wanted)
    assert training_state.read(folder)[1]["lm_head.weight"].dtype == torch.bfloat16


def test_holes_take_no_space_until_they_are_filled(saved: Path, tmp_path: Path) -> None:
    file, rows = tmp_path / "large", 2**20
    file.touch()
    os.truncate(file, rows * 2**13)  # more than 4 GiB
    block = Chunk("model.large", (slice(0, rows), slice(0, 2**11)))
    region = Extent(file, "large", 0, (rows, 2**11), dtypes.FLOAT32, (block,))
    source = TensorSource([region], {"model.large": region.shape})
    folder = tmp_path / SAVED
    folder.mkdir()
    checkpoint = replace(plug_in.open_checkpoint(saved), source=source)
    (found,) = plug_in.lay_out(folder, checkpoint, Target())
    stat = found.file.stat()
    assert stat.st_blocks * 512 < 2**17 < rows * 2**13 < stat.st_size
    (again,) = plug_in.open_checkpoint(folder).source.extents
    assert (again.file, again.offset, again.numel) == (found.file, found.offset, found.numel)
    assert found.offset % 64 == 0


def test_a_run_starts_from_a_laid_out_checkpoint(root: Path, saved: Path, tmp_path: Path) -> None:
    folder = lay_out(
        tmp_path / SAVED, plug_in.open_checkpoint(saved), Target(max_shard_bytes=60_000)
    )
    files.write_text(tmp_path / "latest", SAVED)
    config = make_run(root, "starts", train_steps=2)
    start = read_run(config).checkpoint
    config.write_text(config.read_text().replace(str(start), str(tmp_path)))
    run = read_run(config)
    assert run.checkpoint == tmp_path
    expected = training_state.read(folder)[1]
    for piece in pieces(build(run)):
        for name, _, place, tensor in parts(piece, piece.local):
            assert torch.equal(expected[name][place], tensor)
    assert train_here(config) == 0


def test_a_run_continues_from_a_laid_out_checkpoint(
    root: Path, saved: Path, tmp_path: Path
) -> None:
    run, found = read_run(make_run(root, "continues")), []
    for folder in (saved, lay_out(tmp_path / SAVED, plug_in.open_checkpoint(saved))):
        engine = build(run, continues=True)
        engine.load(folder)
        found.append(go(engine, coming(engine, run, done=2), 3))
    assert found[0] == found[1]


# Damage.


def missing(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def truncated(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 300_000)


def barely_truncated(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


def overwritten(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("r+b") as stream:
        stream.write(b"?" * 2000)


def described(change: Callable[[records.Metadata], Any]) -> Callable[[Path], None]:
    """What changes DCP's metadata."""

    def write(folder: Path) -> None:
        found = describe(folder)
        change(found)
        (folder / ".metadata").write_bytes(pickle.dumps(found))

    return write


def describe(folder: Path) -> records.Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


KEY = "model.model.norm.weight"
INDEX = records.MetadataIndex(KEY, [0])


def outside(found: records.Metadata) -> None:
    found.storage_data[INDEX].relative_path = "../__0_0.distcp"


def larger(found: records.Metadata) -> None:
    found.state_dict_metadata[KEY].chunks[0].sizes = torch.Size([33])


def of_other_size(found: records.Metadata) -> None:
    found.state_dict_metadata[KEY].size = torch.Size([16])
    found.state_dict_metadata[KEY].chunks[0].sizes = torch.Size([16])


def overlapping(found: records.Metadata) -> None:
    """All 32 elements as far as their number tells, of which the last 12 are nowhere."""
    found.state_dict_metadata[KEY].chunks = [
        records.ChunkStorageMetadata(torch.Size([at]), torch.Size([size]))
        for at, size in ((0, 20), (8, 12))
    ]
    last = max(info.offset + info.length for info in found.storage_data.values())
    place = _StorageInfo("__0_0.distcp", last, 1000)
    found.storage_data[records.MetadataIndex(KEY, torch.Size([8]), 1)] = place


def with_a_hole(found: records.Metadata) -> None:
    found.state_dict_metadata[KEY].chunks[0].sizes = torch.Size([30])


def in_the_same_bytes(found: records.Metadata) -> None:
    other = records.MetadataIndex(KEY.replace("norm", "layers.0.input_layernorm"), [0])
    found.storage_data[other] = found.storage_data[INDEX]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, r"__0_0\.distcp: no such file; name another checkpoint"),
        (truncated, r"__0_0\.distcp: damaged: has 300,000 of \d+,\d+ bytes"),
        (barely_truncated, r"__0_0\.distcp: damaged: has"),
        (overwritten, r"__0_0\.distcp: damaged at model\.model\.layers\.0\.input_layernorm"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata: no such file"),
        (lambda folder: os.truncate(folder / ".metadata", 99), "no complete checkpoint"),
        (
            lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])),
            r"\.metadata holds no metadata",
        ),
        (described(outside), r"in '\.\./__0_0\.distcp', which is no file of the folder"),
        (described(larger), rf"has a part of {KEY} that is not within it"),
        (described(of_other_size), rf"damaged at {KEY}, not of the size \(16,\)"),
        (
            described(overlapping),
            rf"\(\.metadata has parts of {KEY} that overlap, in __0_0\.distcp\); name another",
        ),
        (
            described(with_a_hole),
            rf"\(\.metadata has 30 of 32 elements of {KEY}\); name another one",
        ),
        (
            described(in_the_same_bytes),
            rf"has model\.model\.layers\.0.* and {KEY} in the same bytes of __0_0\.distcp",
        ),
        (described(lambda found: found.storage_data.pop(INDEX)), "has 0 of 32 elements of tensor"),
    ],
)
def test_damage_is_reported(copied: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copied)
    with pytest.raises(UserError, match=message) as error:
        plug_in.open_checkpoint(copied)
    assert str(copied) in str(error.value)
    assert "\n" not in str(error.value)


def test_training_does_not_start_from_overlapping_parts(copied: Path) -> None:
    described(overlapping)(copied)
    with pytest.raises(UserError, match=f"has parts of {KEY} that overlap"):
        training_state.read(copied)


# Pickles that want to do something.


class Program:
    """Runs when it is unpickled."""

    def __init__(self, *action: Any) -> None:
        self._action = action

    def __reduce__(self) -> Any:
        return self._action[0], self._action[1:]


def program(path: Path) -> Program:
    """Makes a file, by a function that every Python has."""
    return Program(Path.touch, path)


def refused(folder: Path, message: str) -> None:
    """See that every way to read a checkpoint refuses it."""
    whole = {KEY: torch.zeros(32)}
    for read in (
        lambda: plug_in.open_checkpoint(folder),
        lambda: training_state.read(folder),
        lambda: training_state.check(folder, whole),
        lambda: training_state.fill(folder, whole, alone=True),
        lambda: training_state.load(folder, whole),
    ):
        with pytest.raises(UserError, match=message) as error:
            read()
        assert str(folder) in str(error.value)


def test_code_in_the_metadata_does_not_run(copied: Path, tmp_path: Path) -> None:
    made, known = tmp_path / "made", describe(copied)
    for hostile in (
        program(made),
        Program(os.system, f"touch {made}"),
        Program(eval, f"open({str(made)!r}, 'w')"),
    ):
        for place in ("planner_data", "storage_meta"):
            (copied / ".metadata").write_bytes(pickle.dumps(replace(known, **{place: hostile})))
            refused(copied, r"\.metadata: asks for \S+, which no checkpoint of tokamake does")
            assert not made.exists()
    pickle.loads(pickle.dumps(program(made)))
    assert made.exists()


def test_code_in_place_of_a_tensor_does_not_run(copied: Path, tmp_path: Path) -> None:
    # DCP would unpickle whatever is described as bytes.
    made = tmp_path / "made"
    file = copied / "bytes.distcp"
    torch.save(program(made), file)

    def change(found: records.Metadata) -> None:
        found.state_dict_metadata[KEY] = records.BytesStorageMetadata()
        info = _StorageInfo(file.name, 0, file.stat().st_size)
        found.storage_data[records.MetadataIndex(KEY)] = info

    described(change)(copied)
    refused(copied, "asks for torch.distributed.checkpoint.metadata.BytesStorageMetadata")
    assert not made.exists()


def test_code_among_the_tensors_does_not_run(copied: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    file = copied / "other.distcp"
    torch.save(program(made), file)
    info = _StorageInfo(file.name, 0, file.stat().st_size)
    described(lambda found: found.storage_data.update({INDEX: info}))(copied)
    with pytest.raises(UserError, match=r"other\.distcp: damaged at model\.model\.norm"):
        plug_in.open_checkpoint(copied)
    with pytest.raises(UserError, match="damaged"):
        training_state.read(copied)
    assert not made.exists()


def test_a_pickle_cannot_change_classes(copied: Path) -> None:
    # BUILD on a class sets the class's attributes.
    line = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (copied / ".metadata").write_bytes(line + b"(N}S'version'\nS'spoilt'\nstb.")
    with pytest.raises(UserError, match="holds no metadata"):
        plug_in.open_checkpoint(copied)
    assert records.Metadata.version is None


def test_reading_agrees_with_dcp(saved: Path) -> None:
    found, expected = dcp_reader.DcpReader(saved).read_metadata(), describe(saved)
    for name in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(found, name) == getattr(expected, name)
