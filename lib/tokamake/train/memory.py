"""Estimate of the memory that a run needs on each rank, before it starts.

`train` counts parameters on models of torch's `meta` device, which allocate nothing; the dry run
passes counts from the shapes of tensors, because it does not import torch. All other sizes follow
from the settings. Sizes in bytes.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.objective import objective_data
from tokamake.config.resolved_run import Run, sample_lengths
from tokamake.config.training import TrainSettings
from tokamake.models.common.costs import SavedActivations, rms_norm_bytes, saved_mask_bytes
from tokamake.runtime.device_types import holds_no_masks

_FP32_BYTES = 4
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Estimate(NamedTuple):
    """Most bytes that a rank needs of each kind."""

    weights: float
    """fp32 weights, and their copies in the precision of the passes."""
    gradients: float
    """Sums of gradients."""
    optimizer: float
    """Optimizer states."""
    activations: float
    """Activations that forward passes keep for backward passes, and logits."""
    together: bool
    """Whether sums of gradients and activations exist at the same time: from the second micro batch
    of a step on."""

    @property
    def total(self) -> float:
        """Peak bytes, without memory of torch itself."""
        temporary = (self.gradients, self.activations)
        peak = sum(temporary) if self.together else max(temporary)
        return self.weights + self.optimizer + peak


class StageSize(NamedTuple):
    """Parameters of a pipeline stage on its first tensor- and expert-parallel rank."""

    layers: Sequence[int]
    """Parameters of each layer."""
    total: int
    """Parameters of the stage, those outside layers too."""
    is_last: bool
    """Whether it has the output layer."""
    own: Callable[[int], float]
    """Number of ranks that shard parameters → parameters whose fp32 weights a rank keeps."""
    experts: int = 0
    """Parameters of experts, as far as they are counted."""


class _Setup(NamedTuple):
    """Values that several formulas need."""

    train: TrainSettings
    data_parallel_size: int
    num_batches: int
    """Micro batches of a step."""
    dtype_bytes: int
    """Bytes of an element in forward and backward passes."""
    device_type: str


def estimate(
    run: Run,
    world_size: int,
    device_type: str,
    *,
    stages: Callable[[Run, int], list[StageSize]] | None = None,
) -> Estimate:
    """Memory of the pipeline rank that needs most; other ranks do not differ.

    `stages` returns the stages of a pipeline rank; None: they are built on the meta device.

    With P parameters of a rank after tensor, expert and pipeline parallelism, S ranks that shard
    them (of experts: those with the same ones), b bytes an element in the passes (4 or 2), D
    optimizer states:

    - weights: 4P/S, and copies: bP in zero_stage 0 to 2; in stage 3, b times the parameters of the
      largest layer and outside layers (in a pipeline, of the whole stage). One rank in fp32 has
      no copies.
    - gradients: 4P/S; and 4P if several ranks add up the gradients of several micro batches in
      zero_stage 0 or 1, or in any pipeline.
    - optimizer: 4DP/S. Scalars and sums of rows and columns are left out. If matrices have other
      states than the rest, all parameters count with all states.
    - activations: `saved_activations` of the family, for each layer and each token of a micro batch
      on this rank, times the micro batches on their way through the pipeline. Context parallelism
      divides it; tensor parallelism divides `split`, and with sequence parallelism `states`. With
      recomputation `full`: the input of each layer (or group of layers), and all of one group. With
      `selective`: results of matrix products and attention.
    - experts: as if each rank had the same number of rows. A rank whose experts are chosen more
      often needs as many times more for the part of its layer's activations that is split.
    - logits: b × tokens × this rank's part of the vocabulary; their gradient replaces them. Times
      the micro batches on their way, if the schedule computes gradients of weights late. Once more
      for each layer that predicts further tokens.

    After Korthikanti et al. 2022, arXiv 2205.05198, with SDPA in place of stored scores.
    """
    train = run.train
    assert train.precision is not None, "with_precision comes first"
    data_parallel_size = train.parallel.data_parallel_size(world_size)
    num_batches = train.batch_sizes.num_micro_batches(train.micro_batch_size, data_parallel_size)
    setup = _Setup(
        train,
        data_parallel_size,
        num_batches=max(1, num_batches),
        dtype_bytes=_DTYPE_BYTES[train.precision],
        device_type=device_type,
    )
    pipeline_ranks = range(train.parallel.pipeline_parallel_size)
    stages = stages or _built_stages
    estimates = [
        _of_pipeline_rank(run, setup, rank=rank, stages=stages(run, rank))
        for rank in pipeline_ranks
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def _of_pipeline_rank(run: Run, setup: _Setup, *, rank: int, stages: list[StageSize]) -> Estimate:
    train, parallel = run.train, run.train.parallel
    pipelined = parallel.pipeline_parallel_size > 1
    num_sharers = setup.data_parallel_size * parallel.context_parallel_size
    has_copies = num_sharers > 1 or setup.dtype_bytes != _FP32_BYTES
    # Without peers or a pipeline, the stage itself keeps rounded copies and sums of gradients.
    uses_fsdp = has_copies and (num_sharers > 1 or pipelined)
    shards = num_sharers // parallel.data_parallel_replicate_size if train.zero_stage else 1
    layers = [number for stage in stages for number in stage.layers]
    total = sum(stage.total for stage in stages)
    # In a pipeline, FSDP2 gathers the whole stage, and shards gradients at the end of a step.
    by_layers = train.zero_stage == 3 and uses_fsdp and not pipelined
    gathered = max(layers) + total - sum(layers) if by_layers else total
    accumulates = setup.num_batches > 1
    whole_gradients = accumulates and uses_fsdp and (train.zero_stage < 2 or pipelined)
    own = sum(stage.own(shards) for stage in stages)
    optimizer = train.optimizer.facts
    num_states = [*optimizer.state.values()].count("like_parameter")
    return Estimate(
        weights=_FP32_BYTES * own + setup.dtype_bytes * gathered * has_copies,
        gradients=_FP32_BYTES * total * whole_gradients + _FP32_BYTES * own,
        optimizer=optimizer.state_bytes * num_states * own,
        activations=_activations(run, setup, stages=stages, rank=rank),
        together=accumulates,
    )


def _built_stages(run: Run, rank: int) -> list[StageSize]:
    """Stages of a pipeline rank, from modules without storage."""
    import torch

    from tokamake.parallel.mesh import planned

    parallel, architecture = run.train.parallel, run.architecture
    mesh = planned(parallel)
    layers_of_stages = parallel.layers_of_stages(architecture.num_hidden_layers)
    family = plugins.load("models/*/model", architecture.family)
    with torch.device("meta"):
        modules = [
            family.Model(architecture, mesh, stage=layers_of_stages[stage])
            for stage in parallel.stages_of_rank(rank)
        ]
    return [
        StageSize(
            [*map(_num_parameters, module.blocks)],
            _num_parameters(module),
            module.is_last,
            partial(_own_elements, module),
        )
        for module in modules
    ]


def _num_parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _own_elements(module: Any, shards: int) -> float:
    """Parameter elements whose master weights and optimizer states a rank keeps."""
    from tokamake.parallel.placement import placements

    own = 0.0
    for name, placement in placements(module).items():
        # Further axes are taken from the ranks that shard the parameters.
        taken = math.prod(module.mesh.axis(axis).size for axis, _ in placement.axes)
        own += module.get_parameter(name).numel() / max(1, shards // taken)
    return own


def _activations(run: Run, setup: _Setup, *, stages: list[StageSize], rank: int) -> float:
    parallel = run.train.parallel
    passes = _num_passes(setup, rank) / len(stages)
    stacks = [each for stage in stages for each in _stacks(run, setup, stage=stage)]
    layers = sum(stack.length * _layer_bytes(run, setup, stack=stack) for stack in stacks)
    logits = 0.0
    if any(stage.is_last for stage in stages):
        layers += stacks[-1].length * _further_bytes(run, setup)
        num_outputs = 1 + run.architecture.num_mtp_layers
        logits = num_outputs * _num_logits(run, stacks[-1]) * _logit_bytes(run, setup)
    samples = run.train.micro_batch_size / parallel.context_parallel_size
    num_layers = sum(stack.num_layers for stack in stacks)
    if run.train.recompute_granularity == "full":
        num_layers = min(num_layers, run.train.recompute_num_layers)
    masks = _attention_bias_bytes(run, setup, num_layers=passes * num_layers)
    return samples * (passes * layers + logits) + masks


class _SameLayers(NamedTuple):
    """Layers of the same kind."""

    length: int
    """Tokens of a sample."""
    num_attended: int
    """Tokens that each of them attends to."""
    num_layers: int
    kept: SavedActivations
    """Saved activations of one layer for one token."""


def _num_logits(run: Run, last_stack: _SameLayers) -> float:
    """Tokens of a sample that have logits: where possible, tokens with a label alone."""
    train = run.train
    needs_rows = train.log_corpus_losses or train.parallel.pipeline_parallel_size > 1
    share = 1.0 if needs_rows else objective_data(train.objective).labeled_share(train)
    return last_stack.length * share


def _stacks(run: Run, setup: _Setup, *, stage: StageSize) -> list[_SameLayers]:
    """Layers of a pipeline stage: first of the encoder, then of the decoder; or of each tower."""
    architecture, lengths = run.architecture, sample_lengths(run)
    family = plugins.load("models/*/memory", architecture.family)
    sizes = {"size": setup.dtype_bytes, "fused_norm": setup.device_type != "cpu"}
    kept = family.saved_activations(architecture, **sizes)
    if len(lengths) == 1:
        return [_SameLayers(lengths[0], lengths[0], len(stage.layers), kept)]
    if architecture.has_towers:  # a shared one saves its activations for both texts
        number = architecture.num_hidden_layers
        return [_SameLayers(length, length, number, kept) for length in lengths]
    if architecture.has_neighbors:
        return _with_neighbors(architecture, lengths, family=family, sizes=sizes)
    of_encoder, of_decoder = lengths
    by_decoder = family.saved_by_decoder(
        architecture, encoder_tokens=of_encoder / of_decoder, **sizes
    )
    num_decoder_layers = architecture.num_layers - architecture.num_hidden_layers
    return [
        _SameLayers(of_encoder, of_encoder, architecture.num_hidden_layers, kept),
        _SameLayers(of_decoder, of_encoder + of_decoder, num_decoder_layers, by_decoder),
    ]


def _with_neighbors(
    architecture: Architecture, lengths: list[int], *, family: Any, sizes: dict[str, Any]
) -> list[_SameLayers]:
    """Layers of a Retro: of the encoder, whose first one sees chunks, then of the decoder."""
    length, *neighbors = lengths
    total, longest = sum(neighbors), max(neighbors)
    chunk, num_encoder_layers = (
        architecture.setting(name) for name in ("chunk_length", "num_encoder_layers")
    )
    num_retrieving = len(architecture.retrieval_layers)
    plain = family.saved_activations(architecture, **sizes)
    reading, retrieving = (
        family.saved_with_cross_attention(architecture, attended_tokens=attended, **sizes)
        for attended in (chunk / longest, total / length)
    )
    return [
        _SameLayers(total, longest + chunk, 1, reading),
        _SameLayers(total, longest, num_encoder_layers - 1, plain),
        _SameLayers(length, length + total * chunk // length, num_retrieving, retrieving),
        _SameLayers(length, length, architecture.num_hidden_layers - num_retrieving, plain),
    ]


def _further_bytes(run: Run, setup: _Setup) -> float:
    """Bytes of a token in layers that predict further tokens, beside activations of usual layers.

    The embedding and the states before, their norms, and the result of the last norm.
    """
    parallel, hidden = run.train.parallel, run.architecture.hidden_size
    kept = 3 * hidden * setup.dtype_bytes
    if run.train.recompute_granularity == "none":
        kept += 2 * hidden * setup.dtype_bytes
        fused = setup.device_type != "cpu"
        kept += rms_norm_bytes(3 * hidden, setup.dtype_bytes, fused=fused)
    sequence = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    return run.architecture.num_mtp_layers * kept / sequence


def _logit_bytes(run: Run, setup: _Setup) -> float:
    """Bytes of a token's logits, times the micro batches that have logits at the same time."""
    parallel, vocab_size = run.train.parallel, run.architecture.vocab_size
    assert vocab_size is not None
    num_batches = 1
    if parallel.pipeline_parallel_size > 1 and parallel.pipeline_schedule == "gpipe":
        num_batches = setup.num_batches
    elif parallel.splits_backward:
        num_batches = min(setup.num_batches, parallel.pipeline_parallel_size)
    elif parallel.pipeline_parallel_size > 1 and parallel.pipeline_schedule == "1f1b":
        num_batches = max(1, _growing_batches(setup))
    return num_batches * setup.dtype_bytes * vocab_size / parallel.tensor_parallel_size


