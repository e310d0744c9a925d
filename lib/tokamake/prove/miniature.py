"""A run in miniature: the same layout and the same settings of a step, with tiny sizes."""

import math
from typing import Any

from pydantic import ValidationError

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.objective import SECTIONS, objective_section
from tokamake.config.parallel import ParallelSettings
from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError

_HEAD_DIM, _HIDDEN_SIZE = 8, 32
_MOST_EXPERTS = 6
_LENGTH = 16
"""Least number of tokens of a sample."""
_WINDOW = 5
"""Window of attention, odd and shorter than samples."""
_CAP = 0.5
"""Cap of scores, logits, and gates of experts, small as they are."""
_LEAST_RATE = 0.01
"""Least learning rate: smaller changes of weights would be lost in their rounding."""
_VOCABULARY = 61
"""Odd, so that tensor-parallel ranks have uneven parts of it."""


def shortened(run: Run, most: int) -> Run:
    """The run with a pipeline, and then few experts' ranks, that `most` ranks are enough for.

    Raises:
        UserError: tensor and context parallelism alone need more ranks.
    """
    ranks = run.train.parallel.pipeline_parallel_size
    while ranks > 2 and num_ranks(run) > most:
        ranks = max(2, ranks // 2)
        run = _laid_out(run, pipeline_parallel_size=ranks, pipeline_layers=())
    ranks = run.train.parallel.expert_parallel_size
    while ranks > 2 and num_ranks(run) > most:
        ranks = max(2, ranks // 2)
        run = _laid_out(run, expert_parallel_size=ranks)
    if num_ranks(run) > most:
        raise UserError(
            f"train.parallel: a miniature of this layout needs {num_ranks(run)} ranks, and "
            f"{most} may run on this machine; start it with a launcher on nodes of the run, or "
            "raise --most-ranks"
        )
    return run


def with_pipeline_alone(run: Run) -> Run:
    """The run with its whole pipeline and data parallelism, and no other parallelism."""
    sizes = dict.fromkeys((f"{kind}_parallel_size" for kind in ("tensor", "context", "expert")), 1)
    return _laid_out(run, **sizes, sequence_parallel=False)


def num_ranks(run: Run) -> int:
    """Ranks of the miniature: as few data-parallel ranks as show what data parallelism does.

    If ranks divide experts, two of them have the same ones.
    """
    parallel = run.train.parallel
    context, experts = parallel.context_parallel_size, parallel.expert_parallel_size
    data = 4 if parallel.data_parallel_replicate_size > 1 else 2
    if experts > 1:
        data = math.lcm(data * context, 2 * experts) // context
    return data * context * parallel.tensor_parallel_size * parallel.pipeline_parallel_size


def _laid_out(run: Run, **sizes: Any) -> Run:
    parallel = run.train.parallel.model_copy(update=sizes)
    return run.model_copy(update={"train": run.train.model_copy(update={"parallel": parallel})})


def miniature(run: Run, world_size: int, *, precision: str) -> Run:
    """The run with a tiny model, short samples, small batches and random weights."""
    train, parallel = run.train, _tiny_layout(run.train.parallel)
    micro = min(train.micro_batch_size, 2)
    data = parallel.data_parallel_size(world_size)
    accumulates = train.global_batch_size > train.micro_batch_size * data
    num_batches = max(parallel.pipeline_parallel_size, 2 if accumulates else 1)
    rampup = None
    if train.rampup_batch_size:  # the first step has half of the micro batches of the second
        rampup = (micro * data * num_batches,) * 3
        num_batches *= 2
    architecture = _tiny_model(run.architecture, parallel)
    length = _length(architecture, parallel)
    changed: dict[str, Any] = {
        "parallel": parallel.model_dump(),
        "precision": precision,
        "micro_batch_size": micro,
        "global_batch_size": micro * data * num_batches,
        "rampup_batch_size": rampup,
        "sequence_length": length,
        "train_steps": 8,
        "finetune": None,
        "compile": False,
        "fim": {},
        **_without_measurements(train),
        "skip_data": (),
        "profile_steps": None,
        "optimizer": train.optimizer.model_dump(exclude_unset=True)
        | {"learning_rate": max(_LEAST_RATE, train.optimizer.learning_rate)},
        # Gradients of a tiny model are small, and clipping has to act.
        **({"gradient_clipping": 0.05} if train.gradient_clipping else {}),
    }
    if precision == "fp16":
        changed["loss_scaling"] = {"static": True, "initial_scale": 16.0}
    else:
        changed["loss_scaling"] = {}
    settings = type(train).model_validate({**train.model_dump(), **changed})
    return run.model_copy(
        update={
            "architecture": architecture,
            "train": settings,
            "checkpoint": None,
            "parent": None,
            "step": 0,
            "consumed_samples": 0,
            "eod": None if run.eod is None else 7,
        }
    )


def _without_measurements(train: TrainSettings) -> dict[str, Any]:
    """The objective's section without what validations measure, which may need large batches."""
    if train.objective not in SECTIONS:
        return {}
    section = objective_section(train)
    lists = [name for name in section.without_effect if isinstance(getattr(section, name), tuple)]
    return {train.objective: section.model_dump() | dict.fromkeys(lists, ())}


def _tiny_layout(parallel: ParallelSettings) -> ParallelSettings:
    """The layout with at most two replicas, and stages of at most two layers."""
    return ParallelSettings.model_validate(
        {
            **parallel.model_dump(),
            "data_parallel_replicate_size": min(parallel.data_parallel_replicate_size, 2),
            "pipeline_layers": tuple(min(each, 2) for each in parallel.pipeline_layers),
        }
    )


def _tiny_model(architecture: Architecture, parallel: ParallelSettings) -> Architecture:
    """The architecture with few heads, layers and tokens; its choices stay."""
    tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
    heads, groups = architecture.num_attention_heads, architecture.num_key_value_heads
    ulysses = context if parallel.context_parallel_method == "ulysses" else 1
    fewest = math.lcm(tensor * ulysses, 2)
    # As many key-value heads as ranks need to have parts or copies of them as in the run.
    few_groups = groups if groups < tensor else math.gcd(groups, math.lcm(tensor * ulysses, 2))
    few_heads = math.lcm(few_groups, fewest)
    if groups < heads and few_groups == few_heads:
        few_heads *= 2
    changed = {
        "vocab_size": max(_VOCABULARY, 4 * tensor - 1),
        "hidden_size": max(_HIDDEN_SIZE, 8 * tensor),
        "intermediate_size": 8 * math.lcm(tensor, 4),
        "num_attention_heads": few_heads,
        "num_key_value_heads": few_groups,
        "head_dim": _HEAD_DIM,
    }
    changed |= _tiny_rope(architecture) | _tiny_attention(architecture)
    changed |= _few_experts(architecture, width=2 * tensor, ranks=parallel.expert_parallel_size)
    if architecture.latent_size:
        changed |= _tiny_latents(architecture) | {"num_key_value_heads": few_heads}
    layers = sum(parallel.pipeline_layers) or max(2, parallel.num_stages)
    while True:
        try:
            sizes = changed | {"num_hidden_layers": layers} | _tiny_intervals(architecture, layers)
            return Architecture.model_validate({**architecture.model_dump(), **sizes})
        except ValidationError:  # some families need a later layer
            if layers >= architecture.num_hidden_layers:
                raise
            layers += 1


def _tiny_attention(architecture: Architecture) -> dict[str, Any]:
    """Window, caps and scale of scores that act on short samples, small weights, narrow heads."""
    own, changed = architecture.model_extra or {}, dict[str, Any]()
    if own.get("sliding_window"):
        changed["sliding_window"] = _WINDOW
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit"):
        changed |= {name: _CAP} if own.get(name) else {}
    if scalar := own.get("query_pre_attn_scalar"):
        changed["query_pre_attn_scalar"] = scalar * _HEAD_DIM / architecture.head_dim
    return changed


def _tiny_intervals(architecture: Architecture, layers: int) -> dict[str, int]:
    """Intervals at which layers differ, so short that the few layers have all kinds."""
    own = architecture.model_extra or {}
    names = ("no_rope_layer_interval", "full_attention_interval")
    return {name: min(own[name], layers) for name in names if name in own}


def _tiny_rope(architecture: Architecture) -> dict[str, Any]:
    """Rotary positions with a factor for each frequency of a narrow head, if there are factors."""
    scaling = architecture.rope_scaling
    if scaling is None or scaling.short_factor is None or scaling.long_factor is None:
        return {}
    number = architecture.rotary_width * _HEAD_DIM // architecture.head_dim // 2
    factors = {name: getattr(scaling, name)[:number] for name in ("short_factor", "long_factor")}
    return {"rope_scaling": scaling.model_dump() | factors}


def _few_experts(architecture: Architecture, *, width: int, ranks: int) -> dict[str, Any]:
    """Few narrow experts, if there are any; a token uses several of them as in the run."""
    if not architecture.has_routers:
        return {}
    number = min(architecture.setting("num_experts"), max(1, _MOST_EXPERTS // ranks) * ranks)
    chosen = architecture.setting("num_experts_per_tok")
    few: dict[str, Any] = {"num_experts": number}
    few["num_experts_per_tok"] = max(1, min(chosen, number // 2))
    own = architecture.model_extra or {}
    if "moe_intermediate_size" in own:
        few["moe_intermediate_size"] = 4 * width
    if "first_k_dense_replace" in own:
        few["first_k_dense_replace"] = min(own["first_k_dense_replace"], 1)
    if "n_group" in own:
        few["n_group"] = math.gcd(own["n_group"], max(1, number // 2))
        few["topk_group"] = -(-few["n_group"] * own["topk_group"] // own["n_group"])
        few["num_experts_per_tok"] = min(
            few["num_experts_per_tok"], few["topk_group"] * number // few["n_group"]
        )
    return few


def _tiny_latents(architecture: Architecture) -> dict[str, Any]:
    """Narrow latent vectors, and heads whose keys and values differ in width."""
    rank = 12 if architecture.setting("q_lora_rank") else 0
    parts = {"qk_nope_head_dim": _HEAD_DIM // 2, "qk_rope_head_dim": _HEAD_DIM // 2}
    narrow = {"q_lora_rank": rank, "kv_lora_rank": 10, "v_head_dim": _HEAD_DIM - 2}
    return {"head_dim": _HEAD_DIM, **parts, **narrow}


def _length(architecture: Architecture, parallel: ParallelSettings) -> int:
    """Tokens of a sample that all ranks can divide."""
    tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
    multiple = math.lcm(2 * context * tensor, _chunk_length(architecture))
    return -(-_LENGTH // multiple) * multiple


def _chunk_length(architecture: Architecture) -> int:
    settings = plugins.constant("models/*/model", architecture.family, "SETTINGS")
    return architecture.setting("chunk_length") if "chunk_length" in settings else 1
