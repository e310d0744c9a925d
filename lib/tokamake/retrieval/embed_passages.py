"""Stage `embed-passages`: vectors of passages of files, by the tower of blocks."""

from pathlib import Path

from tokamake.retrieval.embedding_options import DEFAULTS, EmbeddingOptions


def embed_passages(
    passages: list[Path],
    /,
    *,
    checkpoint: Path,
    output: Path,
    tokenizer: Path | None = None,
    options: EmbeddingOptions = DEFAULTS,
) -> None:
    """Embed the passages of files to a shard of embeddings.

    A passage is [CLS] title [SEP] text [SEP], as a block of the objective ict. Several ranks share
    the passages: `torchrun --nproc-per-node 4 -m tokamake embed-passages …`. With the same
    number of threads per rank (OMP_NUM_THREADS), any number of ranks writes the same bytes; other
    numbers of threads round sums in another order.

    Args:
        passages: tsv files with the header id, text, title, or jsonl files with these keys.
        checkpoint: folder of a biencoder in any format, or of a run, whose newest one counts.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        options: how the model reads texts.
    """
    from tokamake import files
    from tokamake.retrieval.evidence import check_evidence, read_evidence
    from tokamake.retrieval.text_vectors import opened_embedder

    with opened_embedder(
        checkpoint, "block", tokenizer=tokenizer, options=options, output=output
    ) as embedder:
        with embedder.peers.together():
            check_evidence(passages)
            made_from = {"passages": [files.sha256(path) for path in passages]}
        texts = (
            embedder.tokenized(passage.id, passage.text, title=passage.title)
            for passage in read_evidence(passages)
        )
        embedder.write(texts, manifest=output, made_from=made_from)
