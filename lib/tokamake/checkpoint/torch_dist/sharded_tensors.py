"""Megatron-LM's sharded tensors: whole tensors with megatron.core's names, all layers in one.

A tensor of layers has the layers as its first dimension. Query, key and value are fused, and gate
and up projection, as on a single tensor-parallel rank. Whatever the parallel layout of a run, its
checkpoint holds these tensors, cut anywhere.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tokamake import plugins
from tokamake.checkpoint.megatron_model import module_tree
from tokamake.checkpoint.megatron_model.optimizer_states import parameter_name
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    TensorSlice,
)
from tokamake.checkpoint.tensors.extents import Chunk, Extent, Slices
from tokamake.checkpoint.tensors.flat_ranges import slices_of_range
from tokamake.checkpoint.torch_files.dcp_metadata import WholeTensor
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

_LAYER = re.compile(r"((?:de|en)coder\.layers)\.(?:\d+\.)?(.+)")
"""Name of a tensor of layers; with a number, it holds a single layer."""
_CORE_NAMES = (
    (r"^language_model\.(embedding|output_layer)\.", r"\1."),
    (r"^language_model\.pooler\.", "pooler."),
    (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
    (r"^lm_head\.bias$", "output_layer.bias"),
    (r"\binput_layernorm\.", "self_attention.linear_qkv.layer_norm_"),
    (r"\bpost_attention_layernorm\.", "mlp.linear_fc1.layer_norm_"),
    (r"\bself_attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"\bself_attention\.dense\.", "self_attention.linear_proj."),
    (r"\bmlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"\bmlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
)
"""Patterns of classic names, and megatron.core's names in checkpoints."""
_DECODER = r"^language_model\.(decoder\.layers\.\d+\.)"
_CORE_DECODER_NAMES = (
    (_DECODER + r"post_attention_layernorm\.", r"\1pre_cross_attn_layernorm."),
    (_DECODER + r"inter_attention\.query\.", r"\1cross_attention.linear_q."),
    (_DECODER + r"inter_attention\.key_value\.", r"\1cross_attention.linear_kv."),
    (_DECODER + r"inter_attention\.dense\.", r"\1cross_attention.linear_proj."),
    (_DECODER + r"post_inter_attention_layernorm\.", r"\1mlp.linear_fc1.layer_norm_"),
    (r"^language_model\.decoder\.", "decoder."),
)
"""Those of a decoder beside an encoder; they come first."""


class ShardedTensor(NamedTuple):
    """A sharded tensor of a model."""

    key: str
    layers: tuple[TensorSlice, ...]
    """Tensors of the layers; a single one if the sharded tensor is not of layers."""
    is_stacked: bool
    """Whether its first dimension is that of the layers."""

    @property
    def shape(self) -> tuple[int, ...]:
        layer_shape = self.layers[0].shape
        return (len(self.layers), *layer_shape) if self.is_stacked else layer_shape


def sharded_tensors(architecture: Architecture, *, padded_vocab_size: int) -> list[ShardedTensor]:
    """Return the sharded tensors of a model, in the order in which Megatron makes them."""
    rank = TensorParallelRank(architecture, Axis(0, 1), padded_vocab_size)
    tree = module_tree.stage_tree(rank, range(architecture.num_hidden_layers))
    slices: dict[tuple[str, bool], list[TensorSlice]] = {}
    for name, tensor in module_tree.named_slices(tree):
        key = _core_name(name, stack_of(architecture))
        match = _LAYER.fullmatch(key)
        stacked = (f"{match[1]}.{match[2]}", True) if match else (key, False)
        slices.setdefault(stacked, []).append(tensor)
    return [ShardedTensor(key, (*layers,), stacked) for (key, stacked), layers in slices.items()]


def stack_of(architecture: Architecture) -> str:
    """Return megatron.core's name of the stack of layers."""
    family = plugins.load("models/*/megatron", architecture.family)
    name: str = getattr(family, "STACK", "decoder")
    return name


def second_keys(architecture: Architecture) -> Mapping[str, str]:
    """Return the further keys of tensors that megatron.core has under two keys, with the first."""
    family = plugins.load("models/*/megatron", architecture.family)
    first_keys: Mapping[str, str] = getattr(family, "SECOND_KEYS", {})
    return first_keys


def _core_name(name: str, stack: str) -> str:
    name = re.sub(r"^language_model\.encoder\.", f"{stack}.", name)
    for pattern, replacement in (*_CORE_DECODER_NAMES, *_CORE_NAMES):
        name = re.sub(pattern, replacement, name)
    return name


