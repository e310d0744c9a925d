"""Shape of a model, as files of config/models have it.

What families differ in, their files in lib/tokamake/models say: `CHOICES`.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokamake import plugins
from tokamake.config.fields import Settings, plug_in
from tokamake.errors import UserError
from tokamake.validation import read_yaml, validate

Positive = Annotated[float, Field(gt=0)]

SCALING = {
    "linear": (set(), set()),
    "llama3": (
        {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
        set(),
    ),
    "yarn": (
        {"original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}
"""What each `rope_type` needs beside its factor, and what it takes."""


class RopeScaling(Settings):
    """Rotary positions stretched beyond those that a model was first trained on."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """All frequencies alike (arXiv 2306.15595); the low ones, as Llama 3.1 (arXiv 2407.21783); or
    YaRN (arXiv 2309.00071)."""
    factor: Annotated[float, Field(ge=1)]
    """How many times longer sequences get."""
    original_max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    """Of llama3 and yarn: longest sequence of the first training."""
    low_freq_factor: Positive | None = None
    """Of llama3: frequencies that turn less often in such a sequence are stretched fully."""
    high_freq_factor: Positive | None = None
    """Of llama3: frequencies that turn more often are left as they are."""
    beta_fast: Positive | None = None
    """Of yarn: frequencies that turn more often are left as they are; empty: 32."""
    beta_slow: Positive | None = None
    """Of yarn: frequencies that turn less often are stretched fully; empty: 1."""
    attention_factor: Positive | None = None
    """Of yarn: what cosines and sines are multiplied by; empty: 0.1 ln factor + 1."""
    mscale: float | None = None
    """Of yarn: multiplies 0.1 ln factor in that formula."""
    mscale_all_dim: float | None = None
    """Of yarn: by that formula with this in place of mscale, its result is divided."""
    truncate: bool | None = None
    """Of yarn: let whole pairs of dimensions bound the stretched frequencies; empty: true."""

    @model_validator(mode="after")
    def _fit_type(self) -> "RopeScaling":
        needed, taken = SCALING[self.rope_type]
        given = self.model_dump(exclude_none=True).keys() - {"rope_type", "factor"}
        if missing := sorted(needed - given):
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}; add it")
        if useless := sorted(given - needed - taken):
            raise ValueError(
                f"rope_type {self.rope_type} has no use for {', '.join(useless)}; leave it out"
            )
        if needed and (self.high_freq_factor or math.inf) <= (self.low_freq_factor or 0.0):
            raise ValueError("high_freq_factor is not greater than low_freq_factor")
        return self


class Architecture(Settings):
    """Shape of a model, in Hugging Face's terms."""

    family: Annotated[str, plug_in("models/*/model")] = "llama"
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
    position_embedding: Literal["rotary", "learned", "alibi"] = "rotary"
    """How a token's position comes in: llama has rotary; gpt learned, unless told otherwise."""
    rope_theta: Positive = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """Rotary positions for longer sequences; empty: as they are."""
    hidden_act: Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"] = "silu"
    """Activation of the MLP: llama has silu, gating; gpt gelu_new, which gelu_pytorch_tanh is, too,
    the approximation by tanh; gelu is the exact one."""
    attention_bias: bool = False
    """Biases of attention's projections; gpt has them unless told otherwise."""
    mlp_bias: bool = False
    """Biases of the MLP's projections; gpt has them unless told otherwise."""
    rms_norm_eps: Positive = 1e-5
    """Added to the mean square in RMSNorm, llama's norm."""
    layer_norm_epsilon: Positive = 1e-5
    """Added to the variance in LayerNorm, gpt's norm."""
    embedding_layernorm: bool = False
    """Norm the embeddings of tokens, as Bloom; gpt alone."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output layer; gpt does unless told otherwise."""
    initializer_range: Positive = 0.02
    """Standard deviation of random weights."""

    @model_validator(mode="before")
    @classmethod
    def _as_family(cls, values: Any) -> Any:
        """Fill in what the family has unless told otherwise."""
        if not isinstance(values, dict) or values.get("family", "llama") not in plugins.names(
            "models/*/model"
        ):
            return values
        usual = {name: options[0] for name, options in _choices(values).items()}
        return usual | values

    @model_validator(mode="after")
    def _covered(self) -> "Architecture":
        """Refuse what the family has not."""
        for name, options in _choices({"family": self.family}).items():
            if (value := getattr(self, name)) not in options:
                some = " or ".join(map(str, options))
                raise ValueError(f"{name}: {value!r}: {self.family} has {some} only")
        return self

    @model_validator(mode="after")
    def _positions(self) -> "Architecture":
        if self.position_embedding == "rotary":
            if self.hidden_size % self.num_attention_heads == 0 and self.head_dim % 2:
                raise ValueError("hidden_size / num_attention_heads is odd; rotary needs pairs")
        elif self.rope_theta != 10000.0 or self.rope_scaling is not None:
            raise ValueError(
                "rope_theta and rope_scaling are of position_embedding rotary, not "
                f"{self.position_embedding}; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _whole_heads(self) -> "Architecture":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is not a multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def check_context_parallel(self, size: int) -> None:
        """See that so many ranks can share a sequence.

        Raises:
            UserError: they cannot.
        """
        if size > 1 and self.position_embedding == "alibi":
            raise UserError(
                f"train.parallel.context_parallel_size: {size}: a bias of attention, as "
                "position_embedding alibi is, does not go over ranks that share a sequence; set 1"
            )


def _choices(values: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What a family has of settings that families differ in, the usual value first."""
    choices: dict[str, tuple[Any, ...]] = plugins.constant(
        "models/*/model", values.get("family", "llama"), "CHOICES"
    )
    return choices


def read_architecture(path: Path) -> Architecture:
    """Read one file of config/models."""
    value = read_yaml(path, "fix model.architecture or choose a file of config/models")
    return validate(Architecture, value, str(path))
