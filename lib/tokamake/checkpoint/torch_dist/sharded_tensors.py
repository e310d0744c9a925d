"""Megatron-LM's sharded tensors: whole tensors with megatron.core's names, all layers in one.

A tensor of layers has the layers as its first dimension. Query, key and value are fused, and gate
and up projection, as on a single tensor-parallel rank. Whatever the parallel layout of a run, its
checkpoint holds these tensors, cut anywhere. Other values are in the common state.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.megatron_model import module_tree
from tokamake.checkpoint.megatron_model.core_names import core_name, layers_differ
from tokamake.checkpoint.megatron_model.optimizer_states import parameter_name
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    TensorSlice,
)
from tokamake.checkpoint.tensors.extents import Chunk, Extent, cut
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import dcp_archives, pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.dcp_metadata import Contents, StorageLocation, WholeTensor
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

_LAYER = re.compile(r"((?:de|en)coder\.layers\.)(\d+)\.(.+)")
_MEMBER = re.compile(r"\.local_experts\.(\d+)\.")
_ALL_LAYERS = re.compile(r"coder\.layers\.(?!\d)")
COMMON_FILE = "common.pt"
"""File of the common state. Megatron-LM since August 2026 keeps it in an archive instead."""
_COMMON_KEY = "common_state/shard_0_1"


class ShardedTensor(NamedTuple):
    """A sharded tensor of a model."""

    key: str
    members: tuple[TensorSlice, ...]
    """Tensors that it stacks: of the layers, or of the modules in each layer."""
    stack: tuple[int, ...] = ()
    """First dimensions: the number of layers, and of modules in a layer; empty: no stack."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, *self.members[0].shape)

    @property
    def has_layers(self) -> bool:
        """Whether it stacks the tensors of all layers."""
        return bool(_ALL_LAYERS.search(self.key))

    def of_layer(self, number: int) -> tuple[TensorSlice, ...]:
        size = len(self.members) // self.stack[0]
        return self.members[number * size : (number + 1) * size]


def sharded_tensors(architecture: Architecture, *, padded_vocab_size: int) -> list[ShardedTensor]:
    """Return the sharded tensors of a model, in the order in which Megatron makes them."""
    rank = TensorParallelRank(architecture, Axis(0, 1), padded_vocab_size)
    tree = module_tree.stage_tree(rank, range(architecture.num_hidden_layers))
    members: dict[str, dict[tuple[int, ...], TensorSlice]] = {}
    for name, tensor in module_tree.named_slices(tree):
        key, place = _key_and_place(core_name(name, architecture), architecture)
        members.setdefault(key, {})[place] = tensor
    return [
        ShardedTensor(
            key,
            (*of_key.values(),),
            tuple(len({*numbers}) for numbers in zip(*of_key, strict=True)),
        )
        for key, of_key in members.items()
    ]


def _key_and_place(name: str, architecture: Architecture) -> tuple[str, tuple[int, ...]]:
    """Key of the sharded tensor that has a tensor, and the number of the tensor in each stack."""
    place = []
    if not layers_differ(architecture) and (match := _LAYER.fullmatch(name)):
        name = match[1] + match[3]
        place.append(int(match[2]))
    if member := _MEMBER.search(name):
        name = _MEMBER.sub(".experts.", name)
        place.append(int(member[1]))
    return name, (*place,)


def match_tensors(
    folder: Path, stored: Mapping[str, WholeTensor], *, model: Iterable[ShardedTensor]
) -> dict[str, ShardedTensor]:
    """Return a model's sharded tensors by a checkpoint's keys, which can be of single layers."""
    expected = {_current_key(tensor.key): tensor for tensor in model}
    # Megatron has no layer axis if its layers differ.
    single = {
        key: ShardedTensor(key, tensor.of_layer(number), tensor.stack[1:])
        for fused, tensor in expected.items()
        if tensor.has_layers
        for number in range(tensor.stack[0])
        for key in [re.sub(r"\.layers\.", f".layers.{number}.", fused, count=1)]
    }
    names = {_current_key(key): key for key in stored}
    if names.keys() & single.keys():
        expected = {key: each for key, each in expected.items() if not each.has_layers} | single
    found = [name if name in expected else key for name, key in names.items()]
    model_tensors.check_names(found, expected, where=folder)
    for name, key in names.items():
        shape = expected[name].shape
        model_tensors.check_shape(key, stored[key].size, expected=shape, where=folder)
    return {key: expected[name] for name, key in names.items()}


