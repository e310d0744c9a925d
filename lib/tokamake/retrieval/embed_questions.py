"""Stage `embed-questions`: vectors of questions, by the tower of queries."""

from pathlib import Path

from tokamake.retrieval.embedding_options import DEFAULTS, EmbeddingOptions


def embed_questions(
    questions: Path,
    /,
    *,
    checkpoint: Path,
    output: Path,
    tokenizer: Path | None = None,
    options: EmbeddingOptions = DEFAULTS,
) -> None:
    """Embed the questions of a file to a shard of embeddings; ids count them from 0.

    Args:
        questions: tsv file with rows question<TAB>["answer", "other answer"], or jsonl file with
            objects with `question` and `answers`.
        checkpoint: folder of a biencoder in any format, or of a run, whose newest one counts.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        options: how the model reads texts.
    """
    from tokamake import files
    from tokamake.retrieval.questions import read_questions
    from tokamake.retrieval.text_vectors import opened_embedder

    with opened_embedder(
        checkpoint, "query", tokenizer=tokenizer, options=options, output=output
    ) as embedder:
        with embedder.peers.together():
            asked = read_questions(questions)
            made_from = {"questions": files.sha256(questions)}
        texts = (embedder.tokenized(row, each.text) for row, each in enumerate(asked))
        embedder.write(texts, manifest=output, made_from=made_from)
