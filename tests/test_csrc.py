"""Sample indexes, blends and shuffles in C++, compared with megatron-core and NumPy."""

import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import helpers

from tests.support.megatron_datasets import assert_identical
from tokamake import _csrc
from tokamake.data.samples.sample_index import shuffle


@st.composite
def shuffled_documents(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any))
    epochs = draw(st.integers(1, 4))
    order = draw(st.permutations(list(range(len(lengths))) * epochs))
    return np.array(lengths, np.int32), np.array(order, np.int32), epochs


@given(shuffled_documents(), st.integers(1, 50))
def test_sample_index_equals_megatron(
    documents: tuple[np.ndarray, np.ndarray, int], sequence_length: int
) -> None:
    lengths, order, epochs = documents
    arguments = (lengths, order, sequence_length, epochs, int(lengths.sum()))
    assert_identical(_csrc.build_sample_index(*arguments), helpers.build_sample_idx(*arguments))
    reference = helpers.build_sample_idx_int64(*arguments, True, 1)
    assert_identical(_csrc.build_sample_index(*arguments, wide=True), reference)


def test_sample_index_reads_unaligned_lengths() -> None:
    lengths = np.random.default_rng(0).integers(0, 90, 500).astype(np.int32)
    unaligned = np.frombuffer(b"x" * 34 + lengths.tobytes(), np.int32, offset=34)
    assert not unaligned.flags.aligned
    order = np.random.default_rng(1).permutation(500).astype(np.int32)
    arguments = (order, 64, 1, int(lengths.sum()))
    assert_identical(
        _csrc.build_sample_index(unaligned, *arguments),
        helpers.build_sample_idx(lengths, *arguments),
    )


LENGTHS = np.array([3, 4, 5], np.int32)
ORDER = np.arange(3, dtype=np.int32)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (IndexError, (LENGTHS, np.array([0, 3], np.int32), 2, 1, 12)),
        (IndexError, (LENGTHS, np.array([-1], np.int32), 2, 1, 12)),
        (ValueError, (-LENGTHS, ORDER, 2, 1, 12)),
        (ValueError, (LENGTHS, ORDER, 2, 2, 12)),  # documents of one epoch only
        (ValueError, (LENGTHS, ORDER[:0], 2, 1, 12)),
        (ValueError, (LENGTHS, ORDER, 0, 1, 12)),
        (ValueError, (LENGTHS, ORDER, 2, 0, 12)),
        (ValueError, (LENGTHS, ORDER, 2, 1, 0)),
        (ValueError, (LENGTHS, ORDER, 2, 2**40, 2**40)),
        (ValueError, (LENGTHS.reshape(3, 1), ORDER, 2, 1, 12)),
        (TypeError, (LENGTHS.astype(np.int64), ORDER, 2, 1, 12)),
        (TypeError, (LENGTHS, np.repeat(ORDER, 2)[::2], 2, 1, 12)),
    ],
)
def test_sample_index_refuses_bad_input(error: type[Exception], arguments: tuple) -> None:
    with pytest.raises(error):
        _csrc.build_sample_index(*arguments)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(0, 3000))
def test_blend_equals_megatron(weights: list[float], size: int) -> None:
    assert_blend(np.array(weights) / np.sum(weights), size, widest=True)


Random = np.random.Generator
KINDS: dict[str, Callable[[Random, int], np.ndarray]] = {
    "even": lambda random, size: random.random(size) + 1e-3,
    "equal": lambda _, size: np.ones(size),
    "nearly equal": lambda random, size: 1 + 0.01 * random.random(size),
    "equal to the last bits": lambda random, size: 1 + 1e-15 * random.integers(0, 9, size),
    "of few values": lambda random, size: random.integers(1, 5, size).astype(np.float64),
    "of groups": lambda random, size: random.integers(1, 5, size) + 0.01 * random.random(size),
    "of all magnitudes": lambda random, size: np.exp(60 * random.random(size)),
    "one heavy": lambda random, size: np.append(random.random(size - 1), 9.0 * size),
    "few count": lambda random, size: (
        np.where(random.random(size) < 0.05, 1, 1e-12) * random.random(size)
    ),
    "some zero": lambda random, size: random.integers(0, 3, size) * random.random(size) + 1e-300,
}


