"""Stage `init_model`: a model's shape becomes a Hugging Face checkpoint of random weights."""

from pathlib import Path


def init_model(*, architecture: Path, tokenizer_vocab_size: int, seed: int, output: Path) -> None:
    """Make a randomly initialized model, offline, as a Hugging Face checkpoint in fp32.

    Args:
        architecture: YAML file that gives the model's shape, e.g. of config/models.
        tokenizer_vocab_size: entries of the tokenizer; the model's too where the file has none.
        seed: seed of the weights.
        output: folder to write.

    Raises:
        UserError: the file is not a valid architecture or its vocabulary is too small.
    """
    from tokamake.checkpoint import hugging_face, tensors
    from tokamake.config import read_architecture
    from tokamake.errors import UserError

    shape = read_architecture(architecture)
    if shape.vocab_size is None:
        shape = shape.model_copy(update={"vocab_size": tokenizer_vocab_size})
    elif shape.vocab_size < tokenizer_vocab_size:
        raise UserError(
            f"{architecture}: vocab_size: {shape.vocab_size} is less than the tokenizer's "
            f"{tokenizer_vocab_size} entries; raise it or leave it out"
        )
    made = tensors.random(shape, seed)
    hugging_face.write(output, shape, made)
    print(f"{output}: {tensors.summary(made)}, random with seed {seed}, from {architecture}")
