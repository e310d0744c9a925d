"""The split rules equal those of megatron-core and of its forks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from tokamake.data.corpus import splits
from tokamake.errors import UserError


def check(text: str, num_documents: int) -> None:
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    ranges = list(splits.document_ranges(text, num_documents).values())
    for documents, ends in zip(ranges, matrix, strict=True):
        if ends is None:
            assert not documents
        else:
            assert documents == range(*(round(end * float(num_documents)) for end in ends))
    assert ranges[0].start == 0
    assert ranges[-1].stop == num_documents
    assert all(first.stop == second.start for first, second in pairwise(ranges))


@pytest.mark.parametrize(
    "text",
    ["949,50,1", "969, 30, 1", "1,0,0", "0,1,0", "98,2,0", "98,2", "0.1,0.2,0.7", "0,0.5,.5"],
)
def test_ranges_equal_those_of_megatron(text: str) -> None:
    for num_documents in range(600):
        check(text, num_documents)


@given(st.tuples(*[st.decimals(0, 1000, places=3)] * 3).filter(any), st.integers(0, 2**31 - 1))
def test_random_ranges_equal_those_of_megatron(parts: tuple, num_documents: int) -> None:
    check(",".join(format(part, "f") for part in parts), num_documents)


@pytest.mark.parametrize(
    "text", ["", "949", "0,0", "1,2,3,4", "a,b,c", "1,-1,1", "0,0,0", "nan,1,1", "inf,1,1"]
)
def test_a_bad_split_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError, match="split"):
        splits.document_ranges(text, 10)


def test_the_rule_of_forks_differs_as_often_as_in_megatron() -> None:
    # Both counts come from running Megatron-LM of 2021 and megatron-core 0.16.
    rules = ("megatron_core", "megatron_deepspeed")
    pairs = [
        [splits.document_ranges("949,50,1", n, rule=rule) for rule in rules] for n in range(1, 5000)
    ]
    assert sum(new != old for new, old in pairs) == 1235
    assert max(n for n, (_, old) in enumerate(pairs, 1) if not old["test"]) == 500


@pytest.mark.parametrize(
    ("text", "num_documents", "expected"),
    [
        ("1,1,1", 4, [(0, 2), (2, 3), (3, 4)]),  # one too few: all bounds but the first move up
        ("1,1,2", 2, [(0, 1), (1, 1), (1, 2)]),  # 0.5 rounds to 0 (even), so one too few
        ("0,1,1", 3, [(0, 0), (0, 1), (1, 3)]),  # the bound at -1 becomes 0
        ("0,1,1", 1, [(0, 1), (1, 1), (1, 1)]),  # the split with share 0 gets the document
        ("98,1,1", 100, [(0, 98), (98, 99), (99, 100)]),
    ],
)
def test_the_rule_of_forks_shifts_bounds(text: str, num_documents: int, expected: list) -> None:
    ranges = splits.document_ranges(text, num_documents, rule="megatron_deepspeed")
    assert [(part.start, part.stop) for part in ranges.values()] == expected


def test_parts_of_a_dataset_cover_all_documents_once() -> None:
    sets = splits.parse_splits("train=0:0.95 valid=0.95:1 valid.hard")
    assert sets == {"train": (0.0, 0.95), "valid": (0.95, 1.0), "valid.hard": (0.0, 1.0)}
    for num_documents in range(300):
        train, valid, whole = (splits.part_range(part, num_documents) for part in sets.values())
        assert [*train, *valid] == [*whole] == [*range(num_documents)]
    assert splits.parse_splits("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "give a part of the") for text in ("a=1:0", "a=0:1.1", "a=0:0", "a=x:1", "a=")),
        ("a A", "'A': A is repeated"),
        *((text, "a split's name has") for text in ("=0:1", "a/b", "x.json")),
        *((text, "did you mean train") for text in ("trian=0:0.9", "Train", "trainn")),
    ],
)
def test_bad_parts_are_user_errors(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        splits.parse_splits(text)
