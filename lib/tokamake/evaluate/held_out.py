"""Held-out text: the documents of raw files, or of a split of all merged datasets, by corpus."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.documents import read_texts, split_keys
from tokamake.data.corpus.raw_files import expand
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.manifest import check_tokenizer
from tokamake.data.mixture.split_prefixes import SplitPrefixes
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError

_BATCH_TEXTS = 1000


class HeldOut(NamedTuple):
    """Held-out documents of a corpus, in the order of its datasets."""

    tokens: npt.NDArray[np.int64]
    """(tokens,) concatenated documents, with their end-of-document tokens."""
    lengths: list[int]
    """Tokens of each document. The last document may be truncated."""


def read_held_out(
    splits: SplitPrefixes, split: str, *, data_root: Path, max_tokens: int, tokenizer: Tokenizer
) -> dict[str, HeldOut]:
    """Read the documents of a split of all corpora, at most `max_tokens` tokens of each corpus.

    The document at the limit is truncated. `splits` determine the order of corpora.
    """
    documents_of: dict[str, list[npt.NDArray[np.integer]]] = {}
    for line in splits.lines(split):
        documents = documents_of.setdefault(line.corpus, [])
        num_tokens = max_tokens - sum(map(len, documents))
        prefix = data_root / line.prefix
        check_tokenizer(prefix, tokenizer)
        dataset = IndexedDataset(prefix)
        numbers = splits.documents(split, line, len(dataset))
        documents += _read(dataset, numbers, num_tokens=num_tokens)
    if not any(documents_of.values()):
        raise UserError(
            f"{splits.origin(split)}: no corpus has a {split} document; give the "
            f"{'last' if split == 'test' else 'second'} number of train.split a larger share"
        )
    return {corpus: _join(documents) for corpus, documents in documents_of.items()}


def read_raw(
    data: Iterable[str], *, text_key: Iterable[str], max_tokens: int, tokenizer: Tokenizer
) -> dict[str, HeldOut]:
    """Encode the documents of raw files, folders or patterns as `tokenize` does, by path.

    A file gives at most `max_tokens` tokens; its document at the limit is truncated. Documents
    without tokens are left out.
    """
    keys = ",".join(split_keys(text_key))
    return {
        str(path): _encode(path, keys, max_tokens=max_tokens, tokenizer=tokenizer)
        for path in expand(data)
    }


def _encode(path: Path, keys: str, *, max_tokens: int, tokenizer: Tokenizer) -> HeldOut:
    documents: list[npt.NDArray[np.integer]] = []
    num_tokens = max_tokens
    texts = read_texts(path, keys)
    while num_tokens > 0 and (batch := [*islice(texts, _BATCH_TEXTS)]):
        for ids in filter(None, tokenizer.encode_batch(batch)):
            if num_tokens > 0:
                documents.append(np.array([*ids, tokenizer.eod][:num_tokens]))
                num_tokens -= len(documents[-1])
    if not documents:
        raise UserError(f"{path}: holds no text; leave it out")
    return _join(documents)


def _read(
    dataset: IndexedDataset, numbers: range, *, num_tokens: int
) -> list[npt.NDArray[np.integer]]:
    documents: list[npt.NDArray[np.integer]] = []
    for number in numbers:
        if num_tokens <= 0:
            break
        documents.append(dataset[number][:num_tokens])
        num_tokens -= len(documents[-1])
    return documents


def _join(documents: list[npt.NDArray[np.integer]]) -> HeldOut:
    tokens = np.concatenate([np.zeros(0, np.int64), *documents])
    return HeldOut(tokens.astype(np.int64, copy=False), [len(document) for document in documents])


def text_bytes(held_out: HeldOut, tokenizer: Tokenizer) -> int:
    """Bytes of the documents' UTF-8 text, without end-of-document tokens; 0 of token ids."""
    if not tokenizer.has_text:
        return 0
    total, start = 0, 0
    for length in held_out.lengths:
        document = held_out.tokens[start : start + length].tolist()
        start += length
        if document and document[-1] == tokenizer.eod:
            document.pop()
        total += len(tokenizer.decode(document).encode("utf-8"))
    return total