def match_tensors(
    folder: Path, stored: Mapping[str, WholeTensor], *, model: Iterable[ShardedTensor]
) -> dict[str, ShardedTensor]:
    """Return a model's sharded tensors by a checkpoint's keys, which can be of single layers."""
    expected = {tensor.key: tensor for tensor in model}
    # Megatron has no layer axis if its layers differ.
    single = {
        key: ShardedTensor(key, (layer,), is_stacked=False)
        for tensor in expected.values()
        if tensor.is_stacked
        for number, layer in enumerate(tensor.layers)
        for key in [re.sub(r"\.layers\.", f".layers.{number}.", tensor.key, count=1)]
    }
    if stored.keys() & single.keys():
        expected = {key: each for key, each in expected.items() if not each.is_stacked} | single
    names = {_fused_name(key): key for key in stored}
    for problem, keys in (
        ("is missing", [key for key in expected if key not in names]),
        ("is not part of the model", [key for name, key in names.items() if name not in expected]),
    ):
        if keys:
            more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            raise UserError(
                f"{folder}: tensor {keys[0]}{more} {problem}; {REMEDY}, or fix its architecture"
            )
    for name, key in names.items():
        if (size := stored[key].size) != (shape := expected[name].shape):
            raise UserError(
                f"{folder}: tensor {key} has shape {list(size)}, the architecture calls for "
                f"{list(shape)}; fix the architecture or give another checkpoint"
            )
    return {key: expected[name] for name, key in names.items()}


def _fused_name(key: str) -> str:
    """Return the name of a norm as Transformer Engine has it, which fuses it with a projection."""
    key = key.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def to_whole_tensors(extent: Extent, tensor: ShardedTensor, *, prefix: str) -> Extent:
    """Return an extent of a sharded tensor with chunks of tokamake's whole tensors."""
    chunks = (
        each for chunk in extent.chunks for each in _whole_chunks(chunk, tensor, prefix=prefix)
    )
    return replace(extent, chunks=(*chunks,))


def is_flattened(size: Sequence[int], tensor: ShardedTensor) -> bool:
    """Whether a stored tensor holds flattened shards of a sharded tensor.

    Until version 0.14, megatron.core stores optimizer states so. The size is the number of shards
    along each dimension, then the number of elements of a shard.
    """
    counts, shape = size[:-1], tensor.shape
    return (
        len(counts) == len(shape)
        and math.prod(size) == math.prod(shape)
        and all(count and not rows % count for rows, count in zip(shape, counts, strict=True))
    )


def unflattened(extent: Extent, size: Sequence[int], *, tensor: ShardedTensor) -> Extent:
    """Return an extent of one flattened shard with chunks of the sharded tensor."""
    (chunk,) = extent.chunks
    *place, elements = chunk.slices
    if any(at.stop - at.start != 1 for at in place):
        raise ValueError("a chunk of several shards")
    shard = [rows // count for rows, count in zip(tensor.shape, size[:-1], strict=True)]
    origin = [at.start * rows for at, rows in zip(place, shard, strict=True)]
    chunks, start = [], chunk.start
    for slices in slices_of_range(shard, elements.start, stop=elements.stop):
        pairs = zip(origin, slices, strict=True)
        within = tuple(slice(first + at.start, first + at.stop) for first, at in pairs)
        part = Chunk(chunk.key, within, start)
        chunks.append(part)
        start += math.prod(part.size)
    return replace(extent, chunks=(*chunks,))


def _whole_chunks(chunk: Chunk, tensor: ShardedTensor, *, prefix: str) -> Iterator[Chunk]:
    if not tensor.is_stacked:
        yield from _rows(chunk, tensor.layers[0], prefix=prefix)
        return
    (layers, *slices), (step, *steps) = chunk.slices, chunk.steps
    for layer in range(layers.start, layers.stop):
        start = chunk.start + (layer - layers.start) * step
        of_layer = chunk._replace(slices=(*slices,), start=start, stride=(*steps,))
        yield from _rows(of_layer, tensor.layers[layer], prefix=prefix)


def _rows(chunk: Chunk, tensor: TensorSlice, *, prefix: str) -> Iterator[Chunk]:
    """Yield the rows of whole tensors that a chunk of one of Megatron's tensors holds."""
    rows, *columns = chunk.slices
    width = math.prod(tensor.shape[1:])
    for part in tensor.chunks:
        if part.is_mean:  # padding of the vocabulary
            continue
        # On a single rank, each part consists of whole rows.
        first, own = part.start // width, part.slices[0]
        low, high = max(rows.start, first), min(rows.stop, first + own.stop - own.start)
        if low < high:
            slices: Slices = (slice(own.start + low - first, own.start + high - first), *columns)
            start = chunk.start + (low - rows.start) * chunk.steps[0]
            yield Chunk(prefix + parameter_name(part.key), slices, start, chunk.steps)
