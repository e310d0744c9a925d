"""Blocks of an indexed dataset of sentences, in the order of its documents."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.errors import UserError
from tokamake.retrieval.text_vectors import NUM_SPECIAL, TokenizedText
from tokamake.train.objectives.ict.blocks import title_lengths, title_of, with_special_tokens
from tokamake.train.objectives.ict.titles import check_titles, title_names

BLOCK_BITS = 32
"""The id of a block is the number of its dataset in the bits above, and its own number here."""


class DatasetBlocks(NamedTuple):
    """Blocks of a dataset; each has at most `length` tokens with special ones."""

    dataset: IndexedDataset
    titles: IndexedDataset | None
    rows: npt.NDArray[np.int64]
    """(blocks, 3) first sentence, end of sentences, document."""
    length: int
    num_left_out: int
    """Documents without a block: a sentence of theirs has more than 512 tokens."""

    def texts(self, tokens: Mapping[str, int], *, number: int) -> Iterator[TokenizedText]:
        """Yield the blocks with special tokens.

        Args:
            tokens: special tokens: cls, sep.
            number: number of the dataset, for the ids.
        """
        for block in range(len(self.rows)):
            first, end, document = self.rows[block].tolist()
            text = np.concatenate([self.dataset[sentence] for sentence in range(first, end)])
            title = None
            if self.titles is not None:
                title = title_of(self.titles, document)[: _max_title(self.length)]
            framed = with_special_tokens(text, title, tokens=tokens, length=self.length)
            yield TokenizedText((number << BLOCK_BITS) + block, framed)


def open_blocks(prefix: Path, *, text: str, titles: str, length: int) -> DatasetBlocks:
    """Cut all documents of a dataset into blocks, as the objective ict does.

    Blocks of one sentence count, too: all text can be found.

    Args:
        prefix: dataset of sentences.
        text: key of the texts in the name of the dataset.
        titles: key of the titles in the name of their dataset; empty: there are none.
        length: most tokens of a block, with its title and special tokens.
    """
    dataset, title_dataset = IndexedDataset(prefix), None
    bounds = np.ascontiguousarray(dataset.document_bounds, np.int64)
    lengths = np.zeros(len(bounds) - 1, np.int32)
    if titles:
        path = find_titles(prefix, text=text, titles=titles)
        title_dataset = IndexedDataset(path)
        found = title_lengths(title_dataset, range(len(lengths)))
        lengths = np.minimum(found, _max_title(length), dtype=np.int32)
    mapping = _csrc.build_blocks_mapping(
        bounds,
        dataset.lengths,
        lengths,
        num_epochs=1,
        max_num_samples=2**62,
        max_seq_length=length - NUM_SPECIAL,
        seed=1,
        use_one_sent_blocks=True,
    )
    rows = mapping[np.argsort(mapping[:, 0], kind="stable"), :3].astype(np.int64)
    num_with_text = int((np.diff(bounds) > 0).sum())
    num_left_out = num_with_text - len(np.unique(rows[:, 2]))
    return DatasetBlocks(dataset, title_dataset, rows, length, num_left_out)


def find_titles(prefix: Path, *, text: str, titles: str) -> Path:
    """Find the titles of a dataset, and check that they belong to it."""
    candidates: list[Any] = title_names([str(prefix)], text=text, titles=titles)[str(prefix)]
    for name in candidates:
        if Path(f"{name}.idx").is_file():
            check_titles(prefix, Path(name))
            return Path(name)
    raise UserError(
        f"{prefix}: no dataset of its titles, {' or '.join(candidates)}; tokenize both keys in one "
        "pass, or give --titles '' to embed blocks without titles"
    )


def _max_title(length: int) -> int:
    return (length - NUM_SPECIAL) // 2
