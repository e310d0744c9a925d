"""Stage `export_hf`: the latest checkpoint of a training run becomes a Hugging Face folder."""

from pathlib import Path


def export_hf(*, checkpoint: Path, tokenizer: Path | None = None, output: Path) -> None:
    """Convert a checkpoint of a training run to Hugging Face's layout, bit by bit.

    Args:
        checkpoint: folder whose file `latest` names the checkpoint inside.
        tokenizer: folder or file of the tokenizer to put beside the weights; its end-of-document
            token becomes the model's end-of-text token.
        output: folder to write.

    Raises:
        UserError: a file is missing or damaged, or the tokenizer is too large for the model.
    """
    from tokamake.checkpoint import hugging_face, latest
    from tokamake.checkpoint import tensors as checkpoint_tensors

    architecture, tensors, iteration = latest.read(checkpoint)
    assert architecture.vocab_size is not None, "a checkpoint has its vocabulary's size"
    eos_token = None if tokenizer is None else _end_token(tokenizer, architecture.vocab_size)
    copies = [] if tokenizer is None else _files(tokenizer)
    hugging_face.write(output, architecture, tensors, eos_token=eos_token, copies=copies)
    summary = checkpoint_tensors.summary(tensors)
    print(f"{output}: {summary}, from {checkpoint} at iteration {iteration}")


def _end_token(tokenizer: Path, vocab_size: int) -> int:
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.errors import UserError

    opened = open_tokenizer(tokenizer)
    if opened.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer}: {opened.vocab_size} entries, but the checkpoint has "
            f"{vocab_size}; give the tokenizer that it was trained with"
        )
    return opened.eod


def _files(tokenizer: Path) -> list[Path]:
    """The tokenizer's own files, and those that tell transformers how to use it."""
    from tokamake.data.tokenizers import tokenizer_files, with_configs

    return sorted(set(with_configs(tokenizer_files(tokenizer)[1])))
