"""Arguments of Megatron-LM for models of megatron.core, by case."""

import datetime
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

ROWS = 256
"""Of the embedding."""
_LLAMA = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False}
_GPT = {"swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True}
_ROPE = {"position_embedding_type": "rope", "rotary_base": 5000}
_EXPERTS = {"num_experts": 4, "moe_router_topk": 3}
_SHARED: dict[str, Any] = {
    **_EXPERTS,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 48,
    "moe_layer_freq": [0, 1, 1, 1],
}
_BALANCED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "mtp_num_layers": 1,
}
LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "norm_epsilon": 1e-6,
}
YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, **_ROPE, "num_query_groups": 2, "vocab_size": 131},
    "llama3": {**_LLAMA, **_ROPE, "use_rope_scaling": True, "rope_scaling_factor": 4.0},
    "llama-wide-heads": {**_LLAMA, **_ROPE, "num_query_groups": 2, "kv_channels": 24},
    "llama-tied": {
        **_LLAMA,
        **_ROPE,
        "rotary_seq_len_interpolation_factor": 2,
        "untie_embeddings_and_output_weights": False,
    },
    "qwen3": {
        **_LLAMA,
        **_ROPE,
        "num_query_groups": 2,
        "kv_channels": 24,
        "qk_layernorm": True,
        "vocab_size": 131,
    },
    "qwen2": {**_LLAMA, **_ROPE, "num_query_groups": 2, "add_qkv_bias": True},
    "mistral": {**_LLAMA, **_ROPE, "window_size": (5, 0)},
    "phi3": {**_LLAMA, **_ROPE, "rotary_percent": 0.5},
    "smollm3": {**_LLAMA, **_ROPE, "no_rope_freq": 2},
    "mixtral": {**_LLAMA, **_ROPE, **_EXPERTS, "num_query_groups": 2, "window_size": (5, 0)},
    "qwen3_moe": {
        **_LLAMA,
        **_ROPE,
        **_EXPERTS,
        "qk_layernorm": True,
        "moe_ffn_hidden_size": 24,
        "moe_router_pre_softmax": True,
        "vocab_size": 131,
    },
    "deepseek_v2": {
        **_LLAMA,
        **_ROPE,
        **_SHARED,
        **LATENT,
        **YARN,
        "mscale_all_dim": 0.0,
        "q_lora_rank": None,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 2,
        "moe_router_topk": 2,
    },
    "deepseek_v3": {**_LLAMA, **_ROPE, **_SHARED, **LATENT, **YARN, **_BALANCED},
    "glm4_moe": {
        **_LLAMA,
        **_ROPE,
        **_SHARED,
        **_BALANCED,
        "num_query_groups": 2,
        "rotary_percent": 0.5,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "num_experts": 6,
        "moe_router_topk": 4,
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 2,
    },
    "gpt_oss": {
        **_GPT,
        **_ROPE,
        **_EXPERTS,
        "normalization": "RMSNorm",
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.8,
        "softmax_type": "learnable",
        "num_query_groups": 2,
        "window_size": (5, 0),
        "window_attn_skip_freq": 2,
    },
    "gpt": {**_GPT, "position_embedding_type": "learned_absolute", "bias_gelu_fusion": True},
    "gpt-exact": {**_GPT, **_ROPE, "bias_gelu_fusion": False, "num_query_groups": 1},
    "gpt-bare": {**_GPT, **_ROPE, "add_bias_linear": False, "openai_gelu": True},
}
"""Arguments of Megatron-LM that differ from `arguments`."""
_BERT = {
    **_GPT,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "vocab_size": 131,
}
BERTS: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "bert_binary_head": True},
    "bert-fused": {**_BERT, "bert_binary_head": True, "bias_gelu_fusion": True},
    "bert-without-order": {**_BERT, "bert_binary_head": False},
}
"""The same of BERTs."""
T5S: dict[str, dict[str, Any]] = {
    "t5": {**_BERT, "decoder_num_layers": 3},
    "t5-fused": {**_BERT, "decoder_num_layers": 4, "bias_gelu_fusion": True},
}
"""The same of T5s."""
OF_ALL = CASES | BERTS | T5S
GROUPED: dict[str, dict[str, Any]] = {
    "mixtral-grouped": {**CASES["mixtral"], "moe_grouped_gemm": True},
}
"""GPTs with the experts of a layer in two matrices, which need a GPU to compute."""
ALL = OF_ALL | GROUPED


def arguments(name: str) -> Namespace:
    """Arguments of a case, with what else a checkpoint of Megatron-LM has in them."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    usual = {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": None,
        "kv_channels": 16,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        "max_position_embeddings": 32,
        "norm_epsilon": 1e-3,
        "rotary_percent": 1.0,
        "no_rope_freq": None,
        "window_size": None,
        "rotary_interleaved": False,
        "rotary_base": 10000,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
        "bias_gelu_fusion": False,
        "untie_embeddings_and_output_weights": True,
        "softmax_type": "vanilla",
        "num_experts": None,
        "moe_ffn_hidden_size": None,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_grouped_gemm": False,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
        "moe_router_enable_expert_bias": False,
        "mtp_num_layers": None,
        "multi_latent_attention": False,
        "quick_geglu": False,
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
        "window_attn_skip_freq": None,
        "expert_model_parallel_size": 1,
        "padded_vocab_size": ROWS,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "consumed_train_samples": 70,
        "attention_backend": AttnBackend.auto,
        "model_type": ModelType.encoder_or_decoder,
        "exit_signal": signal.SIGTERM,
        "timeout": datetime.timedelta(minutes=10),
        "params_dtype": torch.float32,
        "device": torch.device("cuda", 0),
        "save": Path("checkpoints"),
    }
    args = Namespace(**{**usual, **ALL[name]})
    args.group_query_attention = args.num_query_groups is not None
    return args
