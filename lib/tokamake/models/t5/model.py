"""T5 as Megatron has it (objective of arXiv 1910.10683): an encoder-decoder with LayerNorm before
attention and MLP, learned absolute positions, one embedding for both stacks and the output layer.

The original T5 has RMSNorm, relative positions and a gated MLP: it is another model, `hf_t5`. The
output layer is the embedding with a bias per token of the vocabulary.
Shape suffixes: B batch, L tokens, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor, nn

from tokamake.config.architecture import Architecture
from tokamake.models.common.encoder_decoder import EncoderDecoder
from tokamake.parallel.axis import part
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.parallel.placement import Placement

STACKS = "encoder_decoder"

SETTINGS = {
    "position_embedding": ("learned",),
    "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": (True,),
    "num_decoder_layers": 0,
}
"""Its own: num_decoder_layers is the number of layers of the decoder, 0 for as many as the encoder
has, which num_hidden_layers counts. Megatron's hidden_act is gelu_new, unless bias_gelu_fusion is
off."""


class VocabularyBias(nn.Module):
    """A bias of the logits, of this rank's part of the vocabulary."""

    def __init__(self, architecture: Architecture, mesh: Mesh = SINGLE_RANK) -> None:
        super().__init__()
        assert architecture.vocab_size is not None
        self.bias = nn.Parameter(torch.zeros(len(part(architecture.vocab_size, mesh.tensor))))
        if mesh.tensor.size > 1:
            self.placements = {"bias": Placement(0)}

    def forward(self, logits: Tensor) -> Tensor:
        """Add the bias in place."""
        return logits.add_(self.bias)


INTERMEDIATE_SIZE = (4, 1, 1)


class Model(EncoderDecoder):
    """A T5; layers of its stacks have the names of Hugging Face's Llama, see `tensor_name`."""

    def add_output(self) -> None:
        super().add_output()
        self.head = VocabularyBias(self.architecture, self.mesh)

    def output_logits(self, x_BMD: Tensor) -> Tensor:
        logits: Tensor = self.head(super().output_logits(x_BMD))
        return logits
