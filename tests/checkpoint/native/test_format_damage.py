"""Damaged native checkpoints are refused, and no code in them runs."""

import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.support import native_weights
from tokamake.checkpoint.native import format as plug_in
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.native.folder import check_files, open_native
from tokamake.errors import UserError

pytestmark = pytest.mark.usefixtures("lone_rank")


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
    """Return a function that changes DCP's metadata."""

    def write(folder: Path) -> None:
        metadata = describe(folder)
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return write


def describe(folder: Path) -> records.Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


KEY = "model.model.norm.weight"
STATE = "optimizer.exp_avg.model.norm.weight"
INDEX = records.MetadataIndex(KEY, [0])


def unseal(folder: Path) -> None:
    """Leave the hashes out, as earlier versions did."""
    path = folder / "tokamake.json"
    description = json.loads(path.read_text())
    del description["sha256"], description["files"]
    path.write_text(json.dumps(description))


def stating(text: str = "", **values: Any) -> Callable[[Path], None]:
    """Replace the text of tokamake.json, or some of its values."""

    def damage(folder: Path) -> None:
        path = folder / "tokamake.json"
        path.write_text(text or json.dumps({**json.loads(path.read_text()), **values}))

    return damage


def outside(metadata: records.Metadata) -> None:
    metadata.storage_data[INDEX].relative_path = "../__0_0.distcp"


def larger(metadata: records.Metadata) -> None:
    metadata.state_dict_metadata[KEY].chunks[0].sizes = torch.Size([33])


def of_other_size(metadata: records.Metadata) -> None:
    metadata.state_dict_metadata[KEY].size = torch.Size([16])
    metadata.state_dict_metadata[KEY].chunks[0].sizes = torch.Size([16])


def overlapping(metadata: records.Metadata) -> None:
    """Two chunks with 32 elements together that leave the last 12 elements out."""
    metadata.state_dict_metadata[KEY].chunks = [
        records.ChunkStorageMetadata(torch.Size([at]), torch.Size([size]))
        for at, size in ((0, 20), (8, 12))
    ]
    last = max(info.offset + info.length for info in metadata.storage_data.values())
    location = _StorageInfo("__0_0.distcp", last, 1000)
    metadata.storage_data[records.MetadataIndex(KEY, torch.Size([8]), 1)] = location


def with_a_hole(metadata: records.Metadata) -> None:
    metadata.state_dict_metadata[KEY].chunks[0].sizes = torch.Size([30])


def in_the_same_bytes(metadata: records.Metadata) -> None:
    other = records.MetadataIndex(KEY.replace("norm", "layers.0.input_layernorm"), [0])
    metadata.storage_data[other] = metadata.storage_data[INDEX]


def rekeyed(old: str, new: str) -> Callable[[Path], None]:
    """Change a key everywhere in `.metadata`."""

    def change(metadata: records.Metadata) -> None:
        saved = metadata.state_dict_metadata
        saved[new] = saved.pop(old)
        data: Any = metadata.storage_data
        metadata.storage_data = {
            replace(index, fqn=new) if index.fqn == old else index: info
            for index, info in data.items()
        }

    return described(change)


DATA = "__0_0.distcp"


def swapped_digit(folder: Path) -> None:
    path = folder / "tokamake.json"
    text = path.read_text()
    assert '"iteration": 2' in text
    path.write_text(text.replace('"iteration": 2', '"iteration": 3'))


def renamed(metadata: records.Metadata) -> None:
    key = KEY.replace("norm", "layers.0.input_layernorm")
    saved = metadata.state_dict_metadata
    saved[KEY], saved[key] = saved[key], saved[KEY]
    data = metadata.storage_data
    other = records.MetadataIndex(key, [0])
    data[INDEX], data[other] = data[other], data[INDEX]


