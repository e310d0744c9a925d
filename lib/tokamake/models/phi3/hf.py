"""How a `phi3` is stored: its tensors, and transformers' model type phi3."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_format import GATED_KEYS, HFFormat
from tokamake.models.common.hf_windows import Windows

shapes = partial(tensor_shapes.shapes, gated=True, biased_norms=False)

HUGGING_FACE = (
    HFFormat(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        keys=GATED_KEYS,
        defaults={
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        implied={"position_embedding": "rotary"},
        dropout={
            "attention_dropout": "attention",
            "embd_pdrop": "embedding",
            "resid_pdrop": "hidden",
        },
        # transformers' default pad_token_id is a token that small vocabularies lack.
        constants={"pad_token_id": None},
        windows=Windows(None),
        rope_types=("default", "longrope"),
        first_length=4096,
        partial_rotary="partial_rotary_factor",
        fused="self_attn.qkv_proj",
        fused_rows="stacked",
        fused_mlp="mlp.gate_up_proj",
    ),
)

REFUSED = {
    "glm": "it rotates neighboring numbers of heads",
    "glm4": "it norms inputs and results, and rotates neighboring numbers of heads",
}
