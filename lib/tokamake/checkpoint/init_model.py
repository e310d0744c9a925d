"""Stage `init_model`: a model's shape becomes a Hugging Face checkpoint of random weights."""

from pathlib import Path


def init_model(*, architecture: Path, tokenizer: Path, seed: int, output: Path) -> None:
    """Make a randomly initialized model, offline, as a Hugging Face checkpoint in fp32.

    Args:
        architecture: YAML file that gives the model's shape, e.g. of config/models.
        tokenizer: folder or file of the tokenizer; where the architecture gives no vocab_size, the
            model gets the tokenizer's.
        seed: seed of the weights.
        output: folder to write.

    Raises:
        UserError: the file is not a valid architecture, its vocabulary is too small, or there is no
            such tokenizer.
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
    made = model_tensors.random(shape, seed)
    hf_folder.write(output, shape, made)
    print(f"{output}: {model_tensors.summary(made)}, random with seed {seed}, from {architecture}")
