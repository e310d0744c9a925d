"""Damaged tokens are noticed before a run trains on them, once for each state of a file."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import train
from tests.support.runs import make_index, make_run, prepare, train_here
from tokamake.config.resolved_run import read_run
from tokamake.data.indexed.merge import merge
from tokamake.errors import UserError
from tokamake.runtime import timed_rounds
from tokamake.train import data_verification

pytestmark = pytest.mark.usefixtures("lone_rank")


SAMPLES: dict[str, Any] = {
    "sequence_length": 16,
    "split": "80,20,0",
    "seed": 3,
    "train_samples": 80,
    "valid_samples": 16,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def damage(file: Path) -> None:
    """Change some bytes in the middle of a file; its size and time stay."""
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.seek(stat.st_size // 2)
        stream.write(b"\1\0\1\0")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def note_of(config: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(config.with_name(".training.verified").read_text())
    return content


@pytest.mark.fault("damaged data")
@pytest.mark.parametrize(
    ("name", "hashes"),
    [
        ("corpus.bin", "corpus.json"),
        ("corpus.idx", "corpus.json"),
        ("index/train/arrays.bin", "index/index.json"),
        ("index/valid/dataset_sample_index.npy", "index/index.json"),
    ],
)
def test_a_damaged_file_is_refused_before_training(name: str, hashes: str, root: Path) -> None:
    config = make_run(root, "damaged")
    damage(root / name)
    with pytest.raises(UserError, match=rf"{root / name}: damaged: .*{root / hashes}; rest"):
        train_here(config)
    assert not [*config.parent.glob("training/global_step*")]


@pytest.mark.fault("damaged data")
@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_all_ranks_refuse_a_damaged_file_with_one_line(backend: str, root: Path) -> None:
    config = make_run(root, "ranks", backend=backend)
    damage(root / "corpus.bin")
    printed = train(config, ranks=2, code=2)
    assert printed.count("damaged") == 1
    assert "Traceback" not in printed
    assert f"{root / 'corpus.bin'}: damaged" in printed.splitlines()[-1]


@pytest.mark.ranks
def test_ranks_share_the_files(root: Path) -> None:
    config = make_run(root, "shared")
    assert "agree with their hashes" in train(config, ranks=2)
    arrays = [path for path in read_run(config).index.rglob("*") if path.suffix != ".json"]
    files = [root / "corpus.bin", root / "corpus.idx", *(path for path in arrays if path.is_file())]
    assert note_of(config) == {
        str(file): [
            file.stat().st_size,
            file.stat().st_mtime_ns,
            hashlib.sha256(file.read_bytes()).hexdigest(),
        ]
        for file in files
    }


def test_a_file_is_read_again_only_if_it_has_changed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(root, "again", train_steps=4)
    assert train_here(config, until_step=2) == 0
    assert "agree with their hashes" in capsys.readouterr().out
    assert train_here(config, until_step=3) == 0
    assert "agree with their hashes" not in capsys.readouterr().out
    damage(root / "corpus.bin")
    os.utime(root / "corpus.bin")
    with pytest.raises(UserError, match=r"corpus\.bin: damaged"):
        train_here(config)


def test_a_merged_dataset_is_compared_part_by_part(root: Path) -> None:
    (root / "shards").mkdir()
    for name in ("a", "b"):
        for end in ("bin", "idx"):
            shutil.copy(root / f"corpus.{end}", root / f"shards/{name}.{end}")
    for file in root.glob("corpus.*"):
        file.unlink()
    merge([root / "shards"], output=root / "corpus")
    shutil.rmtree(root / "index")
    make_index(root, **SAMPLES)
    config = make_run(root, "merged", train_steps=2)
    assert train_here(config) == 0
    assert note_of(config)[f"{root}/corpus.bin"][2].startswith("parts:")
    damage(root / "corpus.bin")
    config.with_name(".training.verified").unlink()
    shutil.rmtree(config.with_name("training"))
    size = (root / "corpus.bin").stat().st_size
    with pytest.raises(UserError, match=rf"corpus\.bin: damaged: bytes {size // 2:,} to {size:,}"):
        train_here(config)


@pytest.mark.parametrize("setting", ["auto", False])
def test_data_that_are_not_verified(
    setting: bool | str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_run(root, "large", train_steps=2, verify_data=setting)
    monkeypatch.setattr(data_verification, "AUTO_BYTES", 10)
    damage(root / "corpus.bin")
    assert train_here(config) == 0
    is_hinted = "train.verify_data: true compares them" in capsys.readouterr().out
    assert is_hinted == (setting == "auto")
    assert not config.with_name(".training.verified").exists()
    assert read_run(config).train.verify_data == setting


def test_any_size_is_verified_on_request(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(root, "large", verify_data=True)
    monkeypatch.setattr(data_verification, "AUTO_BYTES", 10)
    monkeypatch.setattr(timed_rounds, "_ROUND_SECONDS", 0)
    damage(root / "corpus.bin")
    with pytest.raises(UserError, match=r"corpus\.bin: damaged"):
        train_here(config)


def test_a_dataset_without_a_manifest_is_compared_with_the_index(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "corpus.json").unlink()
    shutil.rmtree(root / "index")
    make_index(root, **SAMPLES)
    config = make_run(root, "foreign", train_steps=2)
    assert train_here(config) == 0
    assert "data: 1 dataset without a manifest (corpus), compared" in capsys.readouterr().out
    shutil.rmtree(config.with_name("training"))
    config.with_name(".training.verified").unlink()
    damage(root / "corpus.bin")
    with pytest.raises(UserError, match=rf"corpus\.bin: damaged: .*{root}/index/index\.json"):
        train_here(config)
