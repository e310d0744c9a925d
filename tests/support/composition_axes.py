"""Axes of random compositions: settings that decide a step, and the values that are drawn.

Families, objectives, tasks, optimizers and back ends are the folders and files that exist; choices
and flags come from the fields of the config. A new plug-in or a new choice joins by itself; a new
number fails `test_each_setting_is_an_axis_or_is_named` until it has values here, or is named.
"""

from functools import cache
from typing import Any, Literal, get_args, get_origin

from tokamake import plugins
from tokamake.config.finetune import FOLDER, TRAIN_SETTINGS, FinetuneTask
from tokamake.config.objective import SECTIONS as OBJECTIVE_SECTIONS
from tokamake.config.parallel import INTERLEAVED, ParallelSettings
from tokamake.config.rope_scaling import SCALING
from tokamake.config.train_fields import TrainFields

KINDS = (
    "data_parallel_size",
    *(f"parallel.{each}_parallel_size" for each in ("tensor", "context", "pipeline")),
)
"""Axes that multiply the ranks."""
MOST_RANKS = 16
"""Ranks of two kinds of parallelism with their largest sizes."""
Values = dict[str, Any]
"""Values of axes by their names, without axes that have their default."""
Axes = dict[str, tuple[Any, ...]]
"""Values of each axis by its name; the first value is the default."""

SIZES: Axes = {
    "data_parallel_size": (1, 2, 4),
    "parallel.tensor_parallel_size": (1, 2, 4),
    "parallel.context_parallel_size": (1, 2, 4),
    "parallel.expert_parallel_size": (1, 2, 4),
    "parallel.pipeline_parallel_size": (1, 2, 4),
    "parallel.virtual_pipeline_size": (1, 2),
    "parallel.data_parallel_replicate_size": (1, 2),
    "parallel.pipeline_layers": ((), "uneven"),
    "micro_batch_size": (2, 1, 3),
    "num_micro_batches": (2, 1, 4),
    "rampup_batch_size": (None, "grows"),
    "gradient_clipping": (0.05, 0.0),
    "recompute_num_layers": (1, 2),
    "dropout.hidden": (0.0, 0.1),
    "dropout.attention": (0.0, 0.1),
    "dropout.embedding": (0.0, 0.1),
    "optimizer.weight_decay": (0.1, 0.0),
    "optimizer.hessian_interval": (10, 1),
    "router.balance_coefficient": (0.5, 0.0),
    "router.z_coefficient": (0.1, 0.0),
    "router.bias_update_rate": (0.001, 0.0),
    "mtp.loss_scaling_factor": (0.3, 1.0, 0.0),
    "router.capacity_factor": (None, 0.5, 1.0),
    "precision": ("fp32", "bf16", "fp16"),
    "static_loss_scale": (True, False),
    "rope_type": ("", *sorted(SCALING)),
    "architecture.num_key_value_heads": (2, 4, 1),
    "layers_of_stage": (1, 2),
    "architecture.head_dim": (8, 16),
}
"""Values of fields that have no list of choices; the first one is the default."""

