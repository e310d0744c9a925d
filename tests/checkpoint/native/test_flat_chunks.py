"""Ranges of flattened tensors are split into chunks of the whole tensors."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokamake.checkpoint.native.flat_chunks import chunks_of_range


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_chunks_hold_a_range_of_elements(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    corner = [data.draw(st.integers(0, 3)) for _ in shape]
    slices = [slice(at, at + length) for at, length in zip(corner, shape, strict=True)]
    elements = torch.arange(start - 3, stop)[3:]  # a part of a longer buffer
    chunks = chunks_of_range(elements, start, place=slices)
    assert len(chunks) <= 2 * len(shape)
    whole = torch.full([at.stop for at in slices], -1)
    for offset, chunk in chunks.items():
        indices = tuple(slice(at, at + n) for at, n in zip(offset, chunk.shape, strict=True))
        assert (whole[indices] == -1).all()
        whole[indices] = chunk
    part = whole[tuple(slices)].flatten()
    assert torch.equal(part[start:stop], elements)
    assert (part[:start] == -1).all()
    assert (part[stop:] == -1).all()
    assert (whole >= 0).sum() == stop - start
    # They are views: loading a checkpoint into them fills the optimizer's tensors.
    for chunk in chunks.values():
        chunk.fill_(7)
    assert (elements == 7).all()
