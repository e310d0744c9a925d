"""Experts as gpt-oss stores them: a gate and an up projection in turns, all experts in one tensor.

Projections are stored as (experts, inputs, outputs), ours are (experts, outputs, inputs). Published
files hold them as MXFP4 (OCP Microscaling Formats 1.0): 4-bit floating-point numbers, with a power
of two for each 32 of them along the inputs.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.cast import Array
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, Slices, size_of, whole_slices
from tokamake.errors import UserError

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate|up|down)_proj\.(weight|bias)")
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
"""Numbers with the same scale; two of them share a byte, the first one in its lower half."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)
"""Numbers by their 4 bits."""
_BIAS = 127
"""Exponent that a scale of 0 has, negated."""
_NO_NUMBER = 255
"""The scale of numbers that are NaN; transformers makes most of them infinite."""


class StoredTensor(NamedTuple):
    """A tensor of a model type; it holds chunks of one or more of tokamake's tensors."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def interleaved(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredTensor]:
    """The same tensors with experts as gpt-oss stores them.

    Args:
        stored: tensors by name; those of experts have our names.
        shapes: of all our tensors, by name.
    """
    found = {name: each for name, each in stored.items() if not _EXPERTS.fullmatch(name)}
    for name, shape in shapes.items():
        if not (match := _EXPERTS.fullmatch(name)):
            continue
        experts, each, kind = match.groups()
        turns = 1 if each == "down" else 2
        outputs = turns * shape[1]
        whole = (shape[0], *shape[2:], outputs)
        stride = (math.prod(whole[1:]), turns, *[outputs] * len(shape[2:]))
        chunk = Chunk(f"model.{name}", whole_slices(shape), int(each == "up"), stride)
        target = f"{experts}.{'down' if each == 'down' else 'gate_up'}_proj"
        target += "_bias" * (kind == "bias")
        earlier = found[target].chunks if target in found else ()
        found[target] = StoredTensor(whole, (*earlier, chunk))
    return found


@dataclass(frozen=True)
class DequantizedTensor:
    """One of our stacks of projections, computed from MXFP4 as it is read."""

    blocks: Extent
    """(experts, outputs, groups, 16) bytes."""
    scales: Extent
    """(experts, outputs, groups) exponents of two, plus 127."""
    rows: range
    """Stored outputs that are ours, in order."""

    @property
    def dtype(self) -> Dtype:
        """bf16: it holds all products of a number and a scale."""
        return dtypes.OF_WEIGHTS["bf16"]

    def values(self, slices: Slices) -> Array:
        """Compute slices of the stack, as raw bytes."""
        experts, rows, columns = slices
        stored = self.rows[rows]
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        kept = slice(columns.start - groups.start * _GROUP, columns.stop - groups.start * _GROUP)
        at = slice(stored.start, stored.stop, stored.step), groups
        blocks, scales = (_mapped(each) for each in (self.blocks, self.scales))
        result = np.empty(size_of(slices), "<u2")
        for expert, target in zip(range(experts.start, experts.stop), result, strict=True):
            numbers = _dequantized(blocks[expert][at], scales[expert][at])
            # The lower half of the bits is 0: bf16 is the upper half of fp32.
            target[:] = (numbers.view("<u4") >> np.uint32(16))[:, kept]
        return result.view("V2")


def _mapped(extent: Extent) -> Array:
    return np.memmap(extent.file, np.uint8, "r", extent.offset, extent.shape)


def _dequantized(blocks: Array, scales: Array) -> Array:
    """(rows, inputs) fp32 numbers of (rows, groups, 16) blocks."""
    halves = np.stack((blocks & 15, blocks >> 4), axis=-1)
    numbers = _NUMBERS[halves.reshape(*scales.shape, _GROUP)]
    exponents = scales.astype(np.int32) - _BIAS
    factors = np.where(scales == _NO_NUMBER, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
    numbers *= factors[..., None]
    result: Array = numbers.reshape(len(numbers), -1)
    return result


def take_quantized(
    extents: dict[str, Extent], stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, DequantizedTensor]]:
    """Remove MXFP4 from the tensors of a folder; yield ours that are stored so, by their keys."""
    for name, (whole, chunks) in stored.items():
        if len(whole) != 3:  # no stack of experts
            continue
        parts = {end: extents.pop(name + end, None) for end in (_BLOCKS, _SCALES)}
        blocks, scales = parts.values()
        for end, other in ((_BLOCKS, scales), (_SCALES, blocks)):
            if other is not None and parts[end] is None:
                raise UserError(f"{other.file}: tensor {name}{end} is missing; fetch it again")
        if blocks is None or scales is None:
            continue
        experts, inputs, outputs = whole
        shape = experts, outputs, inputs // _GROUP
        for extent, expected in ((blocks, (*shape, _GROUP // 2)), (scales, shape)):
            model_tensors.check_shape(
                extent.name, extent.shape, expected=expected, where=extent.file
            )
            if extent.dtype.name != "uint8" or extent.stride is not None or inputs % _GROUP:
                raise UserError(
                    f"{extent.file}: tensor {extent.name} is no MXFP4: it needs contiguous uint8, "
                    f"and a multiple of {_GROUP} inputs; fetch the checkpoint again"
                )
        for chunk in chunks:
            yield (
                chunk.key,
                DequantizedTensor(blocks, scales, range(chunk.start, outputs, chunk.steps[1])),
            )
