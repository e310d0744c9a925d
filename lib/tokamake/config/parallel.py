"""Settings of parallelism: sizes of the mesh, and checks against ranks, batches and model."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokamake.config.architecture import Architecture
from tokamake.config.fields import Settings
from tokamake.errors import UserError, divisor

Size = Annotated[int, Field(ge=1)]

INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv")
"""Schedules with several pipeline stages per rank."""

_SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv")
"""Schedules that compute gradients of weights later than gradients of activations."""


def rank_of_stage(schedule: str, stage: int, *, ranks: int) -> int:
    """Pipeline rank of a stage: round robin; for zbv, from the first rank to the last and back."""
    if schedule == "zbv" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


class ParallelSettings(Settings):
    """Parallel layout of a run. All ranks that the sizes here do not use are data-parallel."""

    tensor_parallel_size: Size = 1
    """Ranks that share each layer: its attention heads, MLP width and vocabulary."""
    sequence_parallel: bool = False
    """Split the sequence over tensor-parallel ranks in norms and residuals."""
    context_parallel_size: Size = 1
    """Ranks that share each sequence."""
    context_parallel_method: Literal["ring", "ulysses"] = "ring"
    """Attention over a split sequence. ring: ranks pass keys and values around. ulysses: ranks
    exchange heads (all-to-all)."""
    expert_parallel_size: Size = 1
    """Ranks among which the experts of a layer are divided, of the data- and context-parallel ones.
    Tokens travel to the ranks of their experts and back."""
    pipeline_parallel_size: Size = 1
    """Ranks among which the layers are divided."""
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"
    ] = "1f1b"
    """Order of the forward and backward passes of micro batches in the pipeline."""
    virtual_pipeline_size: Size = 1
    """Pipeline stages per rank: 2 or more with interleaved schedules, 2 with zbv, else 1."""
    pipeline_layers: tuple[Size, ...] = ()
    """Number of layers of each pipeline stage, in the order of the model. Empty: as even as
    possible."""
    data_parallel_replicate_size: Size = 1
    """Number of data-parallel groups. Each group keeps a full copy of the sharded state
    (HSDP)."""

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel_size * self.virtual_pipeline_size

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes have two parts: gradients of inputs, and later of weights."""
        return self.pipeline_parallel_size > 1 and self.pipeline_schedule in _SPLIT_BACKWARD

    def stages_of_rank(self, rank: int) -> list[int]:
        """Stages of a pipeline rank."""
        schedule, ranks = self.pipeline_schedule, self.pipeline_parallel_size
        stages = range(self.num_stages)
        return [each for each in stages if rank_of_stage(schedule, each, ranks=ranks) == rank]

    @model_validator(mode="after")
    def _fit_together(self) -> "ParallelSettings":
        schedule, virtual = self.pipeline_schedule, self.virtual_pipeline_size
        if self.pipeline_parallel_size == 1:
            if virtual > 1 or self.pipeline_layers:
                raise ValueError(
                    "virtual_pipeline_size and pipeline_layers need pipeline_parallel_size; set "
                    "it to 2 or more, or remove them"
                )
            return self
        if schedule == "zbv" and virtual != 2:
            raise ValueError(
                f"virtual_pipeline_size: {virtual}: zbv has 2 stages per rank; set it to 2"
            )
        if (virtual > 1) != (schedule in INTERLEAVED):
            raise ValueError(
                f"virtual_pipeline_size: {virtual}: with pipeline_schedule {schedule}; set it to "
                f"2 or more with {', '.join(INTERLEAVED)}, else to 1"
            )
        if self.pipeline_layers and len(self.pipeline_layers) != self.num_stages:
            raise ValueError(
                f"pipeline_layers: {len(self.pipeline_layers)} numbers, but "
                f"pipeline_parallel_size × virtual_pipeline_size = {self.num_stages} stages"
            )
        return self

    def data_parallel_size(self, world_size: int) -> int:
        """Number of data-parallel ranks."""
        tensor, context = self.tensor_parallel_size, self.context_parallel_size
        pipeline, replicas = self.pipeline_parallel_size, self.data_parallel_replicate_size
        size, remainder = divmod(world_size, tensor * context * pipeline)
        if remainder or not size:
            raise UserError(
                f"train.parallel: tensor {tensor} × context {context} × pipeline {pipeline} needs "
                f"{tensor * context * pipeline} ranks or a multiple, this run has {world_size}; "
                "change the number of ranks or these sizes"
            )
        if size % replicas:
            raise UserError(
                f"train.parallel.data_parallel_replicate_size: {replicas}: does not divide "
                f"{size} data-parallel ranks; give {divisor(size)}"
            )
        sharers = size * context // replicas
        if sharers % self.expert_parallel_size:
            unit = "data-parallel × context-parallel ranks"
            if replicas > 1:
                unit += " of a group of data_parallel_replicate_size"
            raise UserError(
                f"train.parallel.expert_parallel_size: {self.expert_parallel_size}: does not "
                f"divide {sharers} {unit}; give {divisor(sharers)}"
            )
        return size

    def layers_of_stages(self, num_layers: int) -> list[range]:
        """Layers of each pipeline stage.

        Where an even division is impossible, stages in the middle get more layers, because the
        first stage also has the embedding and the last one the output layer.
        """
        counts = list(self.pipeline_layers)
        if not counts:
            even, remainder = divmod(num_layers, self.num_stages)
            counts = [even] * self.num_stages
            for stage in sorted(range(self.num_stages), key=self._load)[:remainder]:
                counts[stage] += 1
        if sum(counts) != num_layers:
            raise UserError(
                f"train.parallel.pipeline_layers: the sum is {sum(counts)}, but the model "
                f"has {num_layers} layers; change them"
            )
        starts = [sum(counts[:stage]) for stage in range(self.num_stages + 1)]
        return [range(*starts[stage : stage + 2]) for stage in range(self.num_stages)]

    def check_batches(self, num_batches: int, *, in_rampup: bool = False) -> None:
        """Check that the pipeline schedule supports the micro batches of a rank in a step.

        Ranks may not be idle, or rounds differ in size; while the batch size grows (`in_rampup`),
        ranks of some schedules may be idle.
        """
        ranks, schedule = self.pipeline_parallel_size, self.pipeline_schedule
        if ranks == 1:
            return
        if num_batches < ranks:
            if in_rampup and schedule in ("gpipe", "1f1b"):
                return
            remedy = f"raise global_batch_size or lower micro_batch_size to get {ranks} or more"
            if in_rampup:
                remedy = f"start rampup_batch_size with {ranks} or more, or use the schedule 1f1b"
            raise UserError(
                f"train.parallel.pipeline_parallel_size: {ranks}: steps of {num_batches} micro "
                f"batches leave ranks idle; {remedy}"
            )
        has_rounds = schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
        if has_rounds and num_batches % (num_batches // ranks):
            raise UserError(
                f"train.parallel.pipeline_schedule: {schedule}: {num_batches} micro batches a step "
                f"cannot be divided into equal rounds of {ranks} or more; make global_batch_size a "
                f"multiple of micro_batch_size × data-parallel ranks × {ranks}"
            )

    def _load(self, stage: int) -> tuple[int, int]:
        """Sort key of stages: stages with little work besides their layers come first."""
        extra_work = {0: 1, self.num_stages - 1: 2}  # Embedding, output layer and loss.
        return extra_work.get(stage, 0), stage

    def check_architecture(self, architecture: Architecture, sequence_length: int) -> None:
        """Check that this parallel layout can divide a model and its sequences."""
        tensor, context = self.tensor_parallel_size, self.context_parallel_size
        heads, groups = architecture.num_attention_heads, architecture.num_key_value_heads
        tensor_size = "tensor_parallel_size", tensor
        _divides(tensor_size, (heads, "attention heads"))
        if groups % tensor and tensor % groups:
            raise UserError(
                f"train.parallel.tensor_parallel_size: {tensor}: neither divides {groups} "
                f"key-value heads nor is a multiple of them; give {divisor(groups)}, or a multiple "
                f"of {groups}"
            )
        _divides(tensor_size, (architecture.intermediate_size, "intermediate_size"))
        _divides(tensor_size, (architecture.expert_size, "moe_intermediate_size"))
        _check_expert_parallel(architecture, self.expert_parallel_size)
        _check_pipeline_parallel(architecture, self.pipeline_parallel_size)
        _check_context_parallel(architecture, context)
        if context > 1:
            twice = "context_parallel_size × 2", 2 * context
            _divides(twice, (sequence_length, "sequence_length"))
        if context > 1 and self.context_parallel_method == "ulysses":
            own_heads = heads // tensor, "attention heads of a rank"
            _divides(("context_parallel_size", context), own_heads)
        if self.sequence_parallel:
            _divides(tensor_size, (sequence_length // context, "tokens of a rank's sequence"))
        layers = self.layers_of_stages(architecture.num_hidden_layers)
        if len(layers) > 1 and not all(layers):
            raise UserError(self._too_many_stages(architecture.num_hidden_layers))

    def _too_many_stages(self, num_layers: int) -> str:
        ranks, virtual = self.pipeline_parallel_size, self.virtual_pipeline_size
        most = num_layers // virtual
        stages = f"{self.num_stages} pipeline stages"
        if virtual > 1:
            stages += f" (virtual_pipeline_size: {virtual})"
        # A schedule with several stages per rank needs two ranks.
        remedy = f"give at most {most}" if virtual == 1 or most > 1 else "lower both sizes"
        return (
            f"train.parallel.pipeline_parallel_size: {ranks}: {num_layers} layers for {stages} "
            f"leave a stage empty; {remedy}"
        )


def _divides(size: tuple[str, int], whole: tuple[int, str]) -> None:
    (name, ranks), (number, unit) = size, whole
    if number % ranks:
        raise UserError(
            f"train.parallel.{name}: {ranks}: does not divide {number} ({unit}); give "
            f"{divisor(number)}"
        )


def _check_expert_parallel(architecture: Architecture, size: int) -> None:
    if size > 1 and not architecture.has_routers:
        raise UserError(
            f"train.parallel.expert_parallel_size: {size}: {architecture.family} has no experts; "
            "set 1"
        )
    if size > 1:
        _divides(("expert_parallel_size", size), (architecture.setting("num_experts"), "experts"))


def _check_context_parallel(architecture: Architecture, size: int) -> None:
    """Check that `size` ranks can share a sequence."""
    if size > 1 and not architecture.is_causal:
        raise UserError(
            f"train.parallel.context_parallel_size: {size}: the ranks that share a sequence "
            f"compute causal attention, and {architecture.family} attends in both directions; set 1"
        )
    if size > 1 and architecture.has_neighbors:
        raise UserError(
            f"train.parallel.context_parallel_size: {size}: the ranks that share a sequence "
            f"would divide its chunks, which {architecture.family} needs whole; set 1"
        )
    if size > 1 and architecture.has_position_bias:
        raise UserError(
            f"train.parallel.context_parallel_size: {size}: position_embedding "
            f"{architecture.position_embedding} is a bias of attention, which ranks that share a "
            "sequence do not support; set 1"
        )


def _check_pipeline_parallel(architecture: Architecture, size: int) -> None:
    if size > 1 and architecture.several_stacks:
        raise UserError(
            f"train.parallel.pipeline_parallel_size: {size}: a pipeline passes the states of "
            f"one stack of layers, and {architecture.family} has {architecture.several_stacks}; "
            "set 1"
        )