def many_weights(kind: str, size: int) -> np.ndarray:
    weights = KINDS[kind](np.random.default_rng(size), size)
    return weights / weights.sum()


WIDTHS = pytest.mark.parametrize("widest", [True, False], ids=["widest", "128 bits"])


def assert_blend(weights: np.ndarray, samples: int, widest: bool) -> None:
    datasets, numbers = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
    helpers.build_blending_indices(datasets, numbers, weights, len(weights), samples, False)
    blend = _csrc.Blender(weights, widest=widest).draw(samples)
    assert_identical(blend[0], datasets)
    assert_identical(blend[1], numbers)


@WIDTHS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "samples"), [(9, 4000), (40, 10_000), (65, 30_000), (700, 20_000), (5000, 6000)]
)
def test_blend_of_many_equals_megatron(kind: str, size: int, samples: int, widest: bool) -> None:
    assert_blend(many_weights(kind, size), samples, widest)


@WIDTHS
@given(st.lists(st.integers(1, 9), min_size=1, max_size=130), st.integers(0, 1000))
def test_blend_of_tied_weights_equals_megatron(
    widest: bool, weights: list[int], samples: int
) -> None:
    shares = np.array(weights, np.float64)
    assert_blend(shares / shares.sum(), samples, widest)


@pytest.mark.parametrize("size", range(1, 70))
def test_blend_of_any_number_of_datasets_equals_megatron(size: int) -> None:
    for widest in (True, False):
        assert_blend(many_weights("even", size), 2000, widest)


@pytest.mark.parametrize("scale", [1e-9, 3.0, 1e300])
def test_blend_of_unnormalized_weights_equals_megatron(scale: float) -> None:
    weights = many_weights("of few values", 300) * scale
    assert_blend(weights, 5000, widest=True)


def test_blocks_equal_the_whole_blend() -> None:
    weights = many_weights("even", 700)
    whole = _csrc.Blender(weights).draw(1000)
    blender = _csrc.Blender(weights)
    blocks = [blender.draw(size) for size in (0, 1, 7, 92, 900)]
    for column in (0, 1):
        assert_identical(np.concatenate([block[column] for block in blocks]), whole[column])


def assert_exhaustive(sizes: np.ndarray) -> None:
    total = int(sizes.sum())
    datasets, numbers = np.zeros(total, np.int16), np.zeros(total, np.int64)
    helpers.build_exhaustive_blending_indices(datasets, numbers, sizes, len(sizes))
    for widest in (True, False):
        blend = _csrc.Blender.exhaustive(sizes, widest=widest).draw(total)
        assert_identical(blend[0], datasets)
        assert_identical(blend[1], numbers)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60))
def test_exhaustive_blend_equals_megatron(sizes: list[int]) -> None:
    assert_exhaustive(np.array(sizes, np.int64))


@pytest.mark.parametrize("most", [3, 40, 100_000])
def test_exhaustive_blend_of_many_equals_megatron(most: int) -> None:
    random = np.random.default_rng(most)
    sizes = np.minimum(random.integers(1, most, 900), random.integers(1, 40, 900))
    sizes[17] = most  # one dataset continues when the others have ended
    assert_exhaustive(sizes)


def test_exhaustive_blend_has_an_end() -> None:
    blender = _csrc.Blender.exhaustive(np.array([2, 1], np.int64))
    blender.draw(2)
    with pytest.raises(ValueError, match="left"):
        blender.draw(2)
    assert blender.draw(1)[0].tolist() == [0]


