"""Samples compared with megatron-core's, batches for any number of ranks, and errors."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from tests.support.megatron_datasets import config, random_lengths, write_dataset
from tests.support.runs import make_index
from tokamake.config.batching import BatchSizes, Rampup
from tokamake.data.samples import loader
from tokamake.data.samples.loader import Samples
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


def open_samples(root: Path, split: str = "train") -> Samples:
    return Samples(root / "index", split=split, data_root=root)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Samples:
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
def test_a_sample_out_of_range_is_an_index_error(train: Samples, sample: int) -> None:
    with pytest.raises(IndexError):
        train[sample]
    with pytest.raises(IndexError):
        train.corpus_of(sample)


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_resume_and_end(train: Samples, rank: int) -> None:
    settings = {
        "micro_batch_size": 3,
        "data_parallel_rank": rank,
        "data_parallel_size": 2,
    }
    batches = list(loader.batches(train, consumed_samples=0, **settings))
    assert len(batches) == len(train) // 6
    resumed = list(loader.batches(train, consumed_samples=30, **settings))
    np.testing.assert_array_equal(batches[5:], resumed)
    assert not list(loader.batches(train, consumed_samples=len(train), **settings))


class NumberedSamples:
    """Each sample is its own number."""

    def __len__(self) -> int:
        return 7_000

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.array([sample])


@given(
    layouts=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=6
    ),
    ramps_up=st.booleans(),
)
def test_each_sample_comes_once_in_order_for_any_layouts(
    layouts: list[tuple[int, int, int]], ramps_up: bool
) -> None:
    """After some steps of each layout, a run continues with other ranks (at most 64) and rows."""
    sizes = BatchSizes(512, Rampup(256, 256, 2_000) if ramps_up else None)
    seen: list[int] = []
    for exponent, rows, number in layouts:
        ranks, micro_batch_size = 2**exponent, 2**rows
        of_ranks = [
            loader.steps(
                NumberedSamples(),
                sizes,
                consumed_samples=len(seen),
                micro_batch_size=micro_batch_size,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
            )
            for rank in range(ranks)
        ]
        for together in islice(zip(*of_ranks, strict=True), number):
            (size,) = {step.global_batch_size for step in together}
            assert {step.consumed_samples for step in together} == {len(seen)}
            for blocks in zip(*(step.micro_batches for step in together), strict=True):
                assert {block.shape for block in blocks} == {(micro_batch_size, 1)}
                seen += np.concatenate(blocks)[:, 0].tolist()
            assert len(seen) == together[0].consumed_samples + size
            assert size == (256 if ramps_up and len(seen) - size < 2_000 else 512)
    assert seen == list(range(len(seen)))


def test_steps_whose_data_are_left_out_count_and_read_nothing(train: Samples) -> None:
    class Counting:
        """Samples that note which are read."""

        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return len(train)

        def __getitem__(self, sample: int) -> Any:
            self.read.append(sample)
            return train[sample]

    sizes = BatchSizes(8, Rampup(4, 4, 12))  # steps begin at samples 0, 4, 8, 12, 20, 28
    options: Any = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1}
    ranges = [(2, 3), (5, 5)]
    samples = Counting()
    every = [*islice(loader.steps(train, sizes, consumed_samples=0, **options), 6)]
    some = [
        *islice(loader.steps(samples, sizes, consumed_samples=0, **options, left_out=ranges), 6)
    ]
    assert [(step[0], step[1]) for step in some] == [(step[0], step[1]) for step in every]
    for number, (step, expected) in enumerate(zip(some, every, strict=True), 1):
        if number in (2, 3, 5):
            assert step.micro_batches == []
        else:
            np.testing.assert_array_equal(step.micro_batches, expected.micro_batches)
    assert samples.read == [*range(4), *range(12, 20), *range(28, 36)]
    # A run that resumes leaves out the same ones.
    resumed = loader.steps(train, sizes, consumed_samples=8, **options, left_out=ranges)
    assert [bool(step.micro_batches) for step in islice(resumed, 4)] == [False, True, False, True]


def test_steps_end_and_refuse_uneven_batches(train: Samples) -> None:
    settings = {"micro_batch_size": 3, "data_parallel_rank": 1, "data_parallel_size": 2}
    steps = list(loader.steps(train, BatchSizes(12), consumed_samples=0, **settings))
    assert len(steps) == len(train) // 12
    assert [step.consumed_samples for step in steps] == list(range(0, 12 * len(steps), 12))
    np.testing.assert_array_equal(steps[1].micro_batches[0], [train[n] for n in (15, 16, 17)])
    with pytest.raises(UserError, match="multiple of 6"):
        next(loader.steps(train, BatchSizes(10), consumed_samples=0, **settings))


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
