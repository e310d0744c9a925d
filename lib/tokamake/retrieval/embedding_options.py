"""Options of the commands that embed texts."""

from dataclasses import dataclass

from cyclopts import Parameter


@Parameter(name="*")
@dataclass(frozen=True)
class EmbeddingOptions:
    """How a biencoder reads texts."""

    sequence_length: int | None = None
    """Most tokens of a text; by default as in the training of the model, else its longest input."""
    batch_size: int = 64
    """Texts per forward pass of a rank."""


DEFAULTS = EmbeddingOptions()
