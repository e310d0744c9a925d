"""Stage `embed-blocks`: vectors of the blocks of a dataset, by the tower of blocks."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.retrieval.embedding_options import DEFAULTS, EmbeddingOptions

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint


def embed_blocks(
    prefix: Path,
    /,
    *,
    checkpoint: Path,
    output: Path,
    tokenizer: Path | None = None,
    text: str | None = None,
    titles: str | None = None,
    number: int = 0,
    options: EmbeddingOptions = DEFAULTS,
) -> None:
    """Embed the blocks of a dataset of sentences to a shard of embeddings.

    All documents are cut into blocks as the objective ict cuts them; ids count them in order.
    Several ranks share the blocks: `torchrun --nproc-per-node 4 -m tokamake embed-blocks …`. With
    the same number of threads per rank (OMP_NUM_THREADS), any number of ranks writes the same
    bytes; other numbers of threads round sums in another order.

    Args:
        prefix: dataset of sentences, a path without .bin and .idx.
        checkpoint: folder of a biencoder in any format, or of a run, whose newest one counts.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        text: key of the texts in the dataset's name; by default as in the training of the model,
            else text.
        titles: key of the titles in the name of their dataset; empty: blocks have no titles. By
            default as in the training of the model, else title.
        number: number of this dataset among the ones that are embedded; ids are number × 2^32 +
            block.
        options: how the model reads texts.
    """
    from tokamake import files
    from tokamake.data.indexed.manifest import check_tokenizer
    from tokamake.data.indexed.paths import bin_path, idx_path
    from tokamake.errors import UserError
    from tokamake.retrieval.dataset_blocks import BLOCK_BITS, find_titles, open_blocks
    from tokamake.retrieval.text_vectors import opened_embedder
    from tokamake.runtime.console import counted

    if not 0 <= number < 1 << (63 - BLOCK_BITS):
        raise UserError(f"--number: {number}: give 0 to {(1 << (63 - BLOCK_BITS)) - 1}")
    with opened_embedder(
        checkpoint, "block", tokenizer=tokenizer, options=options, output=output
    ) as embedder:
        ranks = embedder.peers
        with ranks.together():
            text, titles = _keys(embedder.checkpoint, text, titles=titles)
            blocks = open_blocks(prefix, text=text, titles=titles, length=embedder.length)
            check_tokenizer(prefix, embedder.tokenizer)
            made_from = {
                "dataset": str(prefix),
                "idx": files.sha256(idx_path(prefix)),
                "titles": titles,
                "text": text,
            }
            read = [prefix, *([find_titles(prefix, text=text, titles=titles)] if titles else [])]
            paths = [path(each) for each in read for path in (idx_path, bin_path)]
            # Only rank 0 compares them with the shard's.
            hashes = [files.sha256(path) for path in paths if ranks.is_first]
        texts = blocks.texts(embedder.tokens, number=number)
        inputs = {"number": number, "hashes": hashes}
        embedder.write(texts, manifest=output, made_from=made_from, inputs=inputs)
        if blocks.num_left_out:
            documents = counted(blocks.num_left_out, "document")
            ranks.ranks.print_once(
                f"{prefix}: {documents} without a block, for a sentence of more than 512 tokens"
            )


def _keys(checkpoint: "Checkpoint", text: str | None, *, titles: str | None) -> tuple[str, str]:
    """Keys of texts and titles: as given, as in the training of the model, else the defaults."""
    from tokamake.checkpoint.load_model import run_of
    from tokamake.train.objectives.ict.settings import Section

    run = run_of(checkpoint)
    section = getattr(run.train, "ict", None) if run else None
    section = section or Section()
    return section.text if text is None else text, section.titles if titles is None else titles
