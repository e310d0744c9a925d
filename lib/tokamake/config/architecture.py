"""Shape of a model, as files of config/models have it."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from tokamake.config.fields import Settings, plug_in
from tokamake.validation import read_yaml, validate


class Architecture(Settings):
    """Shape of a model, in Hugging Face's terms."""

    family: Annotated[str, plug_in("models")] = "llama"
    """A file name in lib/tokamake/models."""
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Rows of the embedding; empty: the tokenizer's vocabulary size."""
    hidden_size: Annotated[int, Field(ge=1)]
    """Width of the residual stream."""
    intermediate_size: Annotated[int, Field(ge=1)]
    """Width inside the MLP."""
    num_hidden_layers: Annotated[int, Field(ge=1)]
    """Transformer blocks."""
    num_attention_heads: Annotated[int, Field(ge=1)]
    """Query heads."""
    num_key_value_heads: Annotated[int, Field(ge=1)]
    """Key and value heads: as many as query heads for MHA, 1 for MQA."""
    max_position_embeddings: Annotated[int, Field(ge=1)] = 2048
    """Longest sequence the model is meant for."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary position frequencies."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output layer."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of random weights."""

    @model_validator(mode="after")
    def _whole_heads(self) -> "Architecture":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is not a multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
        if self.head_dim % 2:
            raise ValueError("hidden_size / num_attention_heads is odd; rotary needs pairs")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


def read_architecture(path: Path) -> Architecture:
    """Read one file of config/models."""
    value = read_yaml(path, "fix model.architecture or choose a file of config/models")
    return validate(Architecture, value, str(path))
