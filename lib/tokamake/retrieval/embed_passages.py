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
    byte_range: str = "",
    options: EmbeddingOptions = DEFAULTS,
) -> None:
    """Embed the passages of files to a shard of embeddings.

    A passage is [CLS] title [SEP] text [SEP], as a block of the objective ict. Several ranks share
    the passages: `torchrun --nproc-per-node 4 -m tokamake embed-passages …`. With the same
    number of threads per rank (OMP_NUM_THREADS), any number of ranks writes the same bytes; other
    numbers of threads round sums in another order.

    Args:
        passages: tsv files with the header id, text, title, or jsonl files with these keys; plain
            or compressed (gz, zst, xz, bz2).
        checkpoint: folder of a biencoder in any format, or of a run, whose newest one counts.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        byte_range: START:END in bytes of a single file that is not compressed: passages whose line
            begins in it; END may be empty. The vectors do not depend on the ranges if each begins
            at a multiple of 4,194,304.
        options: how the model reads texts.
    """
    from tokamake.data.readers import parse_range
    from tokamake.retrieval.evidence import check_evidence, evidence_facts, read_evidence
    from tokamake.retrieval.rows import WHOLE, check_byte_range
    from tokamake.retrieval.text_vectors import opened_embedder

    with opened_embedder(
        checkpoint, "block", tokenizer=tokenizer, options=options, output=output
    ) as embedder:
        with embedder.peers.together():
            chosen = parse_range(byte_range, passages) or WHOLE
            check_byte_range(passages[0], chosen)
            check_evidence(passages, chosen)
            made_from = evidence_facts(passages, chosen)
        texts = (
            embedder.tokenized(each.id, each.text, title=each.title, window=each.window)
            for each in read_evidence(passages, chosen)
        )
        embedder.write(texts, manifest=output, made_from=made_from)
