"""Wrong factors and forgotten sums, planted in the code that divides a step among ranks."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.support.composition_axes import Values
from tests.support.compositions import Composition
from tests.support.proved_compositions import prove_all
from tokamake.models.common.experts import ExpertLinear
from tokamake.models.common.latent_attention import LatentNorm
from tokamake.models.common.multi_token_prediction import MTPDecoder, MTPLosses
from tokamake.models.common.router_losses import RouterLosses
from tokamake.models.common.routers import BalancedRouter, Router
from tokamake.parallel import (
    attention,
    collectives,
    expert_dispatch,
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


def composition(
    world_size: int, values: Values, family: str = "llama", objective: str = "causal"
) -> Composition:
    single = Composition(family, objective, values, 3)
    size = world_size // single.world_size
    return single._replace(values=values | {"data_parallel_size": size})


TENSOR = {"parallel.tensor_parallel_size": 2}
SEQUENCE = TENSOR | {"parallel.sequence_parallel": True}
CONTEXT = {"parallel.context_parallel_size": 2}
ULYSSES = CONTEXT | {"parallel.context_parallel_method": "ulysses"}
PIPELINE = {"parallel.pipeline_parallel_size": 2}
EXPERTS = {"parallel.expert_parallel_size": 2, "architecture.num_experts": 4}
TIED = {"architecture.tie_word_embeddings": True}
SHARDED = {"zero_stage": 2}
MASKED = {"eod_mask_loss": True}
DEEPSPEED = {"backend": "deepspeed"}
FURTHER = {"architecture.num_nextn_predict_layers": 1}


class Fault(NamedTuple):
    """A change of a function's source, and a composition that shows it."""

    function: Callable[..., Any]
    right: str
    wrong: str
    shown_by: Composition


