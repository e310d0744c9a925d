"""Held-out documents, and the loss, perplexity and bits per byte of a model on them.

A corpus is one long stream of tokens, which the model reads window by window.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tokamake.data.corpus.documents import read_texts, split_keys
from tokamake.data.corpus.raw_files import expand
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.manifest import check_tokenizer
from tokamake.data.mixture.split_prefixes import SplitPrefixes
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.inference.model import InferenceModel
from tokamake.runtime.console import progress
from tokamake.train.objectives.causal.objective import inputs_and_labels

_MAX_NATS = 700.0
"""Maximum loss per token: exp() of a little more overflows 64-bit floats."""
_BATCH_TEXTS = 1000


def windows(num_tokens: int, sequence_length: int) -> list[tuple[int, int]]:
    """Return the bounds [start, end) of windows over a stream. Neighbours share one token.

    A window predicts all its tokens except the first, so the windows predict each token of the
    stream except the first exactly once. Each window predicts `sequence_length` tokens; the last
    one may predict fewer.
    """
    starts = range(0, num_tokens - 1, sequence_length)
    return [(start, min(start + sequence_length + 1, num_tokens)) for start in starts]


def total_loss(
    model: InferenceModel, tokens: npt.NDArray[np.int64], *, sequence_length: int, batch_size: int
) -> float:
    """Return the sum of cross-entropies in nats of all tokens (tokens,) except the first.

    All ranks call this together and get the same result. Data-parallel ranks take turns with the
    batches; losses are added in the order of the batches, so their number changes nothing.
    """
    batches = [*_batches(len(tokens), sequence_length, batch_size=batch_size)]
    axis = model.mesh.data
    losses = torch.zeros(len(batches), dtype=torch.float64, device=model.device)
    # With FSDP, ranks that have no batch left must still take part in the last round.
    rounds = range(axis.rank, -(-len(batches) // axis.size) * axis.size, axis.size)
    for number in progress(rounds, label="evaluate", total=len(rounds), unit="batches"):
        batch = batches[min(number, len(batches) - 1)]
        rows = np.stack([tokens[start:end] for start, end in batch])
        inputs, labels = (
            torch.from_numpy(array).to(model.device) for array in inputs_and_labels(rows)
        )
        loss = model.total_loss(inputs, labels)
        if loss is not None and number < len(batches):
            losses[number] = loss
    return sum(model.add_up(losses).tolist())


def _batches(
    num_tokens: int, sequence_length: int, *, batch_size: int
) -> Iterator[list[tuple[int, int]]]:
    """Batch windows of equal length, then the short window alone, so nothing needs padding."""
    bounds = windows(num_tokens, sequence_length)
    full = [(start, end) for start, end in bounds if end - start == sequence_length + 1]
    for first in range(0, len(full), batch_size):
        yield full[first : first + batch_size]
    for short in bounds[len(full) :]:
        yield [short]


def measures(name: str, *, documents: int, tokens: int, bytes: int, nats: float) -> dict[str, Any]:
    """Perplexity and bits per byte of predicted tokens, bytes of their text, and nats of loss.

    UserError: the loss is too large for a finite perplexity, or NaN.
    """
    if not nats < _MAX_NATS * max(tokens, 1):
        raise UserError(
            f"{name}: loss {nats / tokens}: no finite perplexity; the weights are broken"
        )
    return {
        "documents": documents,
        "tokens": tokens,
        "bytes": bytes,
        "loss": nats / tokens if tokens else None,
        "perplexity": math.exp(nats / tokens) if tokens else None,
        "bits_per_byte": nats / math.log(2) / bytes if tokens and bytes else None,
    }


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
