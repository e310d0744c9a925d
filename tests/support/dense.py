"""Tiny causal models of awkward shapes, and transformers' models of the same shapes."""

from collections.abc import Mapping
from typing import Any

import torch

from tests.support.random_tensors import randomized
from tokamake.config.architecture import Architecture


def dense(family: str, **values: Any) -> Architecture:
    """A shape with 6 heads of width 12, wider together than the residual stream, in 3 groups."""
    shape = {
        "vocab_size": 131,
        "hidden_size": 60,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "rope_theta": 5000.0,
    }
    return Architecture(family=family, **(shape | values))


def neox(**values: Any) -> Architecture:
    """A gpt_neox: each of its heads has keys and values, and all are as wide as the stream."""
    shape = {"num_key_value_heads": 6, "head_dim": None, "layer_norm_epsilon": 1e-3}
    return dense("gpt_neox", **(shape | {"partial_rotary_factor": 0.2} | values))


TIED: dict[str, Any] = {"tie_word_embeddings": True, "vocab_size": 128, "num_key_value_heads": 1}
EVEN: dict[str, Any] = {"head_dim": None, "num_key_value_heads": 6, "rms_norm_eps": 1e-3}


FEW_EXPERTS: dict[str, Any] = {"num_experts": 7, "num_experts_per_tok": 3}
SHARED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 20,
    "num_experts": 9,
    "num_experts_per_tok": 5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def latent(family: str = "deepseek_v3", **values: Any) -> Architecture:
    """A shape with latent attention; values are narrower than keys, the first layer is dense."""
    shape: dict[str, Any] = {
        "head_dim": None,
        "num_key_value_heads": None,
        "num_attention_heads": 6,
        "q_lora_rank": 18,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        **SHARED_EXPERTS,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
    }
    return dense(family, **(shape | values))


def oss(**values: Any) -> Architecture:
    """A gpt_oss whose clamps act on small random weights."""
    shape = {**FEW_EXPERTS, "intermediate_size": 20, "sliding_window": 7, "swiglu_limit": 0.5}
    return dense("gpt_oss", **(shape | values))


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.2, 3.0],
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA: dict[str, Any] = {"sliding_window": 9, "query_pre_attn_scalar": 20.0}