@pytest.mark.parametrize(
    "sizes", [np.zeros(0, np.int64), np.array([1, 0]), np.array([2**53, 1]), np.ones(2**15, int)]
)
def test_exhaustive_blend_refuses_bad_sizes(sizes: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"sizes|datasets"):
        _csrc.Blender.exhaustive(sizes)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 1500),
    st.integers(0, 3000),
    st.sampled_from([np.int32, np.uint32, np.int64]),
)
def test_shuffle_equals_numpy(seed: int, before: int, size: int, dtype: type[np.integer]) -> None:
    reference, random = np.random.RandomState(seed), np.random.RandomState(seed)
    reference.bytes(4 * before)
    random.bytes(4 * before)
    expected, values = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
    reference.shuffle(expected)
    _, key, position, *_ = random.get_state()
    position = _csrc.shuffle(values, key, position)
    assert_identical(values, expected)
    assert position == reference.get_state()[2]
    assert_identical(key, reference.get_state()[1])


def test_shuffle_of_a_large_array_equals_numpy() -> None:
    expected, values = np.arange(5_000_000), np.arange(5_000_000)
    random = np.random.RandomState(3)
    _, key, position, *_ = random.get_state()
    _csrc.shuffle(values, key.copy(), position)
    random.shuffle(expected)
    assert_identical(values, expected)


def test_shuffle_leaves_the_generator_in_the_state_of_numpy() -> None:
    random, reference = np.random.RandomState(4), np.random.RandomState(4)
    values, expected = np.arange(1000), np.arange(1000)
    for _ in range(3):
        assert random.randn() == reference.randn()  # keeps a second number for the next call
        shuffle(values, random)
        reference.shuffle(expected)
    assert_identical(values, expected)
    assert random.randn() == reference.randn()
    assert random.randint(1 << 30) == reference.randint(1 << 30)


KEY = np.zeros(624, np.uint32)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, (np.zeros((2, 2), np.int64), KEY, 0)),
        (ValueError, (np.zeros(2, np.int64), KEY[1:], 0)),
        (ValueError, (np.zeros(2, np.int64), KEY, 625)),
        (ValueError, (np.zeros(2, np.int64), KEY, -1)),
        (TypeError, (np.zeros(2, np.float64), KEY, 0)),
        (TypeError, (np.zeros(4, np.int64)[::2], KEY, 0)),
        (TypeError, (np.zeros(2, np.int64), KEY.astype(np.int64), 0)),
        (ValueError, (np.frombuffer(bytes(16), np.int64), KEY, 0)),  # read-only
    ],
)
def test_shuffle_refuses_bad_input(error: type[Exception], arguments: tuple) -> None:
    with pytest.raises(error):
        _csrc.shuffle(*arguments)


def test_the_lowest_number_wins_a_tie() -> None:
    datasets, _ = _csrc.Blender(np.full(3, 1 / 3)).draw(6)
    assert datasets.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("error", "weights", "size"),
    [
        (ValueError, np.zeros(0), 1),
        (ValueError, np.ones(2**15), 1),
        (ValueError, np.array([0.5, -0.5]), 1),
        (ValueError, np.array([np.nan]), 1),
        (ValueError, np.array([np.inf]), 1),
        (ValueError, np.ones((1, 1)), 1),
        (ValueError, np.ones(1), -1),
        (TypeError, np.ones(1, np.float32), 1),
    ],
)
def test_blend_refuses_bad_input(error: type[Exception], weights: np.ndarray, size: int) -> None:
    with pytest.raises(error):
        _csrc.Blender(weights).draw(size)


def test_a_mapped_file_keeps_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "bytes é"
    path.write_bytes(bytes(range(256)) * 64)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limit[0]), limit[1]))
    try:
        mapped_files = [_csrc.map_file(path) for _ in range(600)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert all(mapped.tobytes() == path.read_bytes() for mapped in mapped_files)
    assert not mapped_files[0].flags.writeable
    path.unlink()  # a mapping outlives the file name
    view = mapped_files[0][256:260].view(np.uint16)
    del mapped_files
    assert view.tolist() == [0x0100, 0x0302]


def test_empty_missing_and_unmappable_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert _csrc.map_file(tmp_path / "empty").shape == (0,)
    with pytest.raises(FileNotFoundError) as caught:
        _csrc.map_file(tmp_path / "none")
    assert caught.value.filename == tmp_path / "none"
    with pytest.raises(IsADirectoryError):
        _csrc.map_file(tmp_path)