def _current_key(key: str) -> str:
    """Return a key with the names of norms and of MTP layers that all versions get."""
    key = key.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    key = re.sub(r"\.linear_(q|kv)_up_proj\.layer_norm_", r".\1_layernorm.", key)
    key = key.replace(".mtp_model_layer.", ".transformer_layer.")
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
    slices = (slice(at.start * n, at.stop * n) for at, n in zip(place, shard, strict=True))
    pieces = cut([Chunk(chunk.key, (*slices,))], elements.start, elements.stop)
    chunks = (piece._replace(start=chunk.start + piece.start) for piece in pieces)
    return replace(extent, chunks=(*chunks,))


def _whole_chunks(chunk: Chunk, tensor: ShardedTensor, *, prefix: str) -> Iterator[Chunk]:
    depth = len(tensor.stack)
    numbers, slices = chunk.slices[:depth], chunk.slices[depth:]
    for place in product(*(range(at.start, at.stop) for at in numbers)):
        start, member = chunk.start, 0
        for number, at, step, size in zip(place, numbers, chunk.steps, tensor.stack, strict=False):
            start += (number - at.start) * step
            member = member * size + number
        of_member = chunk._replace(slices=slices, start=start, stride=chunk.steps[depth:])
        yield from _rows(of_member, tensor.members[member], prefix=prefix)


def _rows(chunk: Chunk, tensor: TensorSlice, *, prefix: str) -> Iterator[Chunk]:
    """Yield the rows of whole tensors that a chunk of one of Megatron's tensors holds."""
    rows, *columns = chunk.slices
    width = math.prod(tensor.shape[1:])
    for part in tensor.chunks:
        if part.is_mean:  # padding of the vocabulary
            continue
        # On a single rank, each part consists of whole rows; it may be one of our stack.
        *place, own = part.slices[: len(part.slices) - len(columns)]
        first = part.start // width
        low, high = max(rows.start, first), min(rows.stop, first + own.stop - own.start)
        if low < high:
            of_rows = slice(own.start + low - first, own.start + high - first)
            start = chunk.start + (low - rows.start) * chunk.steps[0]
            steps = (*[1] * len(place), *chunk.steps)
            key = prefix + parameter_name(part.key)
            yield Chunk(key, (*place, of_rows, *columns), start, steps)


@dataclass(frozen=True)
class StoredObject:
    """An object of Python in a checkpoint, with `PickledTensor` in place of tensors."""

    value: Any
    file: Path
    offset: int = 0
    """First byte in the file of the archive that holds it."""

    def number(self, value: Any) -> float | None:
        """Return a number within the object, also if it is a tensor; None if it is neither."""
        if isinstance(value, int | float):
            return float(value)
        if not isinstance(value, PickledTensor) or value.numel != 1:
            return None
        extent = torch_archive.extent(self.file, "number", replace(value, shape=(), stride=()))
        extent = replace(extent, offset=self.offset + extent.offset, chunks=(Chunk("", ()),))
        return TensorSource([extent], {"": ()}).number("")


def read_common(folder: Path, contents: Contents) -> StoredObject:
    """Read the common state: Megatron's arguments, counters and settings of the optimizer."""
    if (file := folder / COMMON_FILE).is_file() or _COMMON_KEY not in contents.objects:
        common = StoredObject(pickle_reader.read(file, REMEDY), file)
    else:
        common = read_shard(folder, _COMMON_KEY, location=contents.objects[_COMMON_KEY])
    if not isinstance(common.value, Mapping):
        raise UserError(f"{common.file}: holds no state of a checkpoint; {REMEDY}")
    return common


def read_shard(folder: Path, key: str, *, location: StorageLocation) -> StoredObject:
    """Read an object that a single rank has saved."""
    file, offset, _ = location
    # Megatron saves a list with the single shard.
    shards = dcp_archives.read_object(folder, key, location=location)
    if not isinstance(shards, list) or len(shards) != 1:
        raise UserError(f"{folder / file}: damaged at {key}, which is not one object; {REMEDY}")
    return StoredObject(shards[0], folder / file, offset)
