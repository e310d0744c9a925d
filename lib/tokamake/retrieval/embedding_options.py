"""Options of the commands that embed texts."""

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter


@Parameter(name="*")
@dataclass(frozen=True)
class EmbeddingOptions:
    """How a biencoder reads texts."""

    sequence_length: int | None = None
    """Most tokens of a text; by default as in the training of the model, else its longest input."""
    batch_size: int = 64
    """Texts per forward pass of a rank."""


@Parameter(name="*")
@dataclass(frozen=True)
class ChunkEmbedding:
    """The model that embeds chunks, and the tokenizer of the chunks."""

    checkpoint: Path
    """Folder of a BERT or a biencoder in any format, or of a run, whose newest one counts."""
    tokenizer: Path
    """Tokenizer of the dataset."""
    checkpoint_tokenizer: Path | None = None
    """Tokenizer of the model; by default the one beside its weights, or in its run.yaml."""
    batch_size: int = 64
    """Chunks per forward pass of a rank."""


DEFAULTS = EmbeddingOptions()
