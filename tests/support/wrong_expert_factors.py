"""Wrong factors and forgotten sums of experts, routers, sinks and multi-token prediction."""

from tests.support.planted_faults import (
    BF16,
    CONTEXT,
    DEEPSPEED,
    EXPERTS,
    FURTHER,
    PIPELINE,
    SEQUENCE,
    SHARDED,
    TENSOR,
    ULYSSES,
    Fault,
    composition,
)
from tokamake.models.common.expert_capacity import ExpertCapacity
from tokamake.models.common.experts import ExpertLinear
from tokamake.models.common.latent_attention import LatentNorm
from tokamake.models.common.multi_token_prediction import MTPDecoder, MTPLosses
from tokamake.models.common.router_losses import RouterLosses
from tokamake.models.common.routers import BalancedRouter, Router
from tokamake.parallel import (
    attention,
    expert_dispatch,
    ring,
    sharding,
)
from tokamake.train import pipeline_stages
from tokamake.train.backends import _base, native

EXPERT_FAULTS: dict[str, Fault] = {
    # ---- Routers ----
    "losses_of_routers_doubled": Fault(
        RouterLosses.gradient,
        "factor / self._mesh.tensor.size",
        "factor",
        composition(2, TENSOR, "qwen3_moe"),
    ),
    "losses_of_routers_of_one_context_rank": Fault(
        RouterLosses.added,
        "if self._mesh.context.size > 1:",
        "if False:",
        composition(2, CONTEXT, "qwen3_moe"),
    ),
    "router_not_partial": Fault(
        Router.__init__,
        "partial=mesh.tensor.size > 1",
        "partial=False",
        composition(2, TENSOR, "mixtral"),
    ),
    "rows_of_routers_of_one_rank": Fault(
        _base.EngineBase._num_labels,
        "num_rows * mesh.data.size)",
        "num_rows)",
        composition(2, {}, "olmoe"),
    ),
    "losses_of_routers_times_stages": Fault(
        pipeline_stages.PipelineStages._use,
        "self.routers.factor = factors.rows",
        "self.routers.factor = factors.rows and factors.rows * self._mesh.pipeline.size",
        composition(2, PIPELINE, "olmoe"),
    ),
    "capacity_of_one_context_rank": Fault(
        ExpertCapacity._places,
        "if self._axis.size == 1",
        "if True",
        composition(2, CONTEXT | {"router.capacity_factor": 0.5}, "mixtral"),
    ),
    "capacity_in_the_wrong_order": Fault(
        ExpertCapacity._places,
        "self._axis.rank, 2 * self._axis.size - 1 - self._axis.rank",
        "2 * self._axis.rank, 2 * self._axis.rank + 1",
        composition(2, CONTEXT | {"router.capacity_factor": 0.5}, "mixtral"),
    ),
    # ---- Expert parallelism ----
    **{
        f"expert_gradients_{verb}": Fault(
            expert_dispatch._Exchanged.backward,
            "return back,",
            f"return back {factor} ctx.axis.size,",
            composition(2, EXPERTS, "mixtral"),
        )
        for verb, factor in (("multiplied", "*"), ("divided", "/"))
    },
    "gradients_of_experts_divided_again": Fault(
        sharding.shard,
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(mesh.shards.size() / shards.size())",
        composition(4, EXPERTS | SHARDED, "qwen3_moe"),
    ),
    "experts_sharded_as_other_weights": Fault(
        sharding.shard,
        "(each, mesh.expert_shards)",
        "(each, mesh.shards)",
        composition(4, EXPERTS, "olmoe"),
    ),
    "norm_has_experts_of_one_rank": Fault(
        sharding.parameter_chunks,
        "and name != tied_output",
        "and (mesh.expert.rank == 0 or not placed[name].axes)",
        composition(2, EXPERTS | {"zero_stage": 0}, "mixtral"),
    ),
    "norm_counts_copies_of_experts": Fault(
        sharding._replica,
        "mesh.get_local_rank(0) if mesh.ndim > 1 else 0",
        "0",
        composition(4, EXPERTS | {"zero_stage": 0}, "mixtral"),
    ),
    "experts_not_placed": Fault(
        sharding._place,
        "(*splits, *placement.axes)",
        "splits",
        composition(2, EXPERTS, "mixtral"),
    ),
    "experts_replicated": Fault(
        ExpertLinear.__init__,
        "Placement(dim if is_divided else None, axes=axes",
        "Placement(dim if is_divided else None",
        composition(2, EXPERTS, "mixtral"),
    ),
    "choices_of_other_experts": Fault(
        _base.EngineBase._sum_over_ranks,
        "of_routers = routers.read(rest[-routers.size :], num_rows)",
        "of_routers = tuple(each._replace(counts=each.counts[::-1]) for each in "
        "routers.read(rest[-routers.size :], num_rows))",
        composition(2, {}, "deepseek_v3"),
    ),
    "share_of_dropped_choices": Fault(
        _base.EngineBase._sum_over_ranks,
        "of_routers = routers.read(rest[-routers.size :], num_rows)",
        "of_routers = tuple(each._replace(dropped=1.5 * each.dropped) for each in "
        "routers.read(rest[-routers.size :], num_rows))",
        composition(2, {"router.capacity_factor": 1.0}, "mixtral"),
    ),
    "balance_has_the_wrong_sign": Fault(
        BalancedRouter.balance,
        "counts_E.mean() - counts_E",
        "counts_E - counts_E.mean()",
        composition(2, {}, "deepseek_v3"),
    ),
    "latent_norm_not_partial": Fault(
        LatentNorm.__init__,
        "partial=mesh.tensor.size > 1",
        "partial=False",
        composition(2, TENSOR, "deepseek_v3"),
    ),
    "expert_gradients_multiplied_bf16": Fault(
        expert_dispatch._Exchanged.backward,
        "return back,",
        "return back * ctx.axis.size,",
        composition(2, EXPERTS | BF16, "mixtral"),
    ),
    # ---- Layers that predict further tokens ----
    "further_losses_by_other_labels": Fault(
        _base.EngineBase._num_labels,
        "further=sums[2:] // num_copies",
        "further=sums[:1] // num_copies",
        composition(2, FURTHER, "deepseek_v3"),
    ),
    "further_labels_of_one_batch": Fault(
        _base.EngineBase._num_labels,
        "for batch in batches if has_further",
        "for batch in batches[:1] if has_further",
        composition(2, FURTHER, "glm4_moe"),
    ),
    "further_losses_not_scaled": Fault(
        pipeline_stages.LossFactors.times,
        "scaled.times_added(factor)",
        "scaled",
        composition(2, FURTHER | DEEPSPEED | {"zero_stage": 1}, "glm4_moe"),
    ),
    "further_layer_without_sequence_parallel": Fault(
        MTPDecoder.layer,
        "self.mesh.sequence_parallel",
        "False",
        composition(2, FURTHER | SEQUENCE, "deepseek_v3"),
    ),
    "further_embeddings_not_added": Fault(
        native.Engine._add_up_gradients,
        "if self.stages.copies_embedding:",
        "if self._run.architecture.tie_word_embeddings:",
        composition(2, FURTHER | PIPELINE, "deepseek_v3"),
    ),
    "further_losses_of_each_rank": Fault(
        MTPLosses.take,
        "self._mesh.tensor.rank == 0",
        "True",
        composition(2, FURTHER | TENSOR, "glm4_moe"),
    ),
    # ---- Sinks, biases of experts ----
    "expert_bias_of_each_rank": Fault(
        ExpertLinear.__init__,
        "self._adds_bias = mesh.tensor.rank == 0",
        "self._adds_bias = True",
        composition(2, TENSOR, "gpt_oss"),
    ),
    "expert_bias_not_partial": Fault(
        ExpertLinear.__init__,
        "dim=None, partial=is_divided",
        "dim=None",
        composition(2, TENSOR, "gpt_oss"),
    ),
    "sinks_counted_twice": Fault(
        ring._Ring.forward,
        "if sinks_H is not None:",
        "for _ in range(2):",
        composition(2, CONTEXT, "gpt_oss"),
    ),
    "sinks_of_the_first_rank": Fault(
        attention._ulysses,
        "rules.sinks.unflatten(0, (size, -1))[axis.rank]",
        "rules.sinks.unflatten(0, (size, -1))[0]",
        composition(2, ULYSSES, "gpt_oss"),
    ),
}
