"""Stage `embed-samples`: vectors of the chunks of samples, which search for neighbors."""

from pathlib import Path


def embed_samples(
    index: Path,
    /,
    *,
    data_root: Path,
    split: str,
    dataset: str,
    checkpoint: Path,
    output: Path,
    tokenizer: Path,
    checkpoint_tokenizer: Path | None = None,
    batch_size: int = 64,
) -> None:
    """Embed the chunks of a split's samples from a dataset, as `embed-chunks` does.

    Ids are place × chunks of a sample + chunk, where the place of a sample counts the ones drawn
    from the dataset before. Ends of documents in a chunk are left out of its text.

    Args:
        index: folder of `index`, with samples of objective retro.
        data_root: folder that the prefixes in the index are relative to.
        split: train, valid or another split of the index.
        dataset: name of the dataset, its prefix without folders.
        checkpoint: folder of a BERT or a biencoder in any format, or of a run, whose newest one
            counts.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
        tokenizer: tokenizer of the dataset.
        checkpoint_tokenizer: tokenizer of the model; by default, the tokenizer beside its weights,
            or the tokenizer that the run.yaml of the checkpoint names.
        batch_size: chunks per forward pass of a rank.
    """
    from tokamake.data.indexed.manifest import check_tokenizer
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.retrieval.chunk_texts import embedded_texts
    from tokamake.retrieval.embedding_options import EmbeddingOptions
    from tokamake.retrieval.text_vectors import opened_embedder
    from tokamake.train.objectives.retro.samples import ChunkedSamples

    with opened_embedder(
        checkpoint,
        "chunk",
        tokenizer=checkpoint_tokenizer,
        options=EmbeddingOptions(batch_size=batch_size),
        output=output,
    ) as embedder:
        with embedder.peers.together():
            opened = open_tokenizer(tokenizer)
            samples = ChunkedSamples(index, split=split, data_root=data_root)
            number = samples.number(dataset)
            made_from = {"decoded_by": opened.fingerprint, "samples": ""}
            if number is not None:
                check_tokenizer(samples.prefixes[number], opened)
                made_from["samples"] = samples.samples_digest(number)
        chunks = () if number is None else samples.chunks(number, eod=opened.eod)
        texts = embedded_texts(chunks, tokenizer=opened, embedder=embedder)
        embedder.write(texts, manifest=output, made_from=made_from)