NOT_OF_A_STEP = {
    *("finetune", "load_optimizer", "on_change", "masking", "sequence_length", "train_steps"),
    *("train_samples", "train_tokens", "split", "split_rule", "blend", "within_corpus", "fim"),
    *("separate_last_epoch", "drop_last_partial_sequence", "schedule", "loss_scaling"),
    *("on_bad_step", "skip_data", "deterministic", "deepspeed", "verify_data", "log_interval"),
    *("verify_interval", "sample_interval", "sample_prompts", "sample_tokens"),
    "sample_temperature",
    *("init_timeout_seconds", "train_timeout_seconds", "log_style", "log_settings", "trackers"),
    *("profile_steps", "evaluation_interval", "evaluation_steps", "save_interval", "keep_last"),
    *("keep_every", "keep_best", "segment_steps", "global_batch_size"),
}
"""Settings of `train` that decide which samples a step has, what is written, or when."""
NOT_OF_A_LAYOUT = {
    *("layer_norm_epsilon", "rms_norm_eps", "rope_theta", "num_classes"),
    *("relative_attention_max_distance", "rope_scaling"),
}
"""Numbers of families that each token has alike on every rank; `rope_type` draws the scaling."""
NUMBERS_OF_UPDATES = {
    *("learning_rate", "beta1", "beta2", "epsilon", "momentum", "rho", "newton_schulz_steps"),
    *("matrix_learning_rate_ratio", "beta2_decay", "epsilon2", "clip_threshold"),
    *("weight_decay_schedule", "start_weight_decay", "end_weight_decay"),
}
"""Settings of optimizers that each element of a parameter, or the whole, has alike on every rank;
the published values are used."""
SLOW = {"compile", "offload_optimizer", "offload_param"}
"""Settings that take seconds each, or need DeepSpeed's compiled kernels: tests of their own have
them."""
ROUNDED_BY_LAYOUT = {"adamw_8bit"}
"""Optimizers whose states are rounded in blocks of a rank's part: layouts differ."""

EFFECTS: dict[str, Axes] = {
    "parallel.sequence_parallel": {"parallel.tensor_parallel_size": (1,)},
    "parallel.context_parallel_method": {"parallel.context_parallel_size": (1,)},
    "parallel.pipeline_schedule": {"parallel.pipeline_parallel_size": (1,)},
    "parallel.pipeline_layers": {"parallel.pipeline_parallel_size": (1,)},
    "parallel.virtual_pipeline_size": {"parallel.pipeline_parallel_size": (1,)},
    "zero_stage": {"data_parallel_size": (1,), "parallel.context_parallel_size": (1,)},
    "recompute_method": {"recompute_granularity": ("none", "selective")},
    "recompute_num_layers": {"recompute_granularity": ("none", "selective")},
    "mtp.loss_scaling_factor": {"architecture.num_nextn_predict_layers": (0,)},
    "static_loss_scale": {"precision": ("fp32", "bf16")},
    "optimizer.hessian_interval": {
        "optimizer.name": (*({*plugins.names("optim")} - {"sophia_g"}),)
    },
}
"""Other axes, and values of them: if each of these axes has one of them, an axis has no effect."""
TOGETHER: dict[tuple[str, Any], Values] = {
    ("parallel.pipeline_parallel_size", 4): {"num_micro_batches": 4},
    **{
        ("parallel.pipeline_schedule", name): {"parallel.virtual_pipeline_size": 2}
        for name in INTERLEAVED
    },
    ("parallel.virtual_pipeline_size", 2): {
        "parallel.pipeline_parallel_size": 2,
        "parallel.pipeline_schedule": INTERLEAVED[0],
    },
    ("parallel.data_parallel_replicate_size", 2): {"zero_stage": 1, "data_parallel_size": 2},
    ("parallel.expert_parallel_size", 2): {
        "data_parallel_size": 2,
        "architecture.num_experts": 4,
    },
    ("parallel.expert_parallel_size", 4): {
        "data_parallel_size": 4,
        "architecture.num_experts": 4,
    },
    ("parallel.pipeline_layers", "uneven"): {"layers_of_stage": 2},
    **{("rope_type", each): {"architecture.position_embedding": "rotary"} for each in SCALING},
}
"""Values that a value of an axis needs."""


@cache
def axes() -> Axes:
    """Values of each axis of a step."""
    found: Axes = {}
    for prefix, model in (("", TrainFields), ("parallel.", ParallelSettings)):
        for name, field in model.model_fields.items():
            values = SIZES.get(prefix + name) or choices(field.annotation)
            if values and name not in NOT_OF_A_STEP | SLOW:
                found[prefix + name] = values
    found |= {name: values for name, values in SIZES.items() if "." in name or name not in found}
    found["backend"] = ("native", *sorted({*plugins.names("train/backends")} - {"native"}))
    usable = {*plugins.names("optim")} - {"adamw"} - ROUNDED_BY_LAYOUT
    found["optimizer.name"] = ("adamw", *sorted(usable))
    return found


