"""Stage `chunk-documents`: number the chunks of the documents of a dataset."""

from pathlib import Path


def chunk_documents(
    prefix: Path, /, *, output: Path, tokenizer: Path, chunk_length: int = 64
) -> None:
    """Cut the documents of a dataset into chunks, the database that objective retro searches.

    The last chunk of a document may be shorter. An end-of-document token is in no chunk.

    Args:
        prefix: dataset of documents, a path without .bin and .idx.
        output: manifest to write, NAME.json; NAME.npy beside it has the number of the first chunk
            of each document.
        tokenizer: tokenizer of the dataset, for its end-of-document token.
        chunk_length: tokens of a chunk.
    """
    from tokamake.data.indexed.dataset import IndexedDataset
    from tokamake.data.indexed.manifest import check_tokenizer
    from tokamake.data.samples.loader import check_sentences
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.errors import UserError
    from tokamake.retrieval.chunk_tables import is_written, table_facts, write_table
    from tokamake.runtime.console import counted
    from tokamake.train.objectives.retro.chunks import first_chunks

    if chunk_length < 1:
        raise UserError(f"--chunk-length: {chunk_length}: give 1 or more")
    opened = open_tokenizer(tokenizer)
    dataset = IndexedDataset(prefix)
    check_sentences(prefix, objective="retro")
    check_tokenizer(prefix, opened)
    facts = table_facts(prefix, chunk_length=chunk_length, eod=opened.eod)
    if is_written(output, facts):
        print(f"{output}: already complete")
        return
    table = first_chunks(dataset, chunk_length=chunk_length, eod=opened.eod)
    write_table(output, table, facts=facts)
    documents = counted(len(table) - 1, "document")
    print(f"{output}: {int(table[-1]):,} chunks of {documents}")
