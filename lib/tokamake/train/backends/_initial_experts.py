"""Experts that start from a dense checkpoint: the parts of its MLPs that each rank reads."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.native.flat_chunks import FlatChunks, Offset
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run
from tokamake.parallel.sharding import ParameterChunk
from tokamake.preflight.initial_experts import Upcycling, upcycling

Weights = list[tuple[ParameterChunk, FlatChunks]]

_EXPERTS = re.compile(r"(.*\.mlp)\.experts\.((?:gate|up|down)_proj\.weight)")
_ROUTER = re.compile(r".*\.mlp\.gate\.weight")
_LAST = "down_proj.weight"


class ExpertStart:
    """This rank's experts and routers, which begin as copies of dense MLPs.

    Attributes:
        others: weights that the dense checkpoint has, too.
    """

    def __init__(
        self, weights: Iterable[tuple[ParameterChunk, FlatChunks]], run: Run, *, dense: Architecture
    ) -> None:
        self._run, self._dense = run, dense
        self._upcycling = upcycling(dense, run.architecture)
        self._experts: Weights = []
        self._routers: Weights = []
        self.others: Weights = []
        for chunk, flat_chunks in weights:
            if _EXPERTS.fullmatch(chunk.saved_name):
                self._experts.append((chunk, flat_chunks))
            elif _ROUTER.fullmatch(chunk.saved_name):
                self._routers.append((chunk, flat_chunks))
            else:
                self.others.append((chunk, flat_chunks))

    def reads(self) -> list[dict[str, FlatChunks]]:
        """Parts of dense MLPs by their key in the checkpoint, for each copy of the MLP.

        Every rank has as many entries: reading is collective.
        """
        parts: list[dict[str, dict[Offset, Tensor]]] = [
            defaultdict(dict) for _ in range(self._upcycling.copies)
        ]
        dtypes: dict[str, torch.dtype] = {}
        for chunk, flat_chunks in self._experts:
            match = _EXPERTS.fullmatch(chunk.saved_name)
            assert match, "checked before"
            key = f"model.{match[1]}.{match[2]}"
            dtypes[key] = flat_chunks.dtype
            for copy, offset, values in _slices(chunk, flat_chunks, upcycling=self._upcycling):
                parts[copy][key][offset] = values
        shapes = model_tensors.weight_shapes(self._dense)
        return [
            {
                key: FlatChunks(shapes[key], dtype=dtypes[key], chunks=chunks)
                for key, chunks in each.items()
            }
            for each in parts
        ]

    def finish(self) -> None:
        """Scale the last projections, which were read, and draw the routers."""
        for chunk, flat_chunks in self._experts:
            if chunk.saved_name.endswith(_LAST):
                for values in flat_chunks.chunks.values():
                    values.mul_(self._upcycling.slices)
        random = model_tensors.random_weights(self._run.architecture, self._run.seed)
        for chunk, flat_chunks in self._routers:
            shape = self._upcycling.copies, chunk.shape[1]
            for (first, column), values in flat_chunks.chunks.items():
                rows = np.arange(first, first + len(values)) // self._upcycling.slices
                place = (
                    slice(int(rows[0]), int(rows[-1]) + 1),
                    slice(column, column + values.shape[1]),
                )
                drawn = np.empty([at.stop - at.start for at in place], np.float32)
                for at, tile in random.tiles(chunk.saved_name, shape, place=place):
                    drawn[at] = tile
                values.copy_(torch.from_numpy(drawn[rows - rows[0]]))


def _slices(
    chunk: ParameterChunk, flat_chunks: FlatChunks, *, upcycling: Upcycling
) -> Iterator[tuple[int, Offset, Tensor]]:
    """Copy, offset in the dense matrix and values of each expert of a stack's chunks."""
    dim = 1 if chunk.saved_name.endswith(_LAST) else 0
    width = chunk.shape[1 + dim]
    for (first, *offset), values in flat_chunks.chunks.items():
        for expert, matrix in enumerate(values, first):
            copy, number = divmod(expert, upcycling.slices)
            place = [*offset]
            place[dim] += number * width
            yield copy, tuple(place), matrix
