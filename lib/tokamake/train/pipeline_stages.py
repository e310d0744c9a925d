"""The part of the model that this rank trains: its stages, their weights, their passes.

Architecture and mesh come from the run, weights from the back end, which asks for losses and
gradients. Data parallelism is FSDP2, the pipeline torch's schedules.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.models.common.language_model import Output, logits_and_auxiliary_loss
from tokamake.models.common.recompute import Recompute
from tokamake.parallel import sharding
from tokamake.parallel.loss import NO_LABEL, cross_entropy, drawn
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.pipeline import Pipeline, stages_of_rank
from tokamake.parallel.sharding import Held
from tokamake.parallel.tensor import placements
from tokamake.train.batch import MicroBatch, concatenated
from tokamake.train.numerics import precision_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats of forward and backward passes."""


class PipelineStages:
    """This rank's stages; on one pipeline rank, the whole model. Whoever makes them fills `held`.

    Attributes:
        held: what this rank has of each parameter.
        num_averaged: ranks over which gradients are averaged where they should be summed.

    Args:
        run: the resolved run.
        mesh: this rank among its peers.
        device: where the stages live.
        shard: whether FSDP2 is data parallelism here; else parameters stay plain, in fp32.
    """

    def __init__(
        self,
        run: Run,
        mesh: Mesh,
        device: torch.device,
        *,
        shard: bool = True,
    ) -> None:
        self._run, self._mesh, self._train = run, mesh, run.train
        self._vocabulary = run.architecture.vocab_size
        family = plugins.load("models/*/model", run.architecture.family)
        parallel = run.train.parallel
        if family.Model.has_auxiliary_loss and parallel.pipeline_parallel_size > 1:
            raise UserError(
                f"train.parallel.pipeline_parallel_size: {parallel.pipeline_parallel_size}: a "
                f"pipeline does not carry the auxiliary losses of {run.architecture.family}; set 1"
            )
        layers = parallel.layers_of_stages(run.architecture.num_hidden_layers)
        numbers = stages_of_rank(
            parallel.pipeline_schedule,
            mesh.pipeline.rank,
            ranks=mesh.pipeline.size,
            num_stages=parallel.num_stages,
        )
        with torch.device("meta"):
            self.modules = {n: family.Model(run.architecture, mesh, layers[n]) for n in numbers}
        several = mesh.data.size * mesh.context.size > 1
        precision = precision_of(run.train, device)
        self._dtype = DTYPES[precision]
        # A pipeline adds up gradients in the precision of its weights; FSDP2 sees to fp32 there.
        rounded = precision != "fp32" and not several and mesh.pipeline.size == 1
        self._rounded = shard and rounded
        self._sharded = shard and (several or precision != "fp32") and not rounded
        self.num_averaged = mesh.data.size * mesh.context.size if self._sharded else 1
        self._rename = family.Model.tensor_name
        self.embedding_name: str = family.Model.embedding_name
        self.held = [
            held for module in self.modules.values() for held in self._ready(module, device)
        ]
        if self._rounded:
            sharding.keep_originals(self.held, self._dtype)
        self._scale = 1.0
        self._pipeline = self._make_pipeline(device) if mesh.pipeline.size > 1 else None

    def _ready(self, module: Any, device: torch.device) -> list[Held]:
        """Shard a stage, make room for its weights, and say what this rank has of it."""
        train = self._train
        granularity, method = train.recompute_granularity, train.recompute_method
        module.set_recompute(Recompute(granularity, method, train.recompute_num_layers))
        placed = placements(module)
        if train.compile:
            for layer in module.layers.values():
                layer.compile()
        if self._sharded:
            sharding.shard(
                module,
                module.layers.values(),
                self._mesh,
                policy=MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32),
                reshard_after_forward=train.zero_stage == 3,
            )
        module.to_empty(device=device)
        copy = module.output_name if module.has_copy else None
        names = {
            name: self._rename(module.embedding_name if name == copy else name) for name in placed
        }
        return sharding.held_by(
            module,
            placed,
            self._mesh,
            shapes=model_tensors.shapes(self._run.architecture),
            saved_names=names,
            copy=copy,
        )

    def _make_pipeline(self, device: torch.device) -> Pipeline:
        return Pipeline(
            self.modules,
            num_stages=self._train.parallel.num_stages,
            schedule=self._train.parallel.pipeline_schedule,
            loss=self._loss,
            axis=self._mesh.pipeline,
            device=device,
        )

    @property
    def in_turns(self) -> bool:
        """Whether micro batches pass through a pipeline, many at once."""
        return self._pipeline is not None

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return self._pipeline is None or self._pipeline.has_last

    def _loss(self, output: Output, labels: Tensor) -> Tensor:
        assert self._vocabulary is not None
        logits, auxiliary_loss = logits_and_auxiliary_loss(output)
        total = cross_entropy(logits, labels, self._mesh, size=self._vocabulary)
        if auxiliary_loss is not None and torch.is_grad_enabled():
            # It is a mean per token, `total` a sum. Validation reports cross entropy alone.
            total = total + auxiliary_loss * (labels != NO_LABEL).sum()
        return total * self._scale

    def forward_backward(
        self, batches: Sequence[MicroBatch], scale: float, chances: Sequence[Tensor] = ()
    ) -> Tensor:
        """Add up the gradients of micro batches.

        Args:
            batches: this rank's micro batches of a step.
            scale: what the sum of the losses of tokens is multiplied with.
            chances: of each micro batch, to draw labels by instead of its own; of a model in one
                stage.

        Returns:
            Sum of the losses times `scale`; 0 where the last stage is not.
        """
        self._scale = scale
        if self._pipeline:
            whole = concatenated([*batches])
            return self._pipeline.train(whole.inputs, whole.labels, len(batches), **whole.apart)
        (module,) = self.modules.values()
        sharding.round_originals(self.held)
        total = torch.zeros((), device=batches[0].inputs.device)
        for number, batch in enumerate(batches, 1):
            if isinstance(module, FSDPModule):
                # Stages 0 and 1 keep whole gradients until the last micro batch.
                now = number == len(batches)
                module.set_is_last_backward(now)
                module.set_requires_gradient_sync(now or self._train.zero_stage >= 2)
                # Stage 3 alone lets go of weights that the next micro batch needs again.
                module.set_reshard_after_backward(now or self._train.zero_stage == 3)
            loss = self.loss(batch, scale, chances[number - 1] if chances else None)
            loss.backward()
            total += loss.detach()
            if self._rounded:
                for held in self.held:
                    held.take_gradient()
        return total

    def loss(self, batch: MicroBatch, scale: float, chances: Tensor | None = None) -> Tensor:
        """Sum of the losses of a micro batch's tokens, times `scale`; of a model in one stage.

        With `chances`, labels are drawn by these from the model itself, where there are any.
        """
        self._scale = scale
        (module,) = self.modules.values()
        output, labels = module(batch.inputs, **batch.apart), batch.labels
        if chances is not None:
            assert self._vocabulary is not None
            logits, _ = logits_and_auxiliary_loss(output)
            own = drawn(logits, chances.to(logits.device), self._mesh, size=self._vocabulary)
            return self._loss(logits, own.where(labels != NO_LABEL, labels))
        return self._loss(output, labels)

    @torch.no_grad()
    def losses(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Sum of the losses of all tokens of some micro batches; 0 where the last stage is not."""
        self._scale = 1.0
        if self._pipeline:
            whole = concatenated([*batches])
            return self._pipeline.evaluate(
                whole.inputs, whole.labels, len(batches), self._states, **whole.apart
            )
        sharding.round_originals(self.held)
        return torch.stack([self.loss(batch, 1.0) for batch in batches]).sum()

    def _states(self, tokens: Tensor) -> Tensor:
        """Room for the states of a micro batch between two stages."""
        samples, length = tokens.shape
        if self._mesh.sequence_parallel:
            length //= self._mesh.tensor.size
        width = self._run.architecture.hidden_size
        return tokens.new_empty((samples, length, width), dtype=self._dtype)

    def forget_whole_weights(self) -> None:
        """Let go of what FSDP2 has gathered and no backward pass has let go of."""
        for module in self.modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
