"""Stage `embed-questions`: vectors of questions, by the tower of queries."""

from pathlib import Path


def embed_questions(
    questions: Path,
    /,
    *,
    checkpoint: Path,
    output: Path,
    tokenizer: Path | None = None,
    sequence_length: int | None = None,
    batch_size: int = 64,
) -> None:
    """Embed the questions of a file to a shard of embeddings; ids count them from 0.

    Args:
        questions: tsv file with rows question<TAB>["answer", "other answer"], or jsonl file with
            objects with `question` and `answers`.
        checkpoint: folder of a biencoder in any format, or of a run, whose newest one counts.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        sequence_length: most tokens of a question; by default as in the training of the model, else
            as many as it sees.
        batch_size: questions per forward pass of a rank.
    """
    from tokamake import files
    from tokamake.inference.layout import peers
    from tokamake.retrieval.products import check_name
    from tokamake.retrieval.questions import read_questions
    from tokamake.retrieval.text_vectors import Embedder

    check_name(output)
    with peers() as ranks:
        embedder = Embedder(
            checkpoint,
            "query",
            tokenizer=tokenizer,
            sequence_length=sequence_length,
            batch_size=batch_size,
            peers=ranks,
        )
        with ranks.together():
            asked = read_questions(questions)
            made_from = {"questions": files.sha256(questions)}
        texts = (embedder.tokenized(row, each.text) for row, each in enumerate(asked))
        embedder.write(texts, manifest=output, made_from=made_from)
