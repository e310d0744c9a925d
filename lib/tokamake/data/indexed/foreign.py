"""Checks of datasets whose manifest states no vocabulary: other programs wrote them.

`index` reads such a dataset once. For datasets of tokamake, the manifest has a hash of the index,
and the tokenizer's vocabulary bounds every token.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.index_reader import read_layout
from tokamake.data.indexed.merge_inputs import check_bounds, check_sequence_starts, find_manifest
from tokamake.data.indexed.paths import bin_path, idx_path
from tokamake.errors import UserError

_TASK_TOKENS = 1 << 24
_BLOCK_TOKENS = 1 << 17
"""Small enough for the processor's cache: a block is read twice."""


def stated_vocabulary(prefix: Path) -> int | None:
    """Return the vocabulary size that the manifest of a dataset states, if any."""
    manifest = find_manifest(prefix)
    return manifest.get("vocab_size") if manifest else None


def check_foreign(prefix: Path) -> int:
    """Check index and tokens of a dataset; return its largest token, -1 if none.

    Lengths and tokens must not be negative, pointers must follow from the lengths, and document
    bounds must ascend.
    """
    dataset = IndexedDataset(prefix)
    layout = read_layout(idx_path(prefix))
    check_sequence_starts(prefix, layout, itemsize=np.dtype(dataset.dtype).itemsize)
    check_bounds(prefix, layout)
    tasks = range(0, len(dataset.tokens), _TASK_TOKENS)
    # Threads suffice: min and max of numpy release the interpreter lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        bounds = list(pool.map(lambda first: _bounds(dataset, first), tasks))
    if min((smallest for smallest, _ in bounds), default=0) < 0:
        first = next(
            first for first, (smallest, _) in zip(tasks, bounds, strict=True) if smallest < 0
        )
        position = first + int((dataset.tokens[first : first + _TASK_TOKENS] < 0).argmax())
        raise UserError(
            f"{bin_path(prefix)}: token {position:,} is {dataset.tokens[position]}, below 0; "
            "tokenize again, or leave the dataset out"
        )
    return max((largest for _, largest in bounds), default=-1)


def _bounds(dataset: IndexedDataset, first: int) -> tuple[int, int]:
    """Return the smallest and the largest of the tokens of a task, which begins at `first`."""
    smallest, largest = 0, -1
    is_signed = np.iinfo(dataset.dtype).min < 0
    stop = min(first + _TASK_TOKENS, len(dataset.tokens))
    for start in range(first, stop, _BLOCK_TOKENS):
        block = dataset.tokens[start : min(start + _BLOCK_TOKENS, stop)]
        largest = max(largest, int(block.max()))
        if is_signed:
            smallest = min(smallest, int(block.min()))
    return smallest, largest