ARCHITECTURES = {
    "mistral": dense("mistral"),
    "mistral-tied": dense("mistral", **TIED),
    "mistral-even": dense("mistral", **EVEN),
    "mistral-window": dense("mistral", sliding_window=7),
    "qwen2": dense("qwen2"),
    "qwen2-tied": dense("qwen2", **TIED),
    "qwen2-even": dense("qwen2", **EVEN),
    "smollm3": dense("smollm3", no_rope_layer_interval=2, tie_word_embeddings=False),
    "smollm3-tied": dense("smollm3", no_rope_layer_interval=3, mlp_bias=True, **TIED),
    "smollm3-biased": dense("smollm3", num_hidden_layers=4, attention_bias=True),
    "smollm3-rotated": dense("smollm3", no_rope_layer_interval=0, num_hidden_layers=4, **EVEN),
    "olmo2": dense("olmo2"),
    "olmo2-tied": dense("olmo2", **TIED),
    "olmo2-biased": dense("olmo2", attention_bias=True, **EVEN),
    "phi3": dense("phi3", partial_rotary_factor=0.75, head_dim=16),
    "phi3-tied": dense("phi3", **TIED),
    "phi3-longrope": dense("phi3", rope_scaling=LONGROPE, partial_rotary_factor=0.4, **EVEN),
    "phi3-window": dense("phi3", sliding_window=12, partial_rotary_factor=0.5),
    "olmo3": dense("olmo3", sliding_window=7, full_attention_interval=2, rope_scaling=YARN),
    "olmo3-tied": dense("olmo3", sliding_window=12, full_attention_interval=3, **TIED),
    "olmo3-usual": dense("olmo3", num_hidden_layers=5, attention_bias=True, **EVEN),
    "gemma2": dense("gemma2", tie_word_embeddings=False, **GEMMA),
    "gemma2-tied": dense("gemma2", sliding_window=5, attn_logit_softcapping=2.0, **TIED),
    "gemma2-uncapped": dense(
        "gemma2",
        attn_logit_softcapping=0.0,
        final_logit_softcapping=0.0,
        full_attention_interval=3,
        num_hidden_layers=4,
        attention_bias=True,
        **GEMMA | EVEN,
    ),
    "gemma3": dense("gemma3", full_attention_interval=2, tie_word_embeddings=False, **GEMMA),
    "gemma3-tied": dense(
        "gemma3",
        full_attention_interval=3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        local_rope_theta=700.0,
        **GEMMA | TIED,
    ),
    "gemma3-capped": dense(
        "gemma3", num_hidden_layers=7, final_logit_softcapping=3.0, attention_bias=True, **EVEN
    ),
    "mixtral": dense("mixtral", intermediate_size=20, num_experts=5, sliding_window=9),
    "mixtral-tied": dense("mixtral", num_experts=3, num_experts_per_tok=1, **TIED),
    "qwen3_moe": dense("qwen3_moe", **FEW_EXPERTS, moe_intermediate_size=20),
    "qwen3_moe-raw": dense(
        "qwen3_moe", **FEW_EXPERTS, moe_intermediate_size=20, norm_topk_prob=False, **TIED
    ),
    "olmoe": dense("olmoe", **FEW_EXPERTS, head_dim=None),
    "olmoe-scaled": dense("olmoe", **FEW_EXPERTS, norm_topk_prob=True, attention_bias=True, **EVEN),
    "deepseek_v2": latent("deepseek_v2"),
    "deepseek_v2-greedy": latent(
        "deepseek_v2",
        num_experts=6,
        n_group=1,
        topk_group=1,
        q_lora_rank=0,
        attention_bias=True,
        routed_scaling_factor=1.5,
        rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        tie_word_embeddings=True,
        vocab_size=128,
    ),
    "deepseek_v3": latent(),
    "deepseek_v3-plain": latent(
        q_lora_rank=0,
        v_head_dim=20,
        rope_interleave=False,
        norm_topk_prob=False,
        n_shared_experts=1,
    ),
    "deepseek_v3-yarn": latent(
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "glm4_moe": dense("glm4_moe", use_qk_norm=True, **SHARED_EXPERTS | {"num_experts": 6}),
    "glm4_moe-biased": dense(
        "glm4_moe",
        qkv_bias=True,
        partial_rotary_factor=0.35,
        routed_scaling_factor=1.5,
        **SHARED_EXPERTS | TIED | {"n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    ),
    "gpt_oss": oss(),
    "gpt_oss-tied": oss(
        sliding_window=11,
        full_attention_interval=3,
        rope_scaling=YARN | {"truncate": False},
        swiglu_alpha=1.2,
        swiglu_limit=0.3,
        num_experts_per_tok=2,
        **TIED,
    ),
    "gpt_oss-unbiased": oss(
        attention_bias=False, full_attention_interval=0, num_hidden_layers=2, head_dim=14
    ),
    "gpt_neox": neox(),
    "gpt_neox-tied": neox(tie_word_embeddings=True, hidden_act="gelu_new"),
    "gpt_neox-serial": neox(use_parallel_residual=False, partial_rotary_factor=0.4),
    "gpt_neox-whole": neox(partial_rotary_factor=1.0, attention_bias=False),
}


SPREAD: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_group": 3, "num_experts_per_tok": 4},
    "deepseek_v3": {"num_nextn_predict_layers": 2},
    "glm4_moe": {"num_nextn_predict_layers": 1, "num_key_value_heads": 2, "qkv_bias": True},
    "gpt_oss": {"num_key_value_heads": 2, "full_attention_interval": 2},
}
"""Changes of shapes that two tensor-parallel, pipeline and expert-parallel ranks can divide."""


def spread(family: str) -> Architecture:
    """A shape of `SPREAD` with all that Megatron can express."""
    changes = {"num_hidden_layers": 4, "num_experts": 12, "rms_norm_eps": 1e-6}
    return Architecture(**{**ARCHITECTURES[family].model_dump(), **changes, **SPREAD[family]})


def shared(family: str) -> dict[str, Architecture]:
    """Shapes that two or four ranks can divide."""
    even: dict[str, Any] = {"num_attention_heads": 4, "vocab_size": 132}
    if family in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss"):
        even |= FEW_EXPERTS
    if family == "qwen3_moe":
        even |= {"moe_intermediate_size": 20}
    if family.startswith("deepseek"):
        even |= {"num_key_value_heads": None}
        tied = {"tie_word_embeddings": True, "vocab_size": 128, "q_lora_rank": 0}
        return {"untied": latent(family, **even), "tied": latent(family, **even | tied)}
    if family == "glm4_moe":
        even |= SHARED_EXPERTS | {"num_key_value_heads": 2}
        tied = {"tie_word_embeddings": True, "vocab_size": 128, "use_qk_norm": True}
        return {"untied": dense(family, **even), "tied": dense(family, **even | tied)}
    if family == "gpt_neox":
        even |= {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}
        serial = {"use_parallel_residual": False, "tie_word_embeddings": True}
        return {"parallel": dense(family, **even), "serial": dense(family, **even, **serial)}
    # Windows, clamps and caps that act on short samples of random weights.
    acting = {"sliding_window": 5, "full_attention_interval": 2, "swiglu_limit": 0.5}
    acting |= {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5}
    own = dense(family).model_extra or {}
    even |= {name: value for name, value in acting.items() if name in own}
    return {
        "untied": dense(family, **{"tie_word_embeddings": False, "num_key_value_heads": 2} | even),
        "tied": dense(family, **TIED | even),
    }


FAMILIES = sorted({each.family for each in ARCHITECTURES.values()})


def _own_keys(architecture: Architecture) -> dict[str, Any]:
    """Keys of transformers' config that have other names or defaults than our fields."""
    keys: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    own = architecture.model_extra or {}
    if "sliding_window" in own:
        keys["sliding_window"] = own["sliding_window"] or None
    if "full_attention_interval" in own:
        interval, layers = own["full_attention_interval"], range(architecture.num_hidden_layers)
        is_full = [interval > 0 and n % interval == interval - 1 for n in layers]
        kinds = ["full" if each else "sliding" for each in is_full]
        keys["layer_types"] = [f"{kind}_attention" for kind in kinds]
    if architecture.family.startswith("gemma"):
        keys["hidden_activation"] = architecture.hidden_act
        keys["query_pre_attn_scalar"] = int(own["query_pre_attn_scalar"])
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            keys[name] = own.get(name) or None
    if architecture.family == "phi3" and (scaling := architecture.rope_scaling):
        keys["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if architecture.family == "smollm3":
        interval = architecture.setting("no_rope_layer_interval")
        layers = range(architecture.num_hidden_layers)
        rotating = [int(not interval or layer % interval != interval - 1) for layer in layers]
        keys["no_rope_layers"] = None if interval == 4 else rotating
    if architecture.family == "gpt_neox":
        keys["use_parallel_residual"] = architecture.setting("use_parallel_residual")
        keys["layer_norm_eps"] = architecture.layer_norm_epsilon
    elif "kv_lora_rank" in own:
        keys["q_lora_rank"] = own["q_lora_rank"] or None
    elif architecture.family != "olmoe":
        keys["head_dim"] = architecture.head_dim
    if "qkv_bias" in own:
        keys["attention_bias"] = own["qkv_bias"]
    if architecture.family == "deepseek_v2":
        keys["topk_method"] = "greedy" if own["n_group"] == 1 else "group_limited_greedy"
    if architecture.has_routers:
        name = "num_experts" if architecture.family == "olmoe" else "num_local_experts"
        name = "n_routed_experts" if "n_shared_experts" in own else name
        keys[name] = architecture.setting("num_experts")
    return keys


SAME_KEYS = {
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave"),
    *("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "use_qk_norm"),
    *("routed_scaling_factor", "swiglu_alpha", "swiglu_limit"),
}
"""Settings of families with shared experts that transformers' config has, too."""


def reference(architecture: Architecture) -> Any:
    """transformers' model with random weights, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    own = {*(architecture.model_extra or {}), "family", "rope_theta", "rope_scaling", "head_dim"}
    own -= {"moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob"}
    own -= SAME_KEYS
    if architecture.family in ("mixtral", "gpt_oss"):
        own |= {"norm_topk_prob"}
    values = architecture.model_dump(exclude=own)
    rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
    if architecture.rope_scaling:
        rope |= architecture.rope_scaling.model_dump(mode="json", exclude_none=True)
    if share := (architecture.model_extra or {}).get("partial_rotary_factor"):
        rope["partial_rotary_factor"] = share
    if local := (architecture.model_extra or {}).get("local_rope_theta"):
        of_windows = {"rope_type": "default", "rope_theta": local}
        rope = {"full_attention": rope, "sliding_attention": of_windows}
    values |= {"rope_parameters": rope, **_own_keys(architecture)}
    kind = "gemma3_text" if architecture.family == "gemma3" else architecture.family
    config = AutoConfig.for_model(kind, **values)
    return randomized(AutoModelForCausalLM.from_config(config))


def tensors_of(model: Any) -> dict[str, Any]:
    """Parameters of a reference, and biases of its routers."""
    biases = {n: each for n, each in model.named_buffers() if n.endswith("correction_bias")}
    return {**dict(model.named_parameters()), **biases}


def as_stored(architecture: Architecture, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A reference's parameters, or values of them, by their names in files."""
    renamed = {"lm_head.weight": "embed_out.weight"} if architecture.family == "gpt_neox" else {}
    stored = {renamed.get(name, name): each for name, each in tensors.items()}
    if architecture.family == "gpt_oss":
        return _by_projection(stored)
    if not architecture.has_routers:
        return stored
    names = ("w1", "w3", "w2") if architecture.family == "mixtral" else PROJECTIONS
    for name in [*stored]:
        block, _, kind = name.partition(".mlp.")
        if architecture.family == "mixtral" and kind:
            block += ".block_sparse_moe"
            stored[f"{block}.{kind}"] = stored.pop(name)
        elif kind:
            block += ".mlp"
        if kind == "experts.gate_up_proj":
            stacks = dict(zip(names, stored.pop(f"{block}.{kind}").chunk(2, 1), strict=False))
        elif kind == "experts.down_proj":
            stacks = {names[2]: stored.pop(f"{block}.{kind}")}
        else:
            continue
        for each, stack in stacks.items():
            for number, matrix in enumerate(stack):
                stored[f"{block}.experts.{number}.{each}.weight"] = matrix
    return stored


def _by_projection(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a gpt-oss with a tensor for each kind of projection, (experts, outputs, ...)."""
    found = {}
    for name, tensor in stored.items():
        block, experts, kind = name.partition(".experts.")
        if not experts:
            found[name] = tensor
            continue
        end = "bias" if kind.endswith("_bias") else "weight"
        outputs_last = tensor if end == "bias" else tensor.mT
        if kind.startswith("down"):
            found[f"{block}.experts.down_proj.{end}"] = outputs_last
            continue
        found[f"{block}.experts.gate_proj.{end}"] = outputs_last[:, ::2]
        found[f"{block}.experts.up_proj.{end}"] = outputs_last[:, 1::2]
    return found
