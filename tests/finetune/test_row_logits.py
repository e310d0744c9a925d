"""Each row counts once, on any number of ranks."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.finetunes import TASK, planted_rows, write_rows, write_vocabulary
from tests.support.ranks import spawn
from tokamake.config.finetune import FinetuneTask
from tokamake.finetune.row_logits import RowBatches, row_logits
from tokamake.finetune.rows import read_rows
from tokamake.parallel.axis import Axis
from tokamake.train.objectives.classification.rows import TaskRows

NUM_ROWS = 11


def logits_on_rank(folder: Path) -> tuple[np.ndarray, int]:
    """Logits that name the tokens of their rows, and the number of passes."""
    passes = []

    def forward(micro_batches: Iterable[TaskRows]) -> Iterator[Tensor]:
        for rows in micro_batches:
            passes.append(rows)
            # Padding is token 0, and the length of a batch must not matter.
            places = np.cumprod(np.full(rows.tokens.shape, 1.1), axis=1)
            values = (rows.tokens * places * rows.padding_mask).sum(-1)
            yield torch.from_numpy(np.stack([values, -values], axis=1))

    rows = read_rows(
        [str(folder / "rows.jsonl")],
        FinetuneTask(**TASK),
        tokenizer=folder / "vocab.txt",
        sequence_length=16,
    )
    axis = Axis(dist.get_rank(), dist.get_world_size())
    return row_logits(forward, rows, batches=RowBatches(axis, size=2)), len(passes)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_row_counts_once(tmp_path: Path, world_size: int) -> None:
    write_vocabulary(tmp_path)
    texts = planted_rows(NUM_ROWS + 1, 1)[:NUM_ROWS]
    texts[4]["text"] += " w1 w2"
    write_rows(tmp_path / "rows.jsonl", texts)
    results = spawn(logits_on_rank, world_size, tmp_path)
    rows = read_rows(
        [str(tmp_path / "rows.jsonl")],
        FinetuneTask(**TASK),
        tokenizer=tmp_path / "vocab.txt",
        sequence_length=16,
    )
    batches = [rows.micro_batch(np.array([n]), 1, num_labels=1) for n in range(NUM_ROWS)]
    expected = [
        float((b.tokens * np.cumprod(np.full(b.tokens.shape, 1.1), axis=1) * b.padding_mask).sum())
        for b in batches
    ]
    for logits, num_passes in results:
        assert logits.shape == (NUM_ROWS, 2)
        np.testing.assert_allclose(logits[:, 0], expected, rtol=1e-6)
        assert num_passes == (6 if world_size == 1 else 2)