def choices(annotation: Any) -> tuple[Any, ...]:
    """Choices of a field: both values of a flag, or the values of a Literal; else empty."""
    if annotation is bool:
        return (False, True)
    arguments = (annotation, *get_args(annotation))
    literals = [each for each in arguments if get_origin(each) is Literal]
    return tuple(value for each in literals for value in get_args(each))


LATENT: Axes = {
    "q_lora_rank": (12, 0),
    "kv_lora_rank": (10,),
    "qk_nope_head_dim": (4,),
    "qk_rope_head_dim": (4,),
    "v_head_dim": (6,),
}
SHARED_EXPERTS: Axes = {
    "moe_intermediate_size": (8,),
    "num_experts": (6, 4),
    "num_experts_per_tok": (2,),
    "n_shared_experts": (2,),
    "first_k_dense_replace": (1, 0),
    "n_group": (2, 1),
    "topk_group": (1,),
    "routed_scaling_factor": (1.5,),
}
MTP: Axes = {"num_nextn_predict_layers": (0, 1, 2)}

FAMILIES: dict[str, Axes] = {
    "biencoder": {"projection_dim": (0, 24)},
    "deepseek_v2": {**LATENT, **SHARED_EXPERTS},
    "deepseek_v3": {**LATENT, **SHARED_EXPERTS, **MTP},
    "gemma2": {
        "sliding_window": (5, 0),
        "full_attention_interval": (2, 0),
        "query_pre_attn_scalar": (12.0,),
        "attn_logit_softcapping": (0.5, 0.0),
        "final_logit_softcapping": (0.5, 0.0),
    },
    "gemma3": {
        "sliding_window": (5,),
        "full_attention_interval": (2, 0),
        "local_rope_theta": (700.0,),
        "query_pre_attn_scalar": (12.0,),
        "final_logit_softcapping": (0.0, 0.5),
    },
    "glm4_moe": {**SHARED_EXPERTS, **MTP, "partial_rotary_factor": (0.5,)},
    "gpt_neox": {"partial_rotary_factor": (0.25, 1.0)},
    "gpt_oss": {
        "num_experts": (5, 4),
        "num_experts_per_tok": (3,),
        "sliding_window": (5, 0),
        "full_attention_interval": (2, 0),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (0.1,),
    },
    "hf_t5": {"num_decoder_layers": (0, 2), "relative_attention_num_buckets": (8,)},
    "mistral": {"sliding_window": (0, 5)},
    "mixtral": {"num_experts": (3, 4), "num_experts_per_tok": (2, 1), "sliding_window": (0, 5)},
    "olmoe": {"num_experts": (5, 4), "num_experts_per_tok": (3,)},
    "olmo3": {
        "sliding_window": (5,),
        "full_attention_interval": (2, 0),
        "local_rope_theta": (500000.0,),
    },
    "phi3": {"partial_rotary_factor": (1.0, 0.5), "sliding_window": (0, 5)},
    "qwen3_moe": {
        "num_experts": (5, 4),
        "num_experts_per_tok": (2,),
        "moe_intermediate_size": (8,),
    },
    "retro": {
        "chunk_length": (4,),
        "first_retrieval_layer": (2, 1),
        "retrieval_interval": (2, 1),
        "num_encoder_layers": (1, 2),
        "encoder_hidden_dropout": (0.0, 0.1),
        "encoder_attention_dropout": (0.0, 0.1),
    },
    "smollm3": {"no_rope_layer_interval": (2, 0)},
    "t5": {"num_decoder_layers": (0, 2)},
}
"""Values of a family's own settings that are numbers."""
OF_TASKS = {"task_head"}
"""Settings of a family that finetuning sets."""
SHAPE = {
    "vocab_size": 61,  # odd, so that ranks have uneven parts
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
SECTIONS: dict[str, Values] = {"ict": {"topk": 1}, "retro": {"chunk_length": 4}}
"""Sections of `train` that an objective needs in addition."""
OF_OBJECTIVES: dict[str, Axes] = {
    "retro": {"neighbors": (2, 1), "retrieved_chunks": (2, 1)},
}
"""Values of numbers of an objective's section."""
OF_SAMPLES = {
    *("ict.titles", "ict.text", "ict.query_in_block_probability", "ict.one_sentence_documents"),
    *("retro.embedder", "retro.embedder_tokenizer", "retro.num_found", "retro.num_kept"),
    *("retro.factory", "retro.train_vectors", "retro.nprobe", "retro.ef_search"),
    "retro.chunk_length",
}
"""Settings of objectives that decide which samples a step has; the length of chunks follows from
the model."""
TASK_SETTINGS: dict[str, Values] = {"labeled_text": {"labels": ["no", "yes"]}}
"""Settings that a task needs."""


@cache
def tasks() -> tuple[str, ...]:
    """A task of finetuning for each kind of head."""
    kinds: dict[Any, str] = {}
    for name in plugins.names(FOLDER):
        task = FinetuneTask(name=name, **TASK_SETTINGS.get(name, {}))
        kinds.setdefault((task.objective, task.head), name)
    return (*kinds.values(),)


def objective_axes(objective: str) -> Axes:
    """Values of the settings of an objective's section that decide a step."""
    if objective not in OBJECTIVE_SECTIONS:
        return {}
    found: Axes = {}
    for name, field in OBJECTIVE_SECTIONS[objective].model_fields.items():
        values = OF_OBJECTIVES.get(objective, {}).get(name) or choices(field.annotation)
        if values and f"{objective}.{name}" not in OF_SAMPLES:
            found[f"{objective}.{name}"] = values
    return found


@cache
def learner_axes(family: str, objective: str) -> Axes:
    """Values of all axes of a family with an objective or a task."""
    settings = plugins.constant("models/*/model", family, "SETTINGS")
    own = {name: values for name, values in settings.items() if isinstance(values, tuple)}
    own |= FAMILIES.get(family, {})
    found = {f"architecture.{n}": v for n, v in own.items() if n not in OF_TASKS}
    of_step = axes()
    if not plugins.constant("models/*/model", family, "HAS_ROUTERS", default=False):
        of_experts = ("router.", "parallel.expert_")
        of_step = {axis: v for axis, v in of_step.items() if not axis.startswith(of_experts)}
    if "num_nextn_predict_layers" not in own:
        of_step = {axis: v for axis, v in of_step.items() if not axis.startswith("mtp.")}
    without = {"router.bias_update_rate"}
    if plugins.constant("models/*/model", family, "HAS_ROUTER_BIASES", default=False):
        without = set()
    if "kv_lora_rank" in own:  # keys and values follow from other settings
        without |= {"architecture.head_dim", "architecture.num_key_value_heads"}
    if "rotary" not in own.get("position_embedding", ()):
        without.add("rope_type")
    of_step = {axis: v for axis, v in of_step.items() if axis not in without}
    of_step |= objective_axes(objective)
    if objective in tasks():
        sizes = ("data_parallel_size", "num_micro_batches", "layers_of_stage")
        known = {*TRAIN_SETTINGS, *sizes, "static_loss_scale", "rope_type", "architecture"}
        of_step = {axis: v for axis, v in of_step.items() if axis.partition(".")[0] in known}
    return {**of_step, **{axis: v for axis, v in found.items() if axis not in of_step}}


def rope_scaling(rope_type: str, num_frequencies: int) -> Values:
    """Positions of twice the sequences of a first training."""
    factors = [1.0 + each / num_frequencies for each in range(num_frequencies)]
    known = {
        "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "short_factor": factors,
        "long_factor": [2 * each for each in factors],
    }
    required, _ = SCALING[rope_type]
    return {"rope_type": rope_type, "factor": 2.0, **{name: known[name] for name in required}}
