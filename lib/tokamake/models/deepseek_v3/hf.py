"""How a `deepseek_v3` is stored: its tensors, and transformers' model type deepseek_v3."""

from functools import partial

from tokamake.models.common import tensor_shapes
from tokamake.models.common.hf_experts import (
    LATENT_DEFAULTS,
    LATENT_KEYS,
    MTP_KEYS,
    expert_format,
    latent_fields,
    latent_keys,
    latent_problem,
)
from tokamake.models.common.hf_format import same_keys

shapes = partial(
    tensor_shapes.expert_shapes,
    form=tensor_shapes.LayerForm(attention=tensor_shapes.latent_attention),
)

# Keys of the hub's files that transformers ignores.
_CHOICE = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

HUGGING_FACE = (
    expert_format(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        keys=LATENT_KEYS | MTP_KEYS | same_keys("rope_interleave"),
        defaults={
            **LATENT_DEFAULTS,
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "max_position_embeddings": 4096,
            "rope_interleave": True,
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
        supported={
            **{key: (value,) for key, value in _CHOICE.items()},
            # transformers takes null for false, not for its default.
            **dict.fromkeys(("norm_topk_prob", "rope_interleave"), (True, False)),
        },
        problem=latent_problem,
        constants=_CHOICE,
        extra_fields=latent_fields,
        extra_keys=latent_keys,
        has_mtp_layers=True,
    ),
)

REFUSED = dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "an indexer chooses tokens to attend to")
