"""The split rule against megatron-core's."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from tokamake.data.text import splits
from tokamake.errors import UserError


def check(text: str, num_documents: int) -> None:
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    ours = list(splits.document_ranges(text, num_documents).values())
    for documents, ends in zip(ours, matrix, strict=True):
        if ends is None:
            assert not documents
        else:
            assert documents == range(*(round(end * float(num_documents)) for end in ends))
    assert ours[0].start == 0
    assert ours[-1].stop == num_documents
    assert all(one.stop == two.start for one, two in pairwise(ours))


@pytest.mark.parametrize(
    "text", ["949,50,1", "969, 30, 1", "1,0,0", "0,1,0", "98,2,0", "0.1,0.2,0.7", "0,0.5,.5"]
)
def test_ranges_equal_megatron(text: str) -> None:
    for num_documents in range(600):
        check(text, num_documents)


@given(st.tuples(*[st.decimals(0, 1000, places=3)] * 3).filter(any), st.integers(0, 2**31 - 1))
def test_any_ranges_equal_megatron(parts: tuple, num_documents: int) -> None:
    check(",".join(format(part, "f") for part in parts), num_documents)


@pytest.mark.parametrize(
    "text", ["", "949", "949,50", "1,2,3,4", "a,b,c", "1,-1,1", "0,0,0", "nan,1,1", "inf,1,1"]
)
def test_bad_text_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError, match="split"):
        splits.document_ranges(text, 10)
