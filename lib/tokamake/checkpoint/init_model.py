"""Command `init-model`: write a checkpoint with the random weights of a new model."""

from pathlib import Path


def init_model(*, architecture: Path, tokenizer: Path, seed: int, output: Path) -> None:
    """Write a randomly initialized model and its tokenizer as a Hugging Face checkpoint, offline.

    Weights are fp32. transformers loads the folder, with AutoModelForCausalLM and AutoTokenizer.
    Training from random weights needs no such file: its ranks draw their parts of the same weights.
    This is for other programs, and for conversions. Memory does not grow with the model.

    Args:
        architecture: YAML file with the model's shape, e.g. of config/models.
        tokenizer: folder or file of the tokenizer, whose files are copied; its vocabulary size is
            the model's if the architecture has no vocab_size.
        seed: seed of the weights.
        output: folder to write.
    """
    from dataclasses import replace

    from tokamake.checkpoint import writer
    from tokamake.checkpoint.checkpoint_tokenizer import read_tokenizer
    from tokamake.checkpoint.model_tensors import summary
    from tokamake.checkpoint.random_source import RandomSource, new_architecture
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
    from tokamake.runtime.cores import file_workers

    shape = new_architecture(architecture, tokenizer)
    source = RandomSource(shape, seed)
    start = Checkpoint("hf", architecture, shape, source, notes={"seed": seed})
    tokens, files, _ = read_tokenizer(tokenizer, start)  # further entries are padding
    start = replace(start, notes={**start.notes, **tokens})
    writer.write(output, start, "hf", Target(tokenizer=files), workers=file_workers())
    names = ", ".join(file.name for file in files)
    print(f"{output}: {summary(shape)}, random with seed {seed}, from {architecture}, and {names}")
