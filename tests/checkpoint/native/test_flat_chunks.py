"""Runs of flattened tensors are split into boxes of the whole tensors."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokamake.checkpoint.native.flat_chunks import boxes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_hold_a_run_of_elements(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    corner = [data.draw(st.integers(0, 3)) for _ in shape]
    part_box = [slice(at, at + length) for at, length in zip(corner, shape, strict=True)]
    run = torch.arange(start, stop)
    chunks = boxes(run, start, part_box)
    assert len(chunks) <= 2 * len(shape)
    whole = torch.full([at.stop for at in part_box], -1)
    for offset, box in chunks.items():
        indices = tuple(slice(at, at + n) for at, n in zip(offset, box.shape, strict=True))
        assert (whole[indices] == -1).all()
        whole[indices] = box
    part = whole[tuple(part_box)].flatten()
    assert torch.equal(part[start:stop], run)
    assert (part[:start] == -1).all()
    assert (part[stop:] == -1).all()
    assert (whole >= 0).sum() == stop - start
    # They are views: loading a checkpoint into them fills the optimizer's tensors.
    for box in chunks.values():
        box.fill_(7)
    assert (run == 7).all()
