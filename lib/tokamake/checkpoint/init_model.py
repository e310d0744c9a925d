"""Stage `init_model`: write a Hugging Face checkpoint with random weights for an architecture."""

from pathlib import Path


def init_model(*, architecture: Path, tokenizer: Path, seed: int, output: Path) -> None:
    """Write a randomly initialized model as a Hugging Face checkpoint in fp32, offline.

    Args:
        architecture: YAML file with the model's shape, e.g. of config/models.
        tokenizer: folder or file of the tokenizer; its vocabulary size is the model's if the
            architecture has no vocab_size.
        seed: seed of the weights.
        output: folder to write.

    Raises:
        UserError: the architecture is invalid, its vocabulary is too small, or there is no
            tokenizer.
    """
    from tokamake.checkpoint import model_tensors
    from tokamake.checkpoint.hf import hf_folder
    from tokamake.config.architecture import read_architecture
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.errors import UserError

    shape = read_architecture(architecture)
    tokenizer_vocab_size = open_tokenizer(tokenizer).vocab_size
    if shape.vocab_size is None:
        shape = shape.model_copy(update={"vocab_size": tokenizer_vocab_size})
    elif shape.vocab_size < tokenizer_vocab_size:
        raise UserError(
            f"{architecture}: vocab_size: {shape.vocab_size} is less than the tokenizer's "
            f"{tokenizer_vocab_size} entries; raise it or leave it out"
        )
    weights = model_tensors.random(shape, seed)
    hf_folder.write(output, shape, weights)
    summary = model_tensors.summary(weights)
    print(f"{output}: {summary}, random with seed {seed}, from {architecture}")
