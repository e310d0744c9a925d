"""Wrong factors and forgotten sums, planted one by one; all are found."""

from tests.support.planted_faults import (
    BF16,
    CONTEXT,
    DEEPSPEED,
    FP16,
    MASKED,
    PIPELINE,
    SEQUENCE,
    SHARDED,
    TENSOR,
    TIED,
    ULYSSES,
    Fault,
    composition,
)
from tests.support.wrong_expert_factors import EXPERT_FAULTS
from tokamake.parallel import (
    collectives,
    loss,
    pipeline,
    ring,
    sharding,
    tensor,
    tied_embeddings,
)
from tokamake.parallel.dropout import Dropout
from tokamake.train import gradient_clipping, pipeline_stages
from tokamake.train.backends import _base, deepspeed, native
from tokamake.train.objectives import _in_batch

_NORMS = "[each.local.detach() for each in self._chunks if len(each.shape) == 1]"
"""Vectors of an engine. They have few of all elements, and a small part of all updates."""
_DECAY = "learning_rate * weight_decay"

FAULTS: dict[str, Fault] = {
    # ---- Collectives ----
    "copied_gradient_not_added": Fault(
        collectives.copy, "partial(all_reduce, axis=axis)", "_identity", composition(2, TENSOR)
    ),
    "sum_multiplies_gradient": Fault(
        collectives.add,
        "_identity)",
        "lambda g: g * axis.size)",
        composition(2, TENSOR),
    ),
    "gather_divides_gradient": Fault(
        collectives.gather,
        "partial(reduce_scatter, axis=axis, dim=dim))",
        "lambda g: reduce_scatter(g, axis, dim=dim) / axis.size)",
        composition(2, SEQUENCE),
    ),
    "scatter_divides_gradient": Fault(
        collectives.scatter_sum,
        "partial(all_gather, axis=axis, dim=dim))",
        "lambda g: all_gather(g, axis, dim=dim) / axis.size)",
        composition(2, SEQUENCE),
    ),
    "all_reduce_takes_the_mean": Fault(
        collectives.all_reduce,
        "return total",
        "return total / axis.size",
        composition(2, TENSOR),
    ),
    "reduce_scatter_takes_the_mean": Fault(
        collectives.reduce_scatter,
        "return part.movedim",
        "return (part / axis.size).movedim",
        composition(2, SEQUENCE),
    ),
    # ---- Placements ----
    "rms_norm_not_partial": Fault(
        tensor.RMSNorm.__init__,
        "partial=mesh.sequence_parallel",
        "partial=False",
        composition(2, SEQUENCE),
    ),
    "layer_norm_partial_without_sequence_parallel": Fault(
        tensor.LayerNorm.__init__,
        "partial=mesh.sequence_parallel",
        "partial=mesh.tensor.size > 1",
        composition(2, TENSOR, "gpt"),
    ),
    "replicated_embedding_not_partial": Fault(
        tensor.ReplicatedEmbedding.__init__,
        "partial=mesh.sequence_parallel",
        "partial=False",
        composition(2, SEQUENCE, "gpt"),
    ),
    "replicated_linear_not_partial": Fault(
        tensor.ReplicatedLinear.__init__,
        "Placement(partial=True)",
        "Placement()",
        composition(2, TENSOR | {"architecture.num_key_value_heads": 1}),
    ),
    "row_bias_not_partial": Fault(
        tensor.RowParallelLinear.__init__,
        "Placement(partial=mesh.sequence_parallel)",
        "Placement()",
        composition(2, SEQUENCE, "gpt"),
    ),
    "row_bias_added_by_each_rank": Fault(
        tensor.RowParallelLinear.forward,
        "y_BLE + self.bias",
        "y_BLE + self.bias * self._mesh.tensor.size",
        composition(2, TENSOR | {"optimizer.name": "sgd"}, "gpt"),
    ),
    "partial_gradients_not_added": Fault(
        sharding.add_up_partial, "if axis.size == 1", "if True", composition(2, SEQUENCE)
    ),
    "partial_gradients_halved": Fault(
        sharding._all_reduce,
        "tensor.copy_(total)",
        "tensor.copy_(total / 2)",
        composition(2, SEQUENCE),
    ),
    "tied_copies_halved": Fault(
        tied_embeddings.add_up_copies,
        "own.add_(theirs)",
        "own.add_(theirs, alpha=0.5)",
        composition(2, PIPELINE | TIED),
    ),
    # ---- Losses ----
    "log_of_sums_by_rank": Fault(
        loss._over_ranks,
        "sums_2N[0].log() + max_N, sums_2N[1]",
        "sums_2N[0].log() + lse_N, sums_2N[1]",
        composition(2, TENSOR),
    ),
    "labels_of_each_stage": Fault(
        _base.EngineBase._num_labels,
        "num_copies = mesh.tensor.size * mesh.pipeline.size",
        "num_copies = mesh.tensor.size",
        composition(2, PIPELINE | MASKED),
    ),
    "labels_of_one_context_rank": Fault(
        _base.EngineBase._num_labels,
        "own * mesh.data.size * mesh.context.size",
        "own * mesh.data.size",
        composition(2, CONTEXT),
    ),
    "labels_of_one_rank": Fault(
        _base.EngineBase._num_labels,
        "dist.all_reduce(sums)",
        "sums *= dist.get_world_size()",
        composition(2, MASKED),
    ),
    "samples_times_all_ranks": Fault(
        _base.EngineBase._loss_factors,
        "* self.mesh.data.size",
        "* self._ranks.world_size",
        composition(2, TENSOR, "bert", "masked"),
    ),
    "loss_divided_by_stages": Fault(
        pipeline_stages.PipelineStages._pipeline_loss,
        "return self._loss(predicted, labels)",
        "return self._loss(predicted, labels) / self._mesh.pipeline.size",
        composition(2, PIPELINE),
    ),
    "pipeline_divides_gradients": Fault(
        pipeline.Pipeline._schedule_of,
        "scale_grads=False",
        "scale_grads=True",
        composition(2, PIPELINE),
    ),
    "in_batch_gradients_divided": Fault(
        _in_batch.InBatchObjective.look_ahead,
        "gradients[0].split",
        "(gradients[0] / len(batches)).split",
        composition(2, {}, "biencoder", "ict"),
    ),
    # ---- Norms and clipping ----
    "norm_counts_copies": Fault(
        sharding.squares,
        "if each.counts and each.local.grad",
        "if each.local.grad",
        composition(2, TENSOR),
    ),
    "clipped_by_the_square": Fault(
        gradient_clipping.clip_coefficient,
        "limit / (norm + 1e-6)",
        "limit / (norm * norm + 1e-6)",
        composition(2, {}),
    ),
    "small_gradients_scaled_up": Fault(
        gradient_clipping.clip_coefficient,
        "min(1.0, limit / (norm + 1e-6))",
        "limit / (norm + 1e-6)",
        composition(2, {"gradient_clipping": 100.0}),
    ),
    "norm_keeps_the_loss_scale": Fault(
        native.Engine.train_step,
        "/ measured.loss_scale",
        "* measured.loss_scale",
        composition(2, {"precision": "fp16"}),
    ),
    "norms_of_layers_halved": Fault(
        _base.EngineBase._sum_over_ranks,
        "math.sqrt(each) / scale",
        "math.sqrt(each) / (2 * scale)",
        composition(2, {"log_layer_norms": True}),
    ),
    "losses_of_corpora_for_labels": Fault(
        _base.EngineBase._sum_over_ranks,
        "rest[num_layers + 1 :: 2]",
        "rest[num_layers::2]",
        composition(2, {"log_corpus_losses": True}),
    ),
    "validation_of_one_rank": Fault(
        _base.EngineBase.validate, "dist.all_reduce(total)", "pass", composition(2, {})
    ),
    "validation_of_weights_that_are_no_average": Fault(
        _base.EngineBase.validate,
        'self._set_mode("eval")',
        "pass",
        composition(2, {"optimizer.name": "schedule_free_adamw"}),
    ),
    # ---- Updates ----
    **{
        f"learning_rate_of_{name}": Fault(
            native.Engine.train_step,
            "learning_rate=learning_rate",
            "learning_rate=1.05 * learning_rate",
            composition(2, {"optimizer.name": name}),
        )
        for name in ("adamw", "muon")
    },
    **{
        f"no_weight_decay_of_{name}": Fault(
            native.Engine.train_step,
            "weight_decay=weight_decay",
            "weight_decay=0.0",
            composition(2, {"optimizer.name": name}),
        )
        for name in ("adamw", "muon", "lamb", "adafactor")
    },
    **{
        f"norms_{name}_of_{optimizer}": Fault(
            native.Engine.train_step,
            "self.optimizer.step()",
            f"(old := [*map(torch.clone, {_NORMS})], self.optimizer.step(), {wrong})",
            composition(2, {"optimizer.name": optimizer}),
        )
        for optimizer in ("adamw", "lion", "muon", "sgd")
        for name, wrong in {
            "not_updated": f"[own.copy_(each) for own, each in zip({_NORMS}, old)]",
            "updated_twice": f"[own.add_(own - each) for own, each in zip({_NORMS}, old)]",
            "decayed": f"[own.sub_(each * {_DECAY}) for own, each in zip({_NORMS}, old)]",
        }.items()
    },
    "hessian_of_too_many_labels": Fault(
        native.Engine._relabelled_gradients,
        "return max(1, num_labels)",
        "return 1.2 * max(1, num_labels)",
        composition(2, {"optimizer.name": "sophia_g"}),
    ),
    "hessian_of_one_rank": Fault(
        native.Engine._relabelled_gradients,
        "self._add_up_gradients()",
        "pass",
        composition(2, {"optimizer.name": "sophia_g"}),
    ),
    # ---- Back ends ----
    "deepspeed_divides_by_data_ranks": Fault(
        deepspeed.Engine._gradients,
        "self.mesh.data.size * self.mesh.context.size",
        "self.mesh.data.size",
        composition(2, DEEPSPEED | CONTEXT | {"zero_stage": 1}),
    ),
    "deepspeed_adds_no_partial_gradients": Fault(
        deepspeed.Engine._mark_parameters,
        "if chunk.placement.partial and self._zero_stage >= 2:",
        "if False:",
        composition(2, DEEPSPEED | SEQUENCE | SHARDED),
    ),
    "accumulated_gradients_not_reduced": Fault(
        pipeline_stages.PipelineStages._set_communication,
        "is_last or self._train.zero_stage >= 2",
        "is_last and self._train.zero_stage < 2",
        composition(2, SHARDED),
    ),
    # ---- Attention, dropout ----
    "ring_overwrites_gradients": Fault(
        ring._Ring.backward,
        "dq_BHLK[:, :, part.queries] += dq",
        "dq_BHLK[:, :, part.queries] = dq",
        composition(2, CONTEXT),
    ),
    "ring_sees_later_keys": Fault(
        ring._parts,
        "_QueryKeySlices(both, head) if",
        "_QueryKeySlices(both, both) if",
        composition(2, CONTEXT),
    ),
    "dropout_forgets_heads_before": Fault(
        Dropout.weights,
        "self.heads.start + axis.rank * num_heads",
        "axis.rank * num_heads",
        composition(2, TENSOR | {"dropout.attention": 0.1}),
    ),
    "dropout_has_the_same_heads_on_each_rank": Fault(
        Dropout.weights,
        "self.heads.start + axis.rank * num_heads",
        "self.heads.start",
        composition(2, ULYSSES | {"dropout.attention": 0.1}),
    ),
    # ---- Coarse ones in 16 bits, whose limits are wide ----
    "copied_gradient_not_added_bf16": Fault(
        collectives.copy,
        "partial(all_reduce, axis=axis)",
        "_identity",
        composition(2, TENSOR | BF16),
    ),
    "all_reduce_takes_the_mean_fp16": Fault(
        collectives.all_reduce,
        "return total",
        "return total / axis.size",
        composition(2, TENSOR | FP16),
    ),
    **EXPERT_FAULTS,
}
