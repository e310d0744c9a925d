"""How a `llama` is stored: its tensors, and transformers' model type llama."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat, same_keys

shapes = partial(tensor_shapes.shapes, gated=True, biased_norms=False)

_KEYS = GATED_KEYS | same_keys("attention_bias", "mlp_bias")

HUGGING_FACE = (
    HFFormat(
        model_type="llama",
        class_name="LlamaForCausalLM",
        keys=_KEYS,
        defaults={
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
    ),
)

REFUSED = {
    "gemma": "its norms multiply by 1 + w, and its embeddings are scaled",
    "granite": "it scales embeddings, attention scores, residuals and logits",
    "olmo": "its norms have no weights",
    "stablelm": "it has LayerNorms beside gated MLPs",
    "cohere": "it has LayerNorms, and attention and MLP see the same states",
    "arcee": "its MLPs have no gate, and square a ReLU",
    "ernie4_5": "it rotates neighboring numbers of heads",
    "helium": "it rotates neighboring numbers of heads",
    "nemotron": "its LayerNorms multiply by 1 + w, and its MLPs have no gate",
    **dict.fromkeys(("bamba", "nemotron_h"), "some of its layers are Mamba's"),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv"), "it has no attention"),
}
