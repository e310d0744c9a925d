"""Settings of dropout."""

from typing import Annotated

from pydantic import Field

from tokamake.config.fields import Settings


class DropoutSettings(Settings):
    """Rates of dropout while training, 0 by default. Its masks follow from the seed and the numbers
    of samples: they are the same at every layout, with recomputation and after a restart."""

    hidden: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rate of what attention and MLP add to the residual stream."""
    attention: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rate of the weights of attention. Attention is slower then, and its memory grows with the
    square of sequence_length."""
    embedding: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rate of the embedding. Megatron uses its --hidden-dropout here, too."""

    @property
    def rates(self) -> tuple[float, float, float]:
        """Rates of hidden states, weights of attention, and the embedding."""
        return self.hidden, self.attention, self.embedding
