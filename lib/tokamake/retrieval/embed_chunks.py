"""Stage `embed-chunks`: vectors of the chunks of a dataset, which objective retro searches."""

from pathlib import Path


def embed_chunks(
    prefix: Path,
    /,
    *,
    chunks: Path,
    checkpoint: Path,
    output: Path,
    tokenizer: Path,
    checkpoint_tokenizer: Path | None = None,
    batch_size: int = 64,
) -> None:
    """Embed the chunks of a dataset to a shard of embeddings; ids are the numbers of chunks.

    A vector has length 1. It is the mean of the last states of a BERT between [CLS] and [SEP], or
    comes from a biencoder's tower of blocks. Chunks without text have none. Several ranks share the
    chunks: `torchrun --nproc-per-node 4 -m tokamake embed-chunks …`. With the same number of
    threads per rank (OMP_NUM_THREADS), any number of ranks writes the same bytes.

    Args:
        prefix: dataset of documents, a path without .bin and .idx.
        chunks: manifest of `chunk-documents`.
        checkpoint: folder of a BERT or a biencoder in any format, or of a run, whose newest one
            counts.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
        tokenizer: tokenizer of the dataset.
        checkpoint_tokenizer: tokenizer of the model; by default, the tokenizer beside its weights,
            or the tokenizer that the run.yaml of the checkpoint names.
        batch_size: chunks per forward pass of a rank.
    """
    from tokamake.data.indexed.dataset import IndexedDataset
    from tokamake.data.indexed.manifest import check_tokenizer
    from tokamake.data.samples.index_folder import identity
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.retrieval.chunk_tables import open_table
    from tokamake.retrieval.chunk_texts import document_chunks, embedded_texts
    from tokamake.retrieval.embedding_options import EmbeddingOptions
    from tokamake.retrieval.text_vectors import opened_embedder

    with opened_embedder(
        checkpoint,
        "chunk",
        tokenizer=checkpoint_tokenizer,
        options=EmbeddingOptions(batch_size=batch_size),
        output=output,
    ) as embedder:
        with embedder.peers.together():
            opened, dataset = open_tokenizer(tokenizer), IndexedDataset(prefix)
            check_tokenizer(prefix, opened)
            measured = identity(prefix.parent, prefix.name, thorough=True)
            table = open_table(chunks, dataset=measured, name=str(prefix))
            made_from = {"decoded_by": opened.fingerprint, "chunks": table.request}
        texts = embedded_texts(document_chunks(dataset, table), tokenizer=opened, embedder=embedder)
        embedder.write(texts, manifest=output, made_from=made_from)
