"""Places of parameters in the flat buffers of Megatron's distributed optimizer."""

import pytest
import torch

from tokamake.checkpoint.megatron_model.optimizer_buffers import (
    BufferedParameter,
    fill_buckets,
    range_chunks,
)
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import TensorSlice
from tokamake.checkpoint.tensors.extents import Chunk, whole_slices


def tensor(name: str, *shape: int, is_replica: bool = False) -> TensorSlice:
    return TensorSlice(shape, (Chunk(f"model.{name}", whole_slices(shape)),), is_replica)


TENSORS = [tensor("a", 4, 16), tensor("b", 70), tensor("c", 5, 3), tensor("d", 64)]


def starts(bucket: list[BufferedParameter]) -> list[tuple[str, int]]:
    return [(each.tensor.chunks[0].key.removeprefix("model."), each.start) for each in bucket]


def test_the_last_parameter_comes_first_and_each_begins_at_a_multiple_of_64() -> None:
    (bucket,) = fill_buckets(TENSORS, [320])
    assert starts(bucket) == [("d", 0), ("c", 64), ("b", 128), ("a", 256)]


def test_each_bucket_begins_with_a_parameter() -> None:
    first, second = fill_buckets(TENSORS, [79, 192])
    assert starts(first) == [("d", 0), ("c", 64)]
    assert starts(second) == [("b", 0), ("a", 128)]


@pytest.mark.parametrize("sizes", [[319], [321], [79, 191], [80, 192], [320, 1], [79]])
def test_buckets_of_other_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"a bucket of|parameters in no bucket"):
        fill_buckets(TENSORS, sizes)


def test_buckets_that_end_elsewhere_than_at_multiples_of_64_are_refused() -> None:
    sizes = [[320], [79, 192]], [[64, 256], [320]]
    for first, second in sizes:
        layouts = [fill_buckets(TENSORS, each) for each in (first, second)]
        assert [sum(len(bucket) for bucket in layout) for layout in layouts] == [4, 4]
    with pytest.raises(ValueError, match="a bucket of 271 elements"):
        fill_buckets(TENSORS, [79 + 192])


def test_ranges_give_each_element_once_without_gaps_and_replicas() -> None:
    tensors = [*TENSORS, tensor("replica", 64, is_replica=True)]
    (bucket,) = fill_buckets(tensors, [384])
    flat, read = torch.arange(384), {}
    for first, last in ((0, 100), (100, 131), (131, 384)):
        for chunk in range_chunks(bucket, first, stop=last, prefix="optimizer.exp_avg."):
            shape = next(t.shape for t in TENSORS if chunk.key.endswith(t.chunks[0].key[6:]))
            target = read.setdefault(chunk.key[-1], torch.full(shape, -1))
            assert (target[chunk.slices] == -1).all()
            target[chunk.slices] = chunk.view(flat[first:last].clone())
    assert {*read} == {*"abcd"}
    for name, first, shape in (
        ("d", 64, 64),
        ("c", 128, (5, 3)),
        ("b", 192, 70),
        ("a", 320, (4, 16)),
    ):
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        assert torch.equal(read[name], torch.arange(first, first + size.numel()).view(size))
