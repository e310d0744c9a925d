"""The text kept from training: test documents of every merged file, gathered corpus by corpus.

Tokens come from `pairs.indexed`, which of them from `mixture.sets`; they go to `perplexity`.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.tokenizer_check import check_tokenizer
from tokamake.data.mixture.split_prefixes import SplitPrefixes
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError


class HeldOut(NamedTuple):
    """Test documents of one corpus, in file order."""

    tokens: npt.NDArray[np.int64]
    """(tokens,) all documents end to end, their end-of-document tokens kept."""
    lengths: list[int]
    """Tokens of each document; the last one may be cut."""


def read_held_out(
    sets: SplitPrefixes, *, data_root: Path, max_tokens: int, tokenizer: Tokenizer
) -> dict[str, HeldOut]:
    """Gather the test documents of all corpora, at most `max_tokens` tokens of each.

    Args:
        sets: what is kept for tests; corpora come in the order in which it first names them.
        data_root: folder that prefixes are relative to.
        max_tokens: tokens to take from a corpus; the document that crosses the line is cut.
        tokenizer: the one the files were made with.

    Raises:
        UserError: a file is missing, damaged or was made with another tokenizer; or no corpus has
            a test document.
    """
    gathered: dict[str, list[npt.NDArray[np.integer]]] = {}
    for line in sets.lines("test"):
        documents = gathered.setdefault(line.corpus, [])
        room = max_tokens - sum(map(len, documents))
        prefix = data_root / line.prefix
        check_tokenizer(prefix, tokenizer)
        dataset = IndexedDataset(prefix)
        documents += _cut(dataset, sets.documents("test", line, len(dataset)), room)
    if not any(gathered.values()):
        raise UserError(
            f"{sets.origin('test')}: no corpus has a test document; give the last number of "
            "train.split a larger share"
        )
    return {corpus: _join(documents) for corpus, documents in gathered.items()}


def _cut(dataset: IndexedDataset, numbers: range, room: int) -> list[npt.NDArray[np.integer]]:
    """Documents until there is no room for tokens."""
    documents: list[npt.NDArray[np.integer]] = []
    for number in numbers:
        if room <= 0:
            break
        documents.append(dataset[number][:room])
        room -= len(documents[-1])
    return documents


def _join(documents: list[npt.NDArray[np.integer]]) -> HeldOut:
    tokens = np.concatenate([np.zeros(0, np.int64), *documents])
    return HeldOut(tokens.astype(np.int64, copy=False), [len(document) for document in documents])


def text_bytes(held_out: HeldOut, tokenizer: Tokenizer) -> int:
    """Bytes of the documents' text in UTF-8, end-of-document tokens not counted."""
    total, start = 0, 0
    for length in held_out.lengths:
        document = held_out.tokens[start : start + length].tolist()
        start += length
        if document and document[-1] == tokenizer.eod:
            document.pop()
        total += len(tokenizer.decode(document).encode("utf-8"))
    return total