def swapped(folder: Path) -> None:
    """Swap the archives of two tensors of the same shape; their checksums stay right."""
    keys = (f"optimizer.exp_avg.{KEY.removeprefix('model.')}", KEY)
    places = {index.fqn: info for index, info in describe(folder).storage_data.items()}
    content = bytearray((folder / DATA).read_bytes())
    first, second = (slice(places[k].offset, places[k].offset + places[k].length) for k in keys)
    content[first], content[second] = content[second], content[first]
    (folder / DATA).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, r"__0_0\.distcp: no such file; name another checkpoint"),
        (truncated, r"__0_0\.distcp: damaged: has 300,000 of \d+,\d+ bytes"),
        (barely_truncated, r"__0_0\.distcp: damaged: has"),
        (overwritten, r"__0_0\.distcp: damaged at model\.model\.layers\.0\.input_layernorm"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata: no such file"),
        (stating("[]"), r"tokamake\.json: damaged: not a JSON object; name another"),
        (stating("null"), r"tokamake\.json: damaged: not a JSON object"),
        (stating(iteration="x"), r"tokamake\.json: iteration 'x': damaged: not a whole number"),
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
        (
            described(lambda metadata: metadata.storage_data.pop(INDEX)),
            "has 0 of 32 elements of tensor",
        ),
        (rekeyed("rank.0", "rank.1"), r"\.metadata: damaged: has no rank\.0; name another"),
        (rekeyed("rank.0", "rank.x"), r"damaged: has 'rank\.x', which is no tensor of a run"),
        (rekeyed(KEY, f"M{KEY[1:]}"), "damaged: has '"),
        (rekeyed(STATE, STATE.replace("avg", "avf")), r"damaged: has 'optimizer\.exp_avf\."),
        (rekeyed(STATE, STATE.replace("norm", "nor")), r"damaged: has 'optimizer\.exp_avg\."),
        (stating(world_size=2), r"\.metadata: damaged: has no rank\.1; name another"),
    ],
)
def test_damage_is_reported(copied: Path, damage: Callable[[Path], None], message: str) -> None:
    unseal(copied)
    damage(copied)
    with pytest.raises(UserError, match=message) as error:
        plug_in.open_checkpoint(copied)
    assert str(copied) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "damage"),
    [("tokamake.json", swapped_digit), (".metadata", described(renamed)), (DATA, swapped)],
)
def test_damage_that_parses_is_reported(
    copied: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damage(copied)
    for read in (plug_in.open_checkpoint, check_files, open_native):
        with pytest.raises(UserError, match=rf"/{re.escape(file)}: damaged: does not match its"):
            read(copied)


def test_training_does_not_start_from_overlapping_parts(copied: Path) -> None:
    described(overlapping)(copied)
    with pytest.raises(UserError, match=f"has parts of {KEY} that overlap"):
        native_weights.read(copied)


# Pickles that run code.


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
    """Check that every way to read a checkpoint refuses it."""
    whole = {KEY: torch.zeros(32)}
    for read in (
        lambda: plug_in.open_checkpoint(folder),
        lambda: native_weights.read(folder),
        lambda: training_state.check(folder, whole),
        lambda: training_state.fill(folder, whole),
        lambda: training_state.load(folder, whole),
    ):
        with pytest.raises(UserError, match=message) as error:
            read()
        assert str(folder) in str(error.value)


def test_code_in_the_metadata_does_not_run(copied: Path, tmp_path: Path) -> None:
    marker, known = tmp_path / "made", describe(copied)
    for hostile in (
        program(marker),
        Program(os.system, f"touch {marker}"),
        Program(eval, f"open({str(marker)!r}, 'w')"),
    ):
        for field in ("planner_data", "storage_meta"):
            (copied / ".metadata").write_bytes(pickle.dumps(replace(known, **{field: hostile})))
            refused(
                copied,
                r"\.metadata: asks for \S+, which no checkpoint of tokamake or Megatron-LM does",
            )
            assert not marker.exists()
    pickle.loads(pickle.dumps(program(marker)))
    assert marker.exists()


def test_code_in_place_of_a_tensor_does_not_run(copied: Path, tmp_path: Path) -> None:
    # DCP would unpickle whatever is described as bytes.
    marker = tmp_path / "made"
    file = copied / "bytes.distcp"
    torch.save(program(marker), file)

    def change(metadata: records.Metadata) -> None:
        metadata.state_dict_metadata[KEY] = records.BytesStorageMetadata()
        info = _StorageInfo(file.name, 0, file.stat().st_size)
        metadata.storage_data[records.MetadataIndex(KEY)] = info

    described(change)(copied)
    refused(copied, rf"\.metadata has '{KEY}', which is no tensor")
    assert not marker.exists()


def test_code_among_the_tensors_does_not_run(copied: Path, tmp_path: Path) -> None:
    marker = tmp_path / "made"
    file = copied / "other.distcp"
    torch.save(program(marker), file)
    info = _StorageInfo(file.name, 0, file.stat().st_size)
    unseal(copied)
    described(lambda metadata: metadata.storage_data.update({INDEX: info}))(copied)
    with pytest.raises(UserError, match=r"other\.distcp: damaged at model\.model\.norm"):
        plug_in.open_checkpoint(copied)
    with pytest.raises(UserError, match="damaged"):
        native_weights.read(copied)
    assert not marker.exists()


def test_a_pickle_cannot_change_classes(copied: Path) -> None:
    # BUILD on a class sets the class's attributes.
    line = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (copied / ".metadata").write_bytes(line + b"(N}S'version'\nS'spoilt'\nstb.")
    with pytest.raises(UserError, match="no complete checkpoint"):
        plug_in.open_checkpoint(copied)
    assert records.Metadata.version is None
