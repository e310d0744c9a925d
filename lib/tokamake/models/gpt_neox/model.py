"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): attention and MLP see the same states.

LayerNorms, an MLP without a gate, biases; rotary positions turn a part of each head.
"""

from tokamake.models.common.decoder import Decoder
from tokamake.models.common.layers import ParallelLayer, TransformerLayer

SETTINGS = {
    "position_embedding": ("rotary",),
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.25,
    "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    "attention_bias": (True, False),
    "mlp_bias": (True,),
    "use_parallel_residual": (True, False),
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": (False, True),
}

INTERMEDIATE_SIZE = (4, 1, 1)


class Model(Decoder):
    """A GPT-NeoX whose parameters have the names of Hugging Face's Llama, see `tensor_name`."""

    def build_layer(self) -> TransformerLayer:
        is_parallel = self.architecture.setting("use_parallel_residual")
        kind = ParallelLayer if is_parallel else TransformerLayer
        return kind(self.build_norm, self.build_attention(), mlp=self.build_mlp())
