"""Band keys against the theory of MinHash, and clusters against a plain search of components."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamake import _csrc
from tokamake.config.near_duplicates import MinHashSettings
from tokamake.data.corpus.minhash import make_minhash


def texts_of_similarity(jaccard: float, *, pairs: int, size: int) -> list[list[str]]:
    """Two lists of texts of `size` words; each pair shares as many as the similarity asks for."""
    random = np.random.default_rng(5)
    common = round(2 * size * jaccard / (1 + jaccard))
    words = [
        [f"w{n}" for n in row] for row in random.integers(1 << 50, size=(pairs, 2 * size - common))
    ]
    firsts = [" ".join(row[:size]) for row in words]
    seconds = [" ".join(row[size - common :]) for row in words]
    return [firsts, seconds]


@pytest.mark.parametrize(
    ("jaccard", "bands", "rows"),
    [
        (0.7, 14, 8),
        pytest.param(0.8, 14, 8, marks=pytest.mark.grid),
        pytest.param(0.9, 14, 8, marks=pytest.mark.grid),
        (0.8, 9, 13),
    ],
)
def test_near_duplicates_are_found_as_often_as_theory_says(
    jaccard: float, bands: int, rows: int
) -> None:
    settings = MinHashSettings(bands=bands, rows=rows, shingle=1)
    minhash = make_minhash(settings)
    size = 60
    common = round(2 * size * jaccard / (1 + jaccard))
    first, second = map(minhash.sign, texts_of_similarity(jaccard, pairs=20_000, size=size))
    found = (first == second).any(axis=1).mean()
    assert found == pytest.approx(settings.probability(common / (2 * size - common)), abs=0.01)


def test_shingles_overlap_and_count_once() -> None:
    minhash = make_minhash(MinHashSettings(bands=400, rows=1, shingle=2))
    keys = minhash.sign(["a b c d", "a b c d a b c", "a b c d e", "b a d c"])
    shares = [(keys[0] == other).mean() for other in keys[1:]]
    # Common shingles of all: 3 of 4 (d a is new), 3 of 4 (d e is new), none.
    assert shares == pytest.approx([0.75, 0.75, 0], abs=0.06)


def test_texts_that_are_shorter_than_a_shingle_have_one() -> None:
    keys = make_minhash(MinHashSettings()).sign(["a b", "A, b!", "a c", "", "…"])
    assert (keys[0] == keys[1]).all()
    assert not (keys[0] == keys[2]).any()
    assert keys[:3].all()
    assert not keys[3:].any()


def test_a_long_text_has_the_keys_of_its_set_of_shingles() -> None:
    """Shingles are hashed in parts of 4,096."""
    words = [f"w{n}" for n in np.random.default_rng(1).permutation(9_000)]
    minhash = make_minhash(MinHashSettings(shingle=1))
    whole, turned, doubled = minhash.sign(
        [" ".join(words), " ".join(reversed(words)), " ".join(words + words[:3_000])]
    )
    assert (whole == turned).all()
    assert (whole == doubled).all()


@given(st.integers(1, 40), st.data())
def test_a_cluster_names_its_smallest_document(documents: int, data: st.DataObject) -> None:
    numbers = st.integers(0, documents - 1)
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), max_size=30))
    expected = list(range(documents))
    for _ in pairs:
        for a, b in pairs:
            expected[a] = expected[b] = min(expected[a], expected[b])
    parents = np.arange(documents, dtype=np.uint32)
    for part in (pairs[:7], pairs[7:]):
        first, second = (np.array([pair[i] for pair in part], np.uint32) for i in (0, 1))
        _csrc.join_clusters(parents, first, second)
    _csrc.resolve_clusters(parents)
    assert parents.tolist() == expected


def test_impossible_arguments_are_refused() -> None:
    documents = np.arange(3, dtype=np.uint32)
    with pytest.raises(ValueError, match="out of range"):
        _csrc.join_clusters(documents, documents[:1], documents[:1] + np.uint32(3))
    with pytest.raises(ValueError, match="two documents"):
        _csrc.join_clusters(documents, documents[:1], documents[:2])
    table = np.zeros(128, np.uint32)
    with pytest.raises(ValueError, match="must not be empty"):
        _csrc.MinHash(table, of_characters=False, shingle=0, bands=1, rows=1, seed=1)
