"""Chunks of tokens as texts for the model that embeds them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.retrieval.chunk_tables import ChunkTable
from tokamake.retrieval.embedding_options import ChunkEmbedding, EmbeddingOptions
from tokamake.retrieval.text_vectors import Embedder, TokenizedText, opened_embedder
from tokamake.train.objectives.ict.blocks import with_special_tokens
from tokamake.train.objectives.retro.chunks import text_lengths

Chunk = tuple[int, npt.NDArray[Any]]
"""Number of a chunk, and its tokens."""
_WINDOW = 1024
"""Chunks that are tokenized at once."""


def document_chunks(dataset: IndexedDataset, table: ChunkTable) -> Iterator[Chunk]:
    """Yield all chunks of a dataset in order."""
    number, length = 0, table.chunk_length
    for document in range(len(dataset)):
        (size,) = text_lengths(dataset, np.array([document]), eod=table.eod).tolist()
        tokens = dataset[document][:size]
        for start in range(0, size, length):
            yield number, tokens[start : start + length]
            number += 1


def embedded_texts(
    chunks: Iterable[Chunk], *, tokenizer: Tokenizer, embedder: Embedder
) -> Iterator[TokenizedText]:
    """Yield chunks as texts in tokens of the embedder; chunks without text are left out.

    Args:
        tokenizer: of the chunks' tokens.
        embedder: cuts longer texts.
    """
    remaining = iter(chunks)
    while window := list(islice(remaining, _WINDOW)):
        texts = [tokenizer.decode(tokens.tolist()) for _, tokens in window]
        encoded = embedder.tokenizer.encode_batch(texts)
        for (number, _), text, ids in zip(window, texts, encoded, strict=True):
            if text.strip() and ids:
                framed = with_special_tokens(
                    np.array(ids), None, tokens=embedder.tokens, length=embedder.length
                )
                yield TokenizedText(number, framed)


def write_vectors(
    chunks_by: Callable[[Tokenizer], tuple[Iterable[Chunk], dict[str, Any]]],
    embedding: ChunkEmbedding,
    *,
    output: Path,
) -> None:
    """Embed chunks to a shard; all ranks call this together.

    Args:
        chunks_by: function of the chunks' tokenizer that returns chunks, and what decides them.
        output: manifest to write.
    """
    with opened_embedder(
        embedding.checkpoint,
        "chunk",
        tokenizer=embedding.checkpoint_tokenizer,
        tokenizer_option="--checkpoint-tokenizer",
        options=EmbeddingOptions(batch_size=embedding.batch_size),
        output=output,
    ) as embedder:
        with embedder.peers.together():
            tokenizer = open_tokenizer(embedding.tokenizer)
            chunks, decided_by = chunks_by(tokenizer)
        texts = embedded_texts(chunks, tokenizer=tokenizer, embedder=embedder)
        made_from = {"decoded_by": tokenizer.fingerprint, **decided_by}
        embedder.write(texts, manifest=output, made_from=made_from)