def _growing_batches(setup: _Setup) -> int:
    """Most micro batches of a step with fewer micro batches than pipeline ranks."""
    train, ranks = setup.train, setup.train.parallel.pipeline_parallel_size
    sizes, shape = train.batch_sizes, (train.micro_batch_size, setup.data_parallel_size)
    counts = [sizes.num_micro_batches(*shape, size=size) for size in sizes.all]
    return max((count for count in counts if count < ranks), default=0)


def _num_passes(setup: _Setup, rank: int) -> float:
    """Most forward passes through stages of a pipeline rank that wait for their backward pass.

    1F1B and interleaved: arXiv 2104.04473. The zero-bubble schedules need no more by design.
    """
    parallel, num_batches = setup.train.parallel, setup.num_batches
    ranks, virtual = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    if ranks == 1:
        return 1
    if parallel.pipeline_schedule == "gpipe":
        return num_batches
    if virtual == 1:
        # While the batch grows, all passes of up to ranks - 1 micro batches come first.
        growing = _growing_batches(setup)
        return max(min(num_batches, ranks - rank), growing)
    if parallel.pipeline_schedule == "zbv":
        return min(num_batches * virtual, ranks * virtual)
    return min(num_batches * virtual, 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1)


def _layer_bytes(run: Run, setup: _Setup, *, stack: _SameLayers) -> float:
    """Bytes that the layers of a stack keep of a token."""
    architecture, train = run.architecture, run.train
    num_layers, kept = stack.num_layers, stack.kept
    tensor = train.parallel.tensor_parallel_size
    sequence = tensor if train.parallel.sequence_parallel else 1
    layer = kept.states / sequence + kept.gathered + kept.split / tensor
    weights = 0.0
    if train.dropout.attention:
        # Weights of attention before and after dropout, in fp32 and for the product with values.
        weights = architecture.num_attention_heads * stack.num_attended / tensor
        layer += weights * (_FP32_BYTES + setup.dtype_bytes)
    state = architecture.hidden_size * setup.dtype_bytes / sequence
    if train.recompute_granularity == "none":
        return num_layers * layer
    if train.recompute_granularity == "selective":
        # Scores of attention are a matrix product, too.
        products = kept.products / tensor + weights * setup.dtype_bytes
        return num_layers * (3 * state + products) + layer
    # While a group is recomputed, all its activations exist.
    group = min(train.recompute_num_layers, num_layers)
    if train.recompute_method == "uniform":
        return -(-num_layers // group) * state + group * layer
    return group * state + (num_layers - group) * layer + (layer if group else 0)


def _attention_bias_bytes(run: Run, setup: _Setup, *, num_layers: float) -> float:
    """Bytes of attention's bias or mask, which layers share, and of those that each layer saves.

    A mask keeps documents apart where no kernel for packed documents can be used.

    Args:
        num_layers: layers whose activations exist at the same time.
    """
    train, architecture = run.train, run.architecture
    lengths = sample_lengths(run)
    # Samples of encoders have padding; decoders are causal, unless samples share rows.
    has_padding = objective_data(train.objective).has_padding
    is_masked = [train.reset_attention_mask or has_padding]
    later = has_padding if architecture.has_towers else train.pack_samples
    is_masked += [later] * (len(lengths) - 1)
    cross_attention = math.prod(lengths) * train.micro_batch_size * architecture.has_decoder
    if architecture.has_position_bias:
        heads = architecture.num_attention_heads // train.parallel.tensor_parallel_size
        pairs = (
            length**2 * (train.micro_batch_size if masked else 1)
            for length, masked in zip(lengths, is_masked, strict=True)
        )
        return sum(pairs) * heads * setup.dtype_bytes + cross_attention
    has_flash = holds_no_masks(setup.device_type) and setup.dtype_bytes < _FP32_BYTES
    if setup.device_type == "cpu" or (has_flash and not architecture.needs_scores):
        return cross_attention
    masks = (
        length**2 + num_layers * saved_mask_bytes(architecture, length, size=setup.dtype_bytes)
        for length, masked in zip(lengths, is_masked, strict=True)
        if masked
    )
    return sum(masks) * train.micro_batch_size + cross_attention
