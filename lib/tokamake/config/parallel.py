"""Settings of parallelism: how many ranks share what, and what they must fit."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokamake.config.architecture import Architecture
from tokamake.config.fields import Settings
from tokamake.errors import UserError

Size = Annotated[int, Field(ge=1)]

INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv")
"""Schedules that give each rank several stages."""

SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv")
"""Schedules that compute gradients of weights later than those of activations."""


class ParallelSettings(Settings):
    """How the ranks of a run share its work; ranks that nothing else uses are data-parallel."""

    tensor_parallel_size: Size = 1
    """Ranks that share each layer: attention heads, width of the MLP, vocabulary."""
    sequence_parallel: bool = False
    """Let tensor-parallel ranks share norms and residuals, too, by parts of the sequence."""
    context_parallel_size: Size = 1
    """Ranks that share each sequence."""
    context_parallel_method: Literal["ring", "ulysses"] = "ring"
    """Attention over a shared sequence: keys and values go round, or heads are exchanged."""
    pipeline_parallel_size: Size = 1
    """Ranks that share the layers."""
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"
    ] = "1f1b"
    """Order of forward and backward passes of micro batches in the pipeline."""
    virtual_pipeline_size: Size = 1
    """Stages of each pipeline rank; interleaved schedules need 2 or more, zbv has 2."""
    pipeline_layers: tuple[Size, ...] = ()
    """Layers of each stage, in the model's order; empty: as even as can be."""
    data_parallel_replicate_size: Size = 1
    """Groups of data-parallel ranks that each keep a whole copy of what ZeRO shards (HSDP)."""

    @property
    def num_stages(self) -> int:
        """Parts that the layers are cut into."""
        return self.pipeline_parallel_size * self.virtual_pipeline_size

    @model_validator(mode="after")
    def _fit_together(self) -> "ParallelSettings":
        schedule, virtual = self.pipeline_schedule, self.virtual_pipeline_size
        if self.pipeline_parallel_size == 1:
            if virtual > 1 or self.pipeline_layers:
                raise ValueError(
                    "virtual_pipeline_size and pipeline_layers say how pipeline ranks share "
                    "layers; give pipeline_parallel_size, too"
                )
            return self
        if schedule == "zbv" and virtual != 2:
            raise ValueError(f"virtual_pipeline_size: {virtual}: zbv has 2 stages a rank; give 2")
        if (virtual > 1) != (schedule in INTERLEAVED):
            raise ValueError(
                f"virtual_pipeline_size: {virtual}: with pipeline_schedule {schedule}; give 2 or "
                f"more to {', '.join(INTERLEAVED)} alone"
            )
        if self.pipeline_layers and len(self.pipeline_layers) != self.num_stages:
            raise ValueError(
                f"pipeline_layers: {len(self.pipeline_layers)} numbers, but "
                f"pipeline_parallel_size × virtual_pipeline_size = {self.num_stages} stages"
            )
        return self

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel ranks of so many.

        Raises:
            UserError: the sizes do not divide the number of ranks.
        """
        tensor, context = self.tensor_parallel_size, self.context_parallel_size
        pipeline, replicas = self.pipeline_parallel_size, self.data_parallel_replicate_size
        size, rest = divmod(world_size, tensor * context * pipeline)
        if rest or not size:
            raise UserError(
                f"train.parallel: tensor {tensor} × context {context} × pipeline {pipeline} takes "
                f"{tensor * context * pipeline} ranks or a multiple, this run has {world_size}; "
                "start it on so many or change these sizes"
            )
        if size % replicas:
            raise UserError(
                f"train.parallel.data_parallel_replicate_size: {replicas}: does not divide "
                f"{size} data-parallel ranks; give a divisor"
            )
        return size

    def layers_of_stages(self, num_layers: int) -> list[range]:
        """Layers of each stage; where they cannot be even, the stages in the middle have more.

        The first and the last stage have the embedding and the output layer besides.

        Raises:
            UserError: `pipeline_layers` do not add up.
        """
        counts = list(self.pipeline_layers)
        if not counts:
            each, more = divmod(num_layers, self.num_stages)
            counts = [each] * self.num_stages
            for stage in sorted(range(self.num_stages), key=self._load)[:more]:
                counts[stage] += 1
        if sum(counts) != num_layers:
            raise UserError(
                f"train.parallel.pipeline_layers: {sum(counts)} in all, the model has "
                f"{num_layers} layers"
            )
        starts = [sum(counts[:stage]) for stage in range(self.num_stages + 1)]
        return [range(*starts[stage : stage + 2]) for stage in range(self.num_stages)]

    def check_batches(self, num_batches: int) -> None:
        """See that a pipeline's schedule can do with the micro batches of a step.

        Args:
            num_batches: micro batches of a data-parallel rank.

        Raises:
            UserError: it cannot.
        """
        ranks, schedule = self.pipeline_parallel_size, self.pipeline_schedule
        if ranks == 1:
            return
        if num_batches < ranks:
            raise UserError(
                f"train.parallel.pipeline_parallel_size: {ranks}: steps of {num_batches} micro "
                "batches leave ranks idle; raise global_batch_size or lower micro_batch_size, so "
                f"that there are {ranks} or more"
            )
        in_turns = schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
        if in_turns and num_batches % (num_batches // ranks):
            raise UserError(
                f"train.parallel.pipeline_schedule: {schedule}: {num_batches} micro batches a step "
                f"do not fall into equal rounds of {ranks} or more; make global_batch_size a "
                f"multiple of micro_batch_size × data-parallel ranks × {ranks}"
            )

    def _load(self, stage: int) -> tuple[int, int]:
        """What a stage has to do beside its layers, to give it fewer of them."""
        beside = {0: 1, self.num_stages - 1: 2}
        return beside.get(stage, 0), stage

    def check_architecture(self, architecture: Architecture, sequence_length: int) -> None:
        """See that a model and its sequences can be shared so.

        Raises:
            UserError: they cannot.
        """
        tensor, context = self.tensor_parallel_size, self.context_parallel_size
        heads, groups = architecture.num_attention_heads, architecture.num_key_value_heads
        _divides("tensor_parallel_size", tensor, "attention heads", heads)
        if groups % tensor and tensor % groups:
            raise UserError(
                f"train.parallel.tensor_parallel_size: {tensor}: neither divides {groups} "
                "key-value heads nor is a multiple of them"
            )
        _divides(
            "tensor_parallel_size", tensor, "intermediate_size", architecture.intermediate_size
        )
        architecture.check_context_parallel(context)
        if context > 1:
            _divides("context_parallel_size × 2", 2 * context, "sequence_length", sequence_length)
        if context > 1 and self.context_parallel_method == "ulysses":
            _divides("context_parallel_size", context, "attention heads of a rank", heads // tensor)
        if self.sequence_parallel:
            length = sequence_length // context
            _divides("tensor_parallel_size", tensor, "tokens of a rank's sequence", length)
        layers = self.layers_of_stages(architecture.num_hidden_layers)
        if len(layers) > 1 and not all(layers):
            raise UserError(
                f"train.parallel: {architecture.num_hidden_layers} layers for {len(layers)} "
                "pipeline stages, so that one has none; take fewer stages"
            )


def _divides(name: str, divisor: int, what: str, number: int) -> None:
    if number % divisor:
        raise UserError(f"train.parallel.{name}: {divisor}: does not divide {number} ({what})")