FAULTS = [
    # ---- Collectives ----
    Fault(collectives.copy, "partial(all_reduce, axis=axis)", "_identity", composition(2, TENSOR)),
    Fault(
        collectives.add,
        "_identity)",
        "lambda g: g * axis.size)",
        composition(2, TENSOR),
    ),
    Fault(
        collectives.gather,
        "partial(reduce_scatter, axis=axis, dim=dim))",
        "lambda g: reduce_scatter(g, axis, dim=dim) / axis.size)",
        composition(2, SEQUENCE),
    ),
    Fault(
        collectives.scatter_sum,
        "partial(all_gather, axis=axis, dim=dim))",
        "lambda g: all_gather(g, axis, dim=dim) / axis.size)",
        composition(2, SEQUENCE),
    ),
    Fault(
        collectives.all_reduce,
        "return total",
        "return total / axis.size",
        composition(2, TENSOR),
    ),
    Fault(
        collectives.reduce_scatter,
        "return part.movedim",
        "return (part / axis.size).movedim",
        composition(2, SEQUENCE),
    ),
    # ---- Placements ----
    Fault(
        tensor.RMSNorm.__init__,
        "partial=mesh.sequence_parallel",
        "partial=False",
        composition(2, SEQUENCE),
    ),
    Fault(
        tensor.LayerNorm.__init__,
        "partial=mesh.sequence_parallel",
        "partial=mesh.tensor.size > 1",
        composition(2, TENSOR, "gpt"),
    ),
    Fault(
        tensor.ReplicatedEmbedding.__init__,
        "partial=mesh.sequence_parallel",
        "partial=False",
        composition(2, SEQUENCE, "gpt"),
    ),
    Fault(
        tensor.ReplicatedLinear.__init__,
        "Placement(partial=True)",
        "Placement()",
        composition(2, TENSOR | {"architecture.num_key_value_heads": 1}),
    ),
    Fault(
        tensor.RowParallelLinear.__init__,
        "Placement(partial=mesh.sequence_parallel)",
        "Placement()",
        composition(2, SEQUENCE, "gpt"),
    ),
    Fault(
        tensor.RowParallelLinear.forward,
        "y_BLE + self.bias",
        "y_BLE + self.bias * self._mesh.tensor.size",
        composition(2, TENSOR | {"optimizer.name": "sgd"}, "gpt"),
    ),
    Fault(sharding.add_up_partial, "if axis.size == 1", "if True", composition(2, SEQUENCE)),
    Fault(
        sharding._all_reduce,
        "tensor.copy_(total)",
        "tensor.copy_(total / 2)",
        composition(2, SEQUENCE),
    ),
    Fault(
        tied_embeddings.add_up_copies,
        "own.add_(theirs)",
        "own.add_(theirs, alpha=0.5)",
        composition(2, PIPELINE | TIED),
    ),
    # ---- Losses ----
    Fault(
        loss._over_ranks,
        "sums_2N[0].log() + max_N, sums_2N[1]",
        "sums_2N[0].log() + lse_N, sums_2N[1]",
        composition(2, TENSOR),
    ),
    Fault(
        _base.EngineBase._num_labels,
        "num_copies = mesh.tensor.size * mesh.pipeline.size",
        "num_copies = mesh.tensor.size",
        composition(2, PIPELINE | MASKED),
    ),
    Fault(
        _base.EngineBase._num_labels,
        "own * mesh.data.size * mesh.context.size",
        "own * mesh.data.size",
        composition(2, CONTEXT),
    ),
    Fault(
        _base.EngineBase._num_labels,
        "dist.all_reduce(sums)",
        "sums *= dist.get_world_size()",
        composition(2, MASKED),
    ),
    Fault(
        _base.EngineBase._loss_factors,
        "* self.mesh.data.size",
        "* self._ranks.world_size",
        composition(2, TENSOR, "bert", "masked"),
    ),
    Fault(
        pipeline_stages.PipelineStages._pipeline_loss,
        "return self._loss(predicted, labels)",
        "return self._loss(predicted, labels) / self._mesh.pipeline.size",
        composition(2, PIPELINE),
    ),
    Fault(
        pipeline.Pipeline._schedule_of,
        "scale_grads=False",
        "scale_grads=True",
        composition(2, PIPELINE),
    ),
    Fault(
        _in_batch.InBatchObjective.look_ahead,
        "gradients[0].split",
        "(gradients[0] / len(batches)).split",
        composition(2, {}, "biencoder", "ict"),
    ),
    # ---- Norms and clipping ----
    Fault(
        sharding.squares,
        "if each.counts and each.local.grad",
        "if each.local.grad",
        composition(2, TENSOR),
    ),
    Fault(
        gradient_clipping.clip_coefficient,
        "limit / (norm + 1e-6)",
        "limit / (norm * norm + 1e-6)",
        composition(2, {}),
    ),
    Fault(
        native.Engine.train_step,
        "/ measured.loss_scale",
        "* measured.loss_scale",
        composition(2, {"precision": "fp16"}),
    ),
    # ---- Routers ----
    Fault(
        RouterLosses.gradient,
        "factor / self._mesh.tensor.size",
        "factor",
        composition(2, TENSOR, "qwen3_moe"),
    ),
    Fault(
        RouterLosses.added,
        "if self._mesh.context.size > 1:",
        "if False:",
        composition(2, CONTEXT, "qwen3_moe"),
    ),
    Fault(
        Router.__init__,
        "partial=mesh.tensor.size > 1",
        "partial=False",
        composition(2, TENSOR, "mixtral"),
    ),
    Fault(
        _base.EngineBase._num_labels,
        "num_rows * mesh.data.size)",
        "num_rows)",
        composition(2, {}, "olmoe"),
    ),
    Fault(
        pipeline_stages.PipelineStages._use,
        "self.routers.factor = factors.rows",
        "self.routers.factor = factors.rows and factors.rows * self._mesh.pipeline.size",
        composition(2, PIPELINE, "olmoe"),
    ),
    # ---- Expert parallelism ----
    *(
        Fault(
            expert_dispatch._Exchanged.backward,
            "return back,",
            f"return back {factor} ctx.axis.size,",
            composition(2, EXPERTS, "mixtral"),
        )
        for factor in "*/"
    ),
    Fault(
        sharding.shard,
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(mesh.shards.size() / shards.size())",
        composition(4, EXPERTS | SHARDED, "qwen3_moe"),
    ),
    Fault(
        sharding.shard,
        "(each, mesh.expert_shards)",
        "(each, mesh.shards)",
        composition(4, EXPERTS, "olmoe"),
    ),
    Fault(
        sharding.parameter_chunks,
        "and name != tied_output",
        "and (mesh.expert.rank == 0 or not placed[name].axes)",
        composition(2, EXPERTS | {"zero_stage": 0}, "mixtral"),
    ),
    Fault(
        sharding._replica,
        "mesh.get_local_rank(0) if mesh.ndim > 1 else 0",
        "0",
        composition(4, EXPERTS | {"zero_stage": 0}, "mixtral"),
    ),
    Fault(
        sharding._place,
        "(*splits, *placement.axes)",
        "splits",
        composition(2, EXPERTS, "mixtral"),
    ),
    Fault(
        ExpertLinear.__init__,
        "Placement(divided, axes=axes",
        "Placement(divided",
        composition(2, EXPERTS, "mixtral"),
    ),
    Fault(
        BalancedRouter.balance,
        "counts_E.mean() - counts_E",
        "counts_E - counts_E.mean()",
        composition(2, {}, "deepseek_v3"),
    ),
    Fault(
        LatentNorm.__init__,
        "partial=mesh.tensor.size > 1",
        "partial=False",
        composition(2, TENSOR, "deepseek_v3"),
    ),
    # ---- Layers that predict further tokens ----
    Fault(
        _base.EngineBase._num_labels,
        "further=sums[2:] // num_copies",
        "further=sums[:1] // num_copies",
        composition(2, FURTHER, "deepseek_v3"),
    ),
    Fault(
        _base.EngineBase._num_labels,
        "for batch in batches if has_further",
        "for batch in batches[:1] if has_further",
        composition(2, FURTHER, "glm4_moe"),
    ),
    Fault(
        pipeline_stages.LossFactors.times,
        "scaled.times_added(factor)",
        "scaled",
        composition(2, FURTHER | DEEPSPEED | {"zero_stage": 1}, "glm4_moe"),
    ),
    Fault(
        MTPDecoder.layer,
        "self.mesh.sequence_parallel",
        "False",
        composition(2, FURTHER | SEQUENCE, "deepseek_v3"),
    ),
    Fault(
        native.Engine._add_up_gradients,
        "if self.stages.copies_embedding:",
        "if self._run.architecture.tie_word_embeddings:",
        composition(2, FURTHER | PIPELINE, "deepseek_v3"),
    ),
    Fault(
        MTPLosses.take,
        "self._mesh.tensor.rank == 0",
        "True",
        composition(2, FURTHER | TENSOR, "glm4_moe"),
    ),
    # ---- Updates ----
    *(
        Fault(
            native.Engine.train_step,
            "learning_rate=learning_rate",
            "learning_rate=1.05 * learning_rate",
            composition(2, {"optimizer.name": name}),
        )
        for name in ("adamw", "muon")
    ),
    *(
        Fault(
            native.Engine.train_step,
            "weight_decay=weight_decay",
            "weight_decay=0.0",
            composition(2, {"optimizer.name": name}),
        )
        for name in ("adamw", "muon", "lamb", "adafactor")
    ),
    # ---- Back ends ----
    Fault(
        deepspeed.Engine._gradients,
        "self.mesh.data.size * self.mesh.context.size",
        "self.mesh.data.size",
        composition(2, DEEPSPEED | CONTEXT | {"zero_stage": 1}),
    ),
    Fault(
        deepspeed.Engine._mark_parameters,
        "if chunk.placement.partial and self._zero_stage >= 2:",
        "if False:",
        composition(2, DEEPSPEED | SEQUENCE | SHARDED),
    ),
    Fault(
        pipeline_stages.PipelineStages._set_communication,
        "is_last or self._train.zero_stage >= 2",
        "is_last and self._train.zero_stage < 2",
        composition(2, SHARDED),
    ),
    # ---- Attention, dropout ----
    Fault(
        ring._Ring.backward,
        "dq_BHLK[:, :, part.queries] += dq",
        "dq_BHLK[:, :, part.queries] = dq",
        composition(2, CONTEXT),
    ),
    Fault(
        ring._parts,
        "_QueryKeySlices(both, head) if",
        "_QueryKeySlices(both, both) if",
        composition(2, CONTEXT),
    ),
    # ---- Sinks, biases of experts ----
    Fault(
        ExpertLinear.__init__,
        "self._adds_bias = mesh.tensor.rank == 0",
        "self._adds_bias = True",
        composition(2, TENSOR, "gpt_oss"),
    ),
    Fault(
        ExpertLinear.__init__,
        "dim=None, partial=is_divided",
        "dim=None",
        composition(2, TENSOR, "gpt_oss"),
    ),
    Fault(
        ring._Ring.forward,
        "if sinks_H is not None:",
        "for _ in range(2):",
        composition(2, CONTEXT, "gpt_oss"),
    ),
    Fault(
        attention._ulysses,
        "rules.sinks.unflatten(0, (size, -1))[axis.rank]",
        "rules.sinks.unflatten(0, (size, -1))[0]",
        composition(2, ULYSSES, "gpt_oss"),
    ),
    Fault(
        Dropout.weights,
        "self.heads.start + axis.rank * num_heads",
        "axis.rank * num_heads",
        composition(2, TENSOR | {"dropout.attention": 0.1}),
    ),
    Fault(
        Dropout.weights,
        "self.heads.start + axis.rank * num_heads",
        "self.heads.start",
        composition(2, ULYSSES | {"dropout.attention": 0.1}),
    ),
]


def plant(fault: Fault) -> None:
    """Change the function in this process, wherever it is imported.

    The new code replaces the old function's code, since other modules hold the function itself.
    """
    source = textwrap.dedent(inspect.getsource(fault.function))
    assert source.count(fault.right) == 1, f"{fault.right!r} in {fault.function.__qualname__}"
    changed = source.replace(fault.right, fault.wrong)
    changed = changed.removeprefix("@staticmethod\n").removeprefix("@once_differentiable\n")
    function = inspect.unwrap(fault.function)
    cells = function.__code__.co_freevars
    # A function that uses `super` or `self.__class__` has a cell for its class.
    around = f"def around({', '.join(cells)}):\n{textwrap.indent(changed, '    ')}\n"
    around += f"    return {function.__name__}\n"
    namespace: dict[str, Any] = {}
    exec(around, function.__globals__, namespace)
    made = inspect.unwrap(namespace["around"](*cells))
    function.__code__ = made.__code__


def prove_with(fault: Fault) -> list[list[str]]:
    """Prove the fault's composition on these ranks with the fault in place."""
    plant(fault)
    return prove_all([fault.shown_by])
