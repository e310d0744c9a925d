"""Stage `embed-chunks`: vectors of the chunks of a dataset, which objective retro searches."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.retrieval.embedding_options import ChunkEmbedding

if TYPE_CHECKING:
    from tokamake.data.tokenizers import Tokenizer


def embed_chunks(prefix: Path, /, *, chunks: Path, embedding: ChunkEmbedding, output: Path) -> None:
    """Embed the chunks of a dataset to a shard of embeddings; ids are the numbers of chunks.

    A vector has length 1. It is the mean of the last states of a BERT between [CLS] and [SEP], or
    comes from a biencoder's tower of blocks. Chunks without text have none. Several ranks share the
    chunks: `torchrun --nproc-per-node 4 -m tokamake embed-chunks …`. With the same number of
    threads per rank (OMP_NUM_THREADS), any number of ranks writes the same bytes.

    Args:
        prefix: dataset of documents, a path without .bin and .idx.
        chunks: manifest of `chunk-documents`.
        embedding: the model that embeds chunks.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
    """
    from tokamake.data.indexed.dataset import IndexedDataset
    from tokamake.data.indexed.manifest import check_tokenizer
    from tokamake.data.samples.index_folder import identity
    from tokamake.retrieval.chunk_tables import open_table
    from tokamake.retrieval.chunk_texts import document_chunks, write_vectors

    def all_chunks(tokenizer: "Tokenizer") -> tuple[Any, dict[str, Any]]:
        dataset = IndexedDataset(prefix)
        check_tokenizer(prefix, tokenizer)
        measured = identity(prefix.parent, prefix.name, thorough=True)
        table = open_table(chunks, dataset=measured, name=str(prefix))
        return document_chunks(dataset, table), {"chunks": table.request}

    write_vectors(all_chunks, embedding, output=output)
