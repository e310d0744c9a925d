"""Sharded tensors that megatron.core until version 0.14 stores in flattened shards."""

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent
from tokamake.checkpoint.torch_dist.sharded_tensors import (
    is_flattened,
    sharded_tensors,
    to_whole_tensors,
    unflattened,
)
from tokamake.config.architecture import Architecture

SHAPE = Architecture(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=8,
)
MODEL = {tensor.key: tensor for tensor in sharded_tensors(SHAPE, padded_vocab_size=12)}
FC1 = MODEL["decoder.layers.mlp.linear_fc1.weight"]


def test_tensors_of_layers_are_stacked() -> None:
    shapes = {key: tensor.shape for key, tensor in MODEL.items()}
    assert shapes == {
        "embedding.word_embeddings.weight": (12, 8),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (3, 8),
        "decoder.layers.self_attention.linear_qkv.weight": (3, 16, 8),
        "decoder.layers.self_attention.linear_proj.weight": (3, 8, 8),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (3, 8),
        "decoder.layers.mlp.linear_fc1.weight": (3, 24, 8),
        "decoder.layers.mlp.linear_fc2.weight": (3, 8, 12),
        "decoder.final_layernorm.weight": (8,),
        "output_layer.weight": (12, 8),
    }


@pytest.mark.parametrize("counts", [(3, 2, 1), (3, 4, 1), (3, 2, 2), (3, 1, 8)])
@pytest.mark.parametrize("cuts", [(), (1,), (5, 9), (13,)])
def test_flattened_shards_give_the_whole_tensors(
    counts: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    """Shards of a grid, each flattened and cut where data-parallel ranks begin."""
    whole = torch.arange(3 * 24 * 8).view(FC1.shape)
    shard = [rows // count for rows, count in zip(FC1.shape, counts, strict=True)]
    size = (*counts, shard[0] * shard[1] * shard[2])
    assert is_flattened(size, FC1)
    read: dict[str, torch.Tensor] = {}
    for place in product(*map(range, counts)):
        slices = [slice(at * n, (at + 1) * n) for at, n in zip(place, shard, strict=True)]
        flat = whole[tuple(slices)].flatten()
        ends = [0, *(cut for cut in cuts if cut < len(flat)), len(flat)]
        for start, stop in pairwise(ends):
            # Two elements of another tensor lie before this one in the archive.
            stored = torch.cat([torch.tensor([-1, -1]), flat[start:stop]])
            at = (*(slice(n, n + 1) for n in place), slice(start, stop))
            chunk = Chunk("fc1", at, 2)
            extent = Extent(Path(), "fc1", 0, (len(stored),), FLOAT32, (chunk,))
            of_model = to_whole_tensors(unflattened(extent, size, tensor=FC1), FC1, prefix="model.")
            for each in of_model.chunks:
                target = read.setdefault(each.key, torch.full((12, 8), -1))
                assert (target[each.slices] == -1).all()
                target[each.slices] = each.view(stored)
    for layer in range(3):
        for name, rows in (("gate_proj", whole[layer, :12]), ("up_proj", whole[layer, 12:])):
            assert torch.equal(read[f"model.model.layers.{layer}.mlp.{name}.weight"], rows)


@pytest.mark.parametrize("size", [(3, 24, 8), (3, 5, 1, 115), (2, 1, 1, 288), (3, 0, 1, 0)])
def test_tensors_of_other_sizes_are_not_flattened_shards(size: tuple[int, ...]) -> None:
    assert not is_flattened(size, FC1)
