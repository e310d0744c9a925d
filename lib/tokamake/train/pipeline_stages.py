"""The part of the model that this rank trains: its pipeline stages, their weights, their passes.

FSDP2 and torch's schedules divide the work; the back end asks for losses and gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.config.resolved_run import Run
from tokamake.models.common.language_model import DropoutRates, Output, Predictions, predictions
from tokamake.models.common.multi_token_prediction import MTPLosses
from tokamake.models.common.recompute import Recompute
from tokamake.models.common.router_losses import LayerRouting, RouterLosses
from tokamake.models.common.routers import balanced_routers
from tokamake.parallel import sharding
from tokamake.parallel.document_mask import keep_host_ids
from tokamake.parallel.mesh import Mesh
from tokamake.parallel.pipeline import Pipeline
from tokamake.parallel.placement import placements
from tokamake.parallel.sharding import ParameterChunk
from tokamake.runtime.torch_internals import restore_linear
from tokamake.train.batch import MicroBatch, concatenated, to_device
from tokamake.train.loss_factors import SUM_OF_TOKENS, LossFactors
from tokamake.train.numerics import precision_of
from tokamake.train.objectives._base import Labels, objective_class
from tokamake.train.objectives._tasks import TaskObjective

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of forward and backward passes."""


class PipelineStages:
    """This rank's stages; without a pipeline, the whole model. Weights are empty at first.

    Attributes:
        chunks: this rank's part of each parameter.
        buffers: tensors that all ranks of a stage have whole, and that no gradient changes.
        row_losses: sums of the losses of each row, (B,) for each micro batch of the training steps
            so far, on ranks with the last stage; None: they are not kept.
        watch_logits: if given, called with the logits of each micro batch, on the last stage.
        objective: the run's objective.
        routers: losses of routers; None: the family has none.
        further: losses of layers that predict further tokens; None: the model has none.
        sample_losses: (2,) sum of the losses of whole samples, and their number, for each micro
            batch since `take_sample_loss`; without gradients.
        measured: (metrics, 2) results of `ObjectiveBase.measure`, for each micro batch of a
            validation since `take_measured`.

    Args:
        shard: whether FSDP2 does data parallelism; if not, parameters stay plain, in fp32, and in
            ZeRO stage 3 without storage: DeepSpeed allocates and partitions one after the other.
    """

    def __init__(self, run: Run, mesh: Mesh, *, device: torch.device, shard: bool = True) -> None:
        self._run, self._mesh, self._train, self._device = run, mesh, run.train, device
        self.objective = objective_class(run.train.objective)(run, mesh, device=device)
        family = plugins.load("models/*/model", run.architecture.family)
        self.embedding_name: str = family.Model.embedding_name

        # ---- Modules, without weights ----
        restore_linear()
        parallel = run.train.parallel
        layers = parallel.layers_of_stages(run.architecture.num_hidden_layers)
        stages = parallel.stages_of_rank(mesh.pipeline.rank)
        with torch.device("meta"):
            self.modules = {
                n: family.Model(run.architecture, mesh, stage=layers[n]) for n in stages
            }

        # ---- Master weights in fp32: FSDP2 or this class keeps them ----
        num_sharers = mesh.data.size * mesh.context.size
        precision = precision_of(run)
        self._dtype = DTYPES[precision]
        # Without peers, FSDP2 would only add work. A pipeline needs it even so: a pipeline adds up
        # gradients in the precision of its weights, FSDP2 does that in fp32.
        rounds = precision != "fp32" and num_sharers == 1 and mesh.pipeline.size == 1
        self._rounds = shard and rounds
        self._sharded = shard and (num_sharers > 1 or precision != "fp32") and not rounds
        self._allocates = shard or run.train.zero_stage < 3

        self.chunks = [
            chunk for module in self.modules.values() for chunk in self._prepare(module, device)
        ]
        tensor_name = family.Model.tensor_name
        self.buffers = [
            chunk
            for module in self.modules.values()
            for chunk in sharding.buffer_chunks(module, tensor_name=tensor_name)
        ]
        if self._rounds:
            sharding.keep_master_weights(self.chunks, self._dtype)
        self._factors = LossFactors()
        self.routers = self._watch_routers() if run.architecture.has_routers else None
        self.further = self._watch_further() if run.architecture.num_mtp_layers else None
        self.sample_losses: list[Tensor] = []
        self.measured: list[Tensor] = []
        self.watch_logits: Callable[[Tensor], None] | None = None
        self.row_losses: list[Tensor] | None = [] if run.train.log_corpus_losses else None
        self._pipeline = self._make_pipeline(device) if mesh.pipeline.size > 1 else None

    def _prepare(self, module: Any, device: torch.device) -> list[ParameterChunk]:
        """Set up recomputation, compilation and sharding of a stage; allocate its weights."""
        train = self._train
        sizes = train.recompute_method, train.recompute_num_layers, train.parallel.splits_backward
        if any(train.dropout.rates) or module.has_own_dropout:
            module.dropout_rates = DropoutRates(*train.dropout.rates, self._run.seed)
        module.set_recompute(Recompute(train.recompute_granularity, *sizes))
        placed, saved_names = placements(module), module.saved_names()
        if train.compile:
            for layer in module.blocks:
                layer.compile()
        if self._sharded:
            sharding.shard(
                module,
                module.blocks,
                self._mesh,
                policy=MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32),
                reshard_after_forward=train.zero_stage == 3,
                experts=module.experts if self._mesh.expert.size > 1 else (),
            )
        if self._allocates:
            module.to_empty(device=device)
        else:
            sharding.shape_parameters(module, device)
        return sharding.parameter_chunks(
            module,
            placed,
            mesh=self._mesh,
            shapes=model_tensors.shapes(self._run.architecture),
            saved_names=saved_names,
            tied_output=module.tied_output,
        )

    def _watch_routers(self) -> RouterLosses:
        architecture, settings = self._run.architecture, self._train.router
        losses = RouterLosses(
            balance=settings.balance_coefficient,
            z=settings.z_coefficient,
            layers=architecture.expert_layers,
            num_experts=architecture.setting("num_experts"),
            mesh=self._mesh,
            device=self._device,
        )
        for module in self.modules.values():
            module.watch_routers(losses, capacity_factor=settings.capacity_factor)
        return losses

    def _watch_further(self) -> MTPLosses:
        architecture = self._run.architecture
        assert architecture.vocab_size is not None
        losses = MTPLosses(
            scaling_factor=self._train.mtp.loss_scaling_factor,
            num_layers=architecture.num_mtp_layers,
            vocab_size=architecture.vocab_size,
            device=self._device,
            mesh=self._mesh,
            compiled=self._train.compile,
        )
        for module in self.modules.values():
            module.further_losses = losses
        return losses

    def balance_routers(self, measured: Sequence[LayerRouting]) -> None:
        """Change the biases of routers by the choices of a step, which all ranks know."""
        rate = self._train.router.bias_update_rate
        if not rate or not self.buffers:
            return
        counts = {each.layer: each.counts for each in measured}
        for module in self.modules.values():
            for layer, router in balanced_routers(module).items():
                of_layer = np.array(counts[layer], np.float32)
                router.balance(to_device(of_layer, self._device), rate=rate)

    def _use(self, factors: LossFactors) -> None:
        """Choose the factors of the passes that follow."""
        self._factors = factors
        if self.routers is not None:
            self.routers.factor = factors.rows
        if self.further is not None:
            self.further.factors = factors.further

    def _make_pipeline(self, device: torch.device) -> Pipeline:
        for module in self.modules.values():  # before FSDP2, which would move ids to the device
            module.register_forward_pre_hook(keep_host_ids, prepend=True, with_kwargs=True)
        if last := self.modules.get(self._train.parallel.num_stages - 1):
            last.register_forward_hook(_tensors_alone)
        return Pipeline(
            self.modules,
            num_stages=self._train.parallel.num_stages,
            schedule=self._train.parallel.pipeline_schedule,
            loss=self._pipeline_loss,
            axis=self._mesh.pipeline,
            device=device,
        )

    def layer_number(self, parameter: str) -> int | None:
        """Index, in the whole model, of a parameter's layer; None: it is in no layer."""
        number: int | None = next(iter(self.modules.values())).layer_number(parameter)
        return number

    @property
    def copies_embedding(self) -> bool:
        """Whether the last stage of a pipeline has a copy of the embedding."""
        architecture = self._run.architecture
        return architecture.tie_word_embeddings or architecture.num_mtp_layers > 0

    @property
    def is_pipelined(self) -> bool:
        return self._pipeline is not None

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return self._pipeline is None or self._pipeline.has_last

    def _loss(self, predicted: Predictions, labels: Labels) -> Tensor:
        trains = torch.is_grad_enabled()
        if self.watch_logits:
            self.watch_logits(predicted.logits)
        row_losses = self.row_losses if trains else None
        losses = self.objective.losses(predicted, labels, row_losses=row_losses)
        total = self._factors.mean(losses.tokens)
        if self.objective.metrics and not trains:
            self.measured.append(self.objective.measure(predicted, labels))
        if losses.samples is None or losses.num_samples is None:
            return total
        self.sample_losses.append(torch.stack((losses.samples.detach(), losses.num_samples)))
        return total + losses.samples * self._factors.samples

    def _pipeline_loss(self, output: Output, targets: Tensor) -> Tensor:
        """Loss of the output of `_tensors_alone`; for the targets see `_targets`."""
        logits, *of_samples = output if isinstance(output, tuple) else (output,)
        labels = Labels(targets)
        if self.objective.has_sample_labels:
            labels = Labels(targets[:, :-1], targets[:, -1])
        predicted = Predictions(logits, sample_logits=of_samples[0] if of_samples else None)
        return self._loss(predicted, labels)

    def take_sample_loss(self) -> Tensor:
        """(2,) sum of the losses of whole samples since the last call, and their number."""
        losses, self.sample_losses = self.sample_losses, []
        return torch.stack(losses).sum(0) if losses else torch.zeros(2, device=self._device)

    def forget_losses(self) -> None:
        """Drop losses of samples, rows and routers that no step counts."""
        self.sample_losses.clear()
        for losses in (self.routers, self.further):
            if losses is not None:
                losses.forget()
        if self.row_losses is not None:
            self.row_losses.clear()

    def take_measured(self) -> Tensor:
        """(metrics, 2) sums of the measurements since the last call."""
        measured, self.measured = self.measured, []
        if measured:
            return torch.stack(measured).sum(0)
        return torch.zeros((len(self.objective.metrics), 2), device=self._device)

    def forward_backward(
        self,
        batches: Sequence[MicroBatch],
        factors: LossFactors,
        *,
        relabel: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Add up the gradients of micro batches.

        Args:
            relabel: makes the labels of tokens, by the number and the logits of a micro batch;
                None: the labels of the batches. Not for pipelines.

        Returns:
            Sum of the losses times their factors; 0 on ranks without the last stage. Losses of
            routers and of further tokens are not part of it, only their gradients.
        """
        self._use(factors)
        if self._pipeline:
            joined = concatenated([*batches])
            total = self._pipeline.train(
                joined.inputs, _targets(joined), len(batches), **joined.further_inputs
            )
            # At its first step, torch finds the shapes of a stage by a trial pass.
            del self.sample_losses[: -len(batches)]
            for losses in (self.routers, self.further):
                if losses is not None:
                    losses.keep(len(batches))
            return total
        (module,) = self.modules.values()
        sharding.round_master_weights(self.chunks)
        self.look_ahead(batches)
        total = torch.zeros((), device=batches[0].inputs.device)
        for number, batch in enumerate(batches):
            if isinstance(module, FSDPModule):
                self._set_communication(module, is_last=number + 1 == len(batches))
            loss = self.loss(batch, factors, relabel and partial(relabel, number))
            loss.backward()
            total += loss.detach()
            if self._rounds:
                for chunk in self.chunks:
                    chunk.take_gradient()
        return total

    def look_ahead(self, batches: Sequence[MicroBatch]) -> None:
        """Let the objective look at the micro batches of a step; not for pipelines."""
        (module,) = self.modules.values()
        self.objective.look_ahead(partial(_predict, module), batches)

    def _set_communication(self, module: FSDPModule, *, is_last: bool) -> None:
        """Choose FSDP2's steps after the backward pass of a micro batch."""
        module.set_is_last_backward(is_last)
        # Stages 0 and 1 keep whole gradients until the last micro batch.
        module.set_requires_gradient_sync(is_last or self._train.zero_stage >= 2)
        # Only stage 3 frees weights that the next micro batch needs again.
        module.set_reshard_after_backward(is_last or self._train.zero_stage == 3)

    def loss(
        self,
        batch: MicroBatch,
        factors: LossFactors,
        relabel: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Sum of the losses of a micro batch, times their factors; not for pipelines."""
        self._use(factors)
        (module,) = self.modules.values()
        predicted = _predict(module, batch)
        if relabel is None:
            return self._loss(predicted, Labels(batch.labels, batch.sample_labels))
        return self._loss(Predictions(predicted.logits), Labels(relabel(predicted.logits)))

    @torch.no_grad()
    def losses(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Sum of the losses of all tokens of micro batches; 0 on ranks without the last stage.

        `take_sample_loss` has the losses of whole samples.
        """
        self._use(SUM_OF_TOKENS)
        if self._pipeline:
            joined = concatenated([*batches])
            return self._pipeline.evaluate(
                joined.inputs,
                _targets(joined),
                len(batches),
                self._empty_states,
                **joined.further_inputs,
            )
        sharding.round_master_weights(self.chunks)
        self.look_ahead(batches)
        return torch.stack([self.loss(batch, SUM_OF_TOKENS) for batch in batches]).sum()

    @torch.no_grad()
    def sample_outputs(self, batch: MicroBatch) -> Tensor:
        """Outputs (B, ...) of a micro batch that the scores of a task need; not for pipelines."""
        (module,) = self.modules.values()
        sharding.round_master_weights(self.chunks)
        assert isinstance(self.objective, TaskObjective)
        return self.objective.sample_outputs(_predict(module, batch))

    def _empty_states(self, tokens: Tensor) -> Tensor:
        """Buffer for the states of a micro batch that one stage sends to the next."""
        num_samples, length = tokens.shape
        if self._mesh.sequence_parallel:
            length //= self._mesh.tensor.size
        hidden_size = self._run.architecture.hidden_size
        return tokens.new_empty((num_samples, length, hidden_size), dtype=self._dtype)

    def free_gathered_weights(self) -> None:
        """Free weights that FSDP2 has gathered and that no backward pass has freed."""
        for module in self.modules.values():
            for submodule in module.modules():
                if isinstance(submodule, FSDPModule):
                    submodule.reshard()


def _predict(module: Any, batch: MicroBatch) -> Predictions:
    """Run the whole model."""
    return predictions(module(batch.inputs, **batch.further_inputs))


def _tensors_alone(module: Any, inputs: Any, output: Output) -> Tensor | tuple[Tensor, ...]:
    """Output of the last stage as torch's schedules take it."""
    if isinstance(output, Tensor):
        return output
    tensors = tuple(tensor for tensor in output if tensor is not None)
    return tensors if len(tensors) > 1 else tensors[0]


def _targets(batch: MicroBatch) -> Tensor:
    """(B, L) labels of tokens; (B, L + 1), if samples have labels: these are the last column."""
    if batch.sample_labels is None:
        return batch.labels
    return torch.cat((batch.labels, batch.sample_labels[:, None]), dim=1)
