"""Parts of the engines of all back ends: steps, token counts, sums over ranks."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from tokamake import plugins
from tokamake.checkpoint.native.flat_chunks import FlatChunks
from tokamake.config.resolved_run import Run
from tokamake.models.common.router_losses import LayerRouting
from tokamake.optim._groups import parameter_groups
from tokamake.optim._sharded_parameters import UNSHARDED, ParameterShard, WholeParameters
from tokamake.parallel import mesh
from tokamake.parallel.context import share
from tokamake.parallel.loss import NO_LABEL, drawn, over_vocabulary
from tokamake.parallel.sharding import ParameterChunk
from tokamake.runtime.cores import keep_freed_memory
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends import _initial_weights as initial_weights
from tokamake.train.backends._checkpoints import EngineCheckpoints
from tokamake.train.bad_steps import bad_ranks
from tokamake.train.batch import MicroBatch, SampleIds, to_device
from tokamake.train.loss_factors import LossFactors
from tokamake.train.metrics import Validation
from tokamake.train.numerics import precision_of
from tokamake.train.pipeline_stages import PipelineStages
from tokamake.train.random_state import seed_all
from tokamake.train.stability.loss_scale import LossScale
from tokamake.train.stability.verification import check_ranks_repeat
from tokamake.train.step_counts import StepCounts
from tokamake.train.step_result import StepResult


class GradientSums(NamedTuple):
    """Sums over the micro batches and the parameters of this rank."""

    loss: Tensor
    """Sum of the losses times `scale`; 0 on ranks without the last stage."""
    squares: Tensor
    """Sum of squared gradients of the loss times `scale`."""
    layers: Tensor | None = None
    """Sum of squares of each layer; None: not measured."""
    scale: float = 1.0


class EngineBase(EngineCheckpoints):
    """One rank's part of the model and its optimizer; its weights are empty at first.

    Args:
        shard: whether FSDP2 does data parallelism.
    """

    _state_kinds: dict[str, str]
    _own_sums: tuple[Tensor, Tensor]
    _counts: StepCounts

    def __init__(self, run: Run, ranks: Ranks, *, device: torch.device, shard: bool) -> None:
        self._run, self._ranks, self._device = run, ranks, device
        seed_all(run.seed)
        if device.type == "cpu":
            keep_freed_memory()
        sharded = run.train.zero_stage > 0
        self.mesh = mesh.build(run.train.parallel, ranks.world_size, device=device, shard=sharded)
        self.stages = PipelineStages(run, self.mesh, device=device, shard=shard)
        self._chunks: list[ParameterChunk] = self.stages.chunks
        self._loss_scale = LossScale(precision_of(run), run.train.loss_scaling)
        # Saves run beside training; their collectives must not mix with training's.
        self._save_group = dist.new_group(backend="gloo")

    # ---- First weights and optimizer ----

    @abstractmethod
    def _weights(self) -> Iterable[tuple[ParameterChunk, FlatChunks]]:
        """This rank's parameter shards."""

    def check_finite(self, start: Path) -> None:
        """Check that no weight of the initial checkpoint is NaN or infinite."""
        initial_weights.check_finite([*self._weights()], start)

    def _build_optimizer(self, *, whole: bool) -> torch.optim.Optimizer:
        """Make the run's optimizer; with `whole`, it may gather whole parameters."""
        settings = self._run.train.optimizer
        named = [(chunk.name, chunk.local) for chunk in self._chunks]
        parts: dict[Tensor, ParameterShard] = {
            chunk.local: ParameterShard(tuple(chunk.shape), chunk.place, chunk.groups)
            for chunk in self._chunks
        }
        placements = {chunk.name: chunk.placement for chunk in self._chunks}
        decay = settings.used("weight_decay")
        groups = parameter_groups(named, decay, placements=placements)
        plug_in = plugins.load("optim", settings.name)
        self._state_kinds = plug_in.STATE
        view = WholeParameters(parts.__getitem__) if whole else UNSHARDED
        optimizer: torch.optim.Optimizer = plug_in.build(groups, settings, whole=view)
        return optimizer

    # ---- Steps ----

    def _losses(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Sum of the losses of all tokens of micro batches; 0 on ranks without the last stage."""
        losses = self.stages.losses(batches)
        self.stages.free_gathered_weights()
        return losses

    def _batches(self, rows: Sequence[Any], samples: SampleIds | None = None) -> list[MicroBatch]:
        """Micro batches on the device; without the numbers of samples, nothing is dropped."""
        numbers = [None] * len(rows) if samples is None else samples.numbers
        return [
            self.stages.objective.to_batch(each, sample_numbers=numbers_B)
            for each, numbers_B in zip(rows, numbers, strict=True)
        ]

    def check_repeats(
        self, rows: Sequence[Any], *, samples: SampleIds, hosts: Sequence[str], step: int
    ) -> None:
        """Check that all ranks compute the same bits twice; see `check_ranks_repeat`.

        Args:
            rows: micro batches of a step; the first one is computed, or as many as the pipeline has
                ranks, because each schedule allows this number.
        """
        self._set_mode("train")
        size = self.mesh.pipeline.size
        batches = self._batches(rows[:size], samples._replace(numbers=samples.numbers[:size]))
        # Means keep 16-bit gradients finite.
        factor = 1 / max(1, batches[0].labels.numel())
        # torch.compile would compile again for the log.
        with torch.compiler.set_stance("force_eager"):
            check_ranks_repeat(
                partial(self._pass, batches, LossFactors(factor, factor)),
                [*self.stages.modules.values()],
                weights=[each for _, flat in self._weights() for each in flat.chunks.values()],
                log=self.mesh.log,
                warm_up=self.stages.is_pipelined,
                hosts=hosts,
                step=step,
            )
        self.stages.forget_losses()

    @abstractmethod
    def _pass(self, batches: Sequence[MicroBatch], factors: LossFactors) -> Tensor:
        """Compute the gradients of micro batches, and drop them; return the sum of the losses."""

    def _loss_factors(self, batches: Sequence[MicroBatch]) -> LossFactors:
        """1/labels and 1/samples of this step, over all ranks."""
        num_samples = batches[0].num_sample_labels
        if num_samples is None:  # all data-parallel ranks have as many samples
            of_rank = [each.sample_labels for each in batches if each.sample_labels is not None]
            num_samples = sum(map(len, of_rank)) * self.mesh.data.size
        self._counts = self._num_labels(batches)._replace(samples=num_samples)
        return self._counts.factors

    def _num_labels(self, batches: Sequence[MicroBatch]) -> StepCounts:
        """Number of tokens with a loss, and of rows, over all ranks."""
        mesh = self.mesh
        num_rows = sum(len(batch.inputs) for batch in batches)
        has_further = self.stages.further is not None
        if not self.stages.objective.counts_labels and not has_further:
            own = sum(batch.labels.numel() for batch in batches)
            num_labels = own * mesh.data.size * mesh.context.size
            return StepCounts(num_labels, num_rows * mesh.data.size)
        counts = [(batch.labels != NO_LABEL).sum() for batch in batches]
        rows = torch.full((), num_rows, device=self._device)
        further = [batch.further_inputs["further_labels"] for batch in batches if has_further]
        of_layers = [(labels != NO_LABEL).sum((0, 1)) for labels in further]
        sums = torch.cat((torch.stack((torch.stack(counts).sum(), rows)), *_added_up(of_layers)))
        dist.all_reduce(sums)
        # Tensor- and pipeline-parallel ranks have the same labels. Context-parallel ranks have the
        # same rows, too.
        num_copies = mesh.tensor.size * mesh.pipeline.size
        return StepCounts(
            sums[0] // num_copies,
            sums[1] // (num_copies * mesh.context.size),
            further=sums[2:] // num_copies if has_further else None,
        )

    def _sum_over_ranks(
        self,
        sums: GradientSums,
        *,
        stop: bool = False,
        saved: bool = False,
        corpora: Tensor | None = None,
    ) -> StepResult:
        """Agree on a step's results in one collective.

        Args:
            corpora: (corpora, 2) the result of `_corpus_sums`.
        """
        loss, squares, layers, scale = sums
        self._own_sums = loss, squares
        # Tensor-parallel ranks have the same loss; ranks without the last stage have none.
        own = loss if self.mesh.tensor.rank == 0 else torch.zeros_like(loss)
        # The flags travel with the loss, because a second collective would cost its latency.
        flags = to_device(np.array([stop, saved], np.float32), self._device)
        parts = [torch.stack((own, squares)).float(), flags]
        samples = None
        if self._run.architecture.has_sample_head:
            samples = self.stages.take_sample_loss() * (self.mesh.tensor.rank == 0)
        self.stages.sample_losses.clear()
        routers = self.stages.routers
        choices = routers.take() if routers is not None else None
        further = self.stages.further.take() if self.stages.further is not None else None
        optional = [
            part.flatten()
            for part in (layers, corpora, samples, further, choices)
            if part is not None
        ]
        of_ranks = torch.cat([*parts, *optional])
        dist.all_reduce(of_ranks)
        values, num_labels, num_rows, further_labels = self._counts.read(of_ranks)
        total, square, num_stops, num_saved, *rest = values
        all_saved = num_saved == self._ranks.world_size
        of_routers: tuple[LayerRouting, ...] = ()
        if routers is not None:
            of_routers = routers.read(rest[-routers.size :], num_rows)
            del rest[-routers.size :]
        further_losses: tuple[float, ...] = ()
        if number := len(further_labels):
            pairs = zip(rest[-number:], further_labels, strict=True)
            further_losses = tuple(total / max(1, labels) for total, labels in pairs)
            del rest[-number:]
        num_layers = 0 if layers is None else len(layers)
        norms = tuple(math.sqrt(each) / scale for each in rest[:num_layers])
        sample_loss = None
        if samples is not None:
            *rest, of_samples, num_samples = rest
            sample_loss = of_samples / max(1, num_samples)
        of_corpora = (*zip(rest[num_layers::2], rest[num_layers + 1 :: 2], strict=True),)
        return StepResult(
            total / scale,
            math.sqrt(square) / scale,
            stop=num_stops > 0,
            saved=all_saved,
            skipped=False,
            loss_scale=self._loss_scale.value,
            layer_norms=norms,
            corpus_losses=of_corpora,
            sample_loss=sample_loss,
            has_labels=num_labels + self._counts.samples > 0,
            num_rows=num_rows,
            routers=of_routers,
            further_losses=further_losses,
        )

    def _corpus_sums(
        self, batches: Sequence[MicroBatch], samples: SampleIds | None
    ) -> Tensor | None:
        """Sum of the losses in nats, and number of tokens, of each corpus in this rank's batches.

        Returns:
            (corpora, 2) fp32, zeros on ranks that do not count; None: they are not measured.
        """
        if samples is None or samples.corpora is None or self.stages.row_losses is None:
            return None
        sums = torch.zeros((samples.num_corpora, 2), device=self._device)
        if self.stages.has_loss and self.mesh.tensor.rank == 0:
            # An optimizer that draws labels makes its passes before the step.
            losses = torch.cat(self.stages.row_losses[-len(batches) :])
            tokens = torch.cat([(batch.labels != NO_LABEL).sum(-1) for batch in batches])
            of_rows = to_device(samples.corpora.flatten(), self._device)
            mask = of_rows == torch.arange(samples.num_corpora, device=self._device)[:, None]
            values = torch.stack((losses, tokens.float()), dim=1)
            # A sum has the same bits in each run, unlike index_add_ on a GPU.
            sums = torch.where(mask[:, :, None], values, 0).sum(1)
        self.stages.row_losses.clear()
        return sums

    def bad_ranks(self) -> list[int]:
        """Ranks that the last step's bad numbers come from; all ranks call it after a bad step."""
        own = tuple(value.item() for value in self._own_sums)
        values: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(values, own)
        return bad_ranks(values)

    def validate(self, rows: Iterable[Any]) -> Validation:
        """Mean loss, and metrics, over all labels of the micro batches of all ranks."""
        self._set_mode("eval")
        self.stages.take_sample_loss()  # of training
        metrics = self.stages.objective.metrics
        total = torch.zeros(4 + 2 * len(metrics), dtype=torch.float64, device=self._device)
        # A pipeline needs the micro batches of a whole step to be busy.
        size = 1
        if self.stages.is_pipelined or self.stages.objective.compares_samples:
            train = self._run.train
            size = train.batch_sizes.num_micro_batches(train.micro_batch_size, self.mesh.data.size)
        remaining = iter(rows)
        while arrays := [*islice(remaining, size)]:
            batches = self._batches(arrays)
            total[0] += self._losses(batches)
            total[1] += sum((batch.labels != NO_LABEL).sum() for batch in batches)
            total[2:4] += self.stages.take_sample_loss()
            total[4:] += self.stages.take_measured().flatten()
        if not self.stages.has_loss or self.mesh.tensor.rank:
            total.zero_()
        dist.all_reduce(total)
        of_tokens, num_labels, of_samples, num_samples, *measured = total.tolist()
        loss = of_tokens / max(1, num_labels) + of_samples / max(1, num_samples)
        sums = zip(metrics, measured[::2], measured[1::2], strict=True)
        return Validation(
            loss if num_labels + num_samples else None,
            {name: value / number for name, value, number in sums if number},
        )

    @torch.no_grad()
    def next_tokens(
        self,
        rows: npt.NDArray[np.int64],
        *,
        lengths: Sequence[int],
        vocab_size: int,
        temperature: float,
        chances: npt.NDArray[np.float64],
    ) -> list[int]:
        """Draw a token after the beginning of each row; all ranks have the same arguments.

        The training does not change. An optimizer that averages weights does not swap its average
        in: to swap back would change the weights by rounding.

        Args:
            rows: (B, L + 1) tokens.
            lengths: known tokens of each row, at least one; a causal model ignores the rest.
            vocab_size: tokens to choose from; the model may have padding after them.
            temperature: of the softmax; 0: the most likely token.
            chances: (B,) numbers in [0, 1) that decide the draws.
        """
        mesh, size = self.mesh, self._run.architecture.vocab_size or 0
        is_last = np.arange(rows.shape[1] - 1) == np.subtract(lengths, 1)[:, None]
        is_last_BL = share(to_device(is_last, self._device), axis=mesh.context)
        tokens_B = torch.zeros(len(rows), dtype=torch.int64, device=self._device)

        def choose(logits_BLV: Tensor) -> None:
            logits_NV = over_vocabulary(logits_BLV[is_last_BL], mesh.tensor, size=size)
            if mesh.tensor.rank == mesh.data.rank == 0:
                own_B = is_last_BL.any(1)
                known_NV = logits_NV[:, :vocab_size].float()
                if temperature:
                    chances_N = to_device(chances, self._device)[own_B].float()
                    tokens_B[own_B] = drawn(known_NV / temperature, chances_N, size=vocab_size)
                else:
                    tokens_B[own_B] = known_NV.argmax(-1)

        self.stages.watch_logits = choose
        # torch.compile would compile again for another shape.
        with torch.compiler.set_stance("force_eager"):
            self._losses([self.stages.objective.to_batch(rows)])
        self.stages.watch_logits = None
        dist.all_reduce(tokens_B)  # one rank has chosen the token of a row
        return [*map(int, tokens_B.tolist())]

    def sample_outputs(self, rows: Iterable[Any]) -> Iterator[Tensor]:
        """Outputs (B, ...) of each micro batch that the scores of a task need, without training.

        All ranks call it with the same number of micro batches.
        """
        self._set_mode("eval")
        for each in rows:
            (batch,) = self._batches([each])
            outputs = self.stages.sample_outputs(batch)
            self.stages.free_gathered_weights()
            yield outputs


def _added_up(tensors: list[Tensor]) -> list[Tensor]:
    """The sum of tensors, if there are any."""
    return [torch.stack(tensors).sum(0)] if tensors else []
