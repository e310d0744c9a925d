"""How a `deepseek_v3` is stored: its tensors, and transformers' model type deepseek_v3."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import LATENT_KEYS, MTP_KEYS, latent_fields, latent_keys
from tokamake.models.common.hf_format import EXPERT_NAMES, HFFormat, same_keys

shapes = partial(
    tensor_shapes.shapes,
    gated=True,
    biased_norms=False,
    form=tensor_shapes.LayerForm(attention=tensor_shapes.latent_attention),
    of_mlp=partial(tensor_shapes.expert_mlp, balanced=True),
)

# Keys of the hub's files that transformers ignores.
_CHOICE = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

HUGGING_FACE = (
    HFFormat(
        model_type="deepseek_v3",
        class_name="DeepseekV3ForCausalLM",
        keys=LATENT_KEYS | MTP_KEYS | same_keys("rope_interleave"),
        defaults={
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "rope_interleave": True,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
        },
        implied={"position_embedding": "rotary"},
        dropout={"attention_dropout": "attention"},
        supported={key: (value,) for key, value in _CHOICE.items()},
        constants=_CHOICE,
        extra_fields=latent_fields,
        extra_keys=latent_keys,
        names=EXPERT_NAMES,
        has_mtp_layers=True,
    ),
)
