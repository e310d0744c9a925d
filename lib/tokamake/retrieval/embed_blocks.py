"""Stage `embed-blocks`: vectors of the blocks of a dataset, by the tower of blocks."""

from pathlib import Path


def embed_blocks(
    prefix: Path,
    /,
    *,
    checkpoint: Path,
    output: Path,
    tokenizer: Path | None = None,
    text: str = "text",
    titles: str = "title",
    sequence_length: int | None = None,
    number: int = 0,
    batch_size: int = 64,
) -> None:
    """Embed the blocks of a dataset of sentences to a shard of embeddings.

    All documents are cut into blocks as the objective ict cuts them; ids count them in order.
    Several ranks share the blocks: `torchrun --nproc-per-node 4 -m tokamake embed-blocks …`. The
    vectors do not depend on the number of ranks.

    Args:
        prefix: dataset of sentences, a path without .bin and .idx.
        checkpoint: folder of a biencoder in any format, or of a run, whose newest one counts.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        text: key of the texts in the dataset's name.
        titles: key of the titles in the name of their dataset; empty: blocks have no titles.
        sequence_length: most tokens of a block; by default as in the training of the model, else
            as many as it sees.
        number: number of this dataset among the ones that are embedded; ids are number × 2^32 +
            block.
        batch_size: blocks per forward pass of a rank.
    """
    from tokamake import files
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import sequence_length_of, tokenizer_of
    from tokamake.data.samples.sentence_masking import special_tokens
    from tokamake.errors import UserError
    from tokamake.inference.layout import peers
    from tokamake.retrieval.dataset_blocks import BLOCK_BITS, open_blocks
    from tokamake.retrieval.products import check_name
    from tokamake.retrieval.text_vectors import TextTower, write_vectors
    from tokamake.runtime.console import counted

    check_name(output)
    if not 0 <= number < 1 << (63 - BLOCK_BITS):
        raise UserError(f"--number: {number}: give 0 to {(1 << (63 - BLOCK_BITS)) - 1}")
    if batch_size < 1:
        raise UserError(f"--batch-size: {batch_size}: give 1 or more")
    with peers() as ranks:
        with ranks.together():
            opened = open_any(checkpoint)
            opened_tokenizer = tokenizer_of(opened, tokenizer)
            tokens = special_tokens(opened_tokenizer, ("cls", "sep"), path=tokenizer or opened.path)
            length = sequence_length_of(opened, sequence_length)
            blocks = open_blocks(prefix, text=text, titles=titles, length=length)
            tower = TextTower(opened, "block", peers=ranks)
        made_from = {
            "dataset": str(prefix),
            "idx": files.sha256(Path(f"{prefix}.idx")),
            "titles": titles,
            "text": text,
            "sequence_length": length,
        }
        num_vectors = write_vectors(
            blocks.texts(tokens, number=number),
            tower,
            manifest=output,
            made_from=made_from,
            batch_size=batch_size,
            is_first=ranks.is_first,
        )
        left_out = ""
        if blocks.num_left_out:
            documents = counted(blocks.num_left_out, "document")
            left_out = f"; {documents} without a block, for a sentence of more than 512 tokens"
        ranks.ranks.print_once(
            f"{output}: {num_vectors:,} vectors of width {tower.dimension}{left_out}"
        )
