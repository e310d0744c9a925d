"""The text kept from training: test documents of every merged file, gathered corpus by corpus.

Tokens come from `data.indexed` by the rule of `data.splits`; they go to `perplexity`.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.data.mixture.weights import read_weights
from tokamake.data.pairs import manifest_path
from tokamake.data.pairs.indexed import IndexedDataset
from tokamake.data.text import splits
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError


class HeldOut(NamedTuple):
    """Test documents of one corpus, in file order."""

    tokens: npt.NDArray[np.int64]
    """(tokens,) all documents end to end, their end-of-document tokens kept."""
    lengths: list[int]
    """Tokens of each document; the last one may be cut."""


def read_held_out(
    *, weights: Path, data_root: Path, split: str, max_tokens: int, tokenizer: Tokenizer
) -> dict[str, HeldOut]:
    """Gather the test documents of all corpora, at most `max_tokens` tokens of each.

    Args:
        weights: weighting file; corpora come in the order it first names them.
        data_root: folder that its prefixes are relative to.
        split: shares of each file's documents for training, validation and test.
        max_tokens: tokens to take from a corpus; the document that crosses the line is cut.
        tokenizer: the one the files were made with.

    Raises:
        UserError: a file is missing, damaged or was made with another tokenizer; or no corpus has
            a test document.
    """
    gathered: dict[str, list[npt.NDArray[np.integer]]] = {}
    for entry in read_weights(weights):
        documents = gathered.setdefault(entry.corpus, [])
        room = max_tokens - sum(map(len, documents))
        documents += _test_documents(data_root / entry.prefix, split, room, tokenizer)
    if not any(gathered.values()):
        raise UserError(
            f"split: {split!r}: no corpus has a test document; give the last number of "
            "train.split a larger share"
        )
    return {corpus: _join(documents) for corpus, documents in gathered.items()}


def _test_documents(
    prefix: Path, split: str, room: int, tokenizer: Tokenizer
) -> list[npt.NDArray[np.integer]]:
    _check_tokenizer(prefix, tokenizer)
    dataset = IndexedDataset(prefix)
    documents = []
    for number in splits.document_ranges(split, len(dataset))["test"]:
        if room <= 0:
            break
        documents.append(dataset[number][:room])
        room -= len(documents[-1])
    return documents


def _check_tokenizer(prefix: Path, tokenizer: Tokenizer) -> None:
    """A pair of another program has no manifest; nothing can be said about its tokenizer."""
    path = manifest_path(prefix)
    if not path.is_file():
        return
    made_with = files.read_json(path, "make the pair again").get("tokenizer")
    if made_with not in (None, tokenizer.fingerprint):
        raise UserError(
            f"{prefix}: made with another tokenizer ({made_with[:12]}) than the one given "
            f"({tokenizer.fingerprint[:12]}); give the tokenizer it was made with"
        )


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
