"""Samples compared with megatron-core's, and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from tests.support.megatron_datasets import config, random_lengths, write_dataset
from tests.support.runs import make_index
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.errors import UserError

WEIGHTS = {"web": 0.7, "books": 0.3}
STRIDE = 100_000


def prepare(root: Path) -> Path:
    for number, (name, weight) in enumerate(WEIGHTS.items()):
        write_dataset(root / name, random_lengths(number, 90), first_token=STRIDE * number)
        with (root / "weights.txt").open("a") as stream:
            stream.write(f"{weight} {name} {name}\n")
    samples = {"train_samples": 200, "valid_samples": 12}
    make_index(root, sequence_length=24, split="80,20,0", seed=7, **samples)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def open_samples(root: Path, split: str = "train") -> DocumentSamples:
    return DocumentSamples(root / "index", split=split, data_root=root)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> DocumentSamples:
    return open_samples(prepare(tmp_path_factory.mktemp("loader")))


def test_samples_equal_megatron(root: Path) -> None:
    blend = ([str(root / name) for name in WEIGHTS], list(WEIGHTS.values()))
    settings = config(sequence_length=24, seed=7, split="80,20,0", blend=blend)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [200, 12, 0], lambda: True, settings)
    for split, reference in zip(("train", "valid"), builder.build(), strict=False):
        samples = open_samples(root, split)
        assert len(samples) == len(reference)
        for number in range(len(samples)):
            tokens = samples[number]
            assert tokens.dtype == np.int64
            assert tokens[:-1].tolist() == reference[number]["tokens"].tolist()
            assert tokens[1:].tolist() == reference[number]["labels"].tolist()
            assert samples.corpus_of(number) == list(WEIGHTS)[tokens[0] // STRIDE]


@pytest.mark.parametrize("sample", [-1, 10**6])
def test_a_sample_out_of_range_is_an_index_error(train: DocumentSamples, sample: int) -> None:
    with pytest.raises(IndexError):
        train[sample]
    with pytest.raises(IndexError):
        train.corpus_of(sample)


def damage_index_json(root: Path) -> None:
    description = json.loads((root / "index" / "index.json").read_text())
    description["seed"] += 1
    (root / "index" / "index.json").write_text(json.dumps(description))


def truncate_array(root: Path) -> None:
    path = root / "index" / "train" / "arrays.bin"
    path.write_bytes(path.read_bytes()[:-8])


def empty_array(root: Path) -> None:
    (root / "index" / "train" / "arrays.bin").write_bytes(b"")


def negative_numbers(root: Path) -> None:
    """They would count from the end of an array."""
    numbers = np.load(root / "index/train/dataset_sample_index.npy", mmap_mode="r+")
    numbers[0] = -1


def too_large_numbers(root: Path) -> None:
    path = root / "index/train/arrays.bin"
    path.write_bytes(b"\x7f" * path.stat().st_size)


@pytest.mark.parametrize("damage", [negative_numbers, too_large_numbers])
def test_numbers_out_of_bounds_name_the_index(root: Path, damage: Any) -> None:
    """Hashes find them before training; other commands read single samples without."""
    damage(root)
    with pytest.raises(UserError, match=r"index/train: damaged at sample 0 .*; run `tokamake ind"):
        open_samples(root)[0]


def change_tokens(root: Path) -> None:
    write_dataset(root / "books", [*random_lengths(1, 90), 1])


def swap_lengths(root: Path) -> None:
    write_dataset(root / "books", random_lengths(1, 90)[::-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "index" / "index.json").unlink(), "index.json: no such file"),
        (lambda root: (root / "index" / "index.json").write_text("{}"), "not an index"),
        (damage_index_json, "digest"),
        (lambda root: (root / "index/train/dataset_index.npy").unlink(), "dataset_index.npy: no"),
        (lambda root: (root / "index/train/arrays.bin").unlink(), "arrays.bin: no such file"),
        (truncate_array, "arrays.bin: damaged"),
        (empty_array, "arrays.bin: damaged"),
        (change_tokens, "books: changed since"),
        (swap_lengths, "books: changed since"),
    ],
)
def test_a_damaged_or_outdated_index_is_a_user_error(root: Path, damage: Any, message: str) -> None:
    damage(root)
    with pytest.raises(UserError, match=message) as caught:
        open_samples(root)
    assert "tokamake index" in str(caught.value)


def test_a_missing_dataset_or_split_is_a_user_error(root: Path) -> None:
    with pytest.raises(UserError, match="no test split"):
        open_samples(root, "test")
    (root / "web.bin").unlink()
    with pytest.raises(UserError, match=r"web\.bin: no such file"):
        open_samples(root)
