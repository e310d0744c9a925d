"""Settings of a training run: batches, length, data order, optimizer, precision, parallelism."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from tokamake import plugins
from tokamake.config.batching import BatchSizes, Rampup
from tokamake.config.dropout import DropoutSettings
from tokamake.config.fields import Settings, Split, plug_in
from tokamake.config.fim import FimSettings
from tokamake.config.objective import MaskingSettings, ObjectiveName, check_objective
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.parallel import SPLIT_BACKWARD, ParallelSettings
from tokamake.config.schedule import ScheduleSettings, Span, check_schedule
from tokamake.config.stability import BadStepSettings, LossScalingSettings, StepRanges
from tokamake.config.trackers import TrackerSettings
from tokamake.errors import UserError

BACKEND_CHECKS = "train/backends/checks"
"""Folder with the checks of each back end, which do not import torch."""

OnChange = Literal["refuse", "continue", "restart"]

LENGTHS = ("train_steps", "train_samples", "train_tokens")
"""Settings that give the length of a run, each in its own unit."""


def _first_and_last(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) != 2:
        raise ValueError("not two steps; give the first and the last one, such as [20, 22]")
    return value


_MODEL_SIZES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
_BATCH_SCHEMA = {"anyOf": [{"minimum": 1, "type": "integer"}, {"type": "null"}]}


class TrainSettings(Settings):
    """The training run."""

    finetune: bool | None = None
    """How to start from model.checkpoint. true: load only its weights and start at step 0 with a
    new optimizer state. false: continue its training with its optimizer state, step and samples.
    Leave it empty without model.checkpoint."""
    load_optimizer: bool = True
    """With `finetune: false`: load the optimizer states. false: start a new optimizer at the
    checkpoint's step and samples, as Megatron's --no-load-optim does. Then another optimizer is
    possible, too."""
    on_change: OnChange = "refuse"
    """Action if the run has a checkpoint, but its settings or its data have changed since.
    refuse: stop, and list the changes. continue: keep weights, optimizer states, step and samples,
    and continue with the new settings and data. restart: move the checkpoints aside and start at
    step 0. With `finetune: false` and a Megatron checkpoint, refuse stops if the checkpoint has
    another schedule."""
    objective: ObjectiveName = "causal"
    """Training objective. causal: predict the next token. masked: restore masked tokens, as BERT
    does. span_corruption: restore spans of text in a decoder, as T5 does. The last two need
    families that learn them (bert; t5, hf_t5), and data with `tokenize.split_sentences: true`."""
    masking: MaskingSettings = MaskingSettings()
    """Masking of the objectives masked and span_corruption."""
    pack_samples: bool = False
    """Let short samples of a micro batch share rows, so that less is padding. Samples do not see
    each other, so losses stay the same. Only for the objectives masked and span_corruption; not
    with pipelines or `log_corpus_losses`."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Input tokens per sample. With objective causal, a sample holds one more token, the last
    label."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples per forward pass on a rank."""
    global_batch_size: Annotated[int, Field(ge=1), WithJsonSchema(_BATCH_SCHEMA)] = 8
    """Samples per step on all ranks; a multiple of micro_batch_size × data-parallel ranks. null: a
    micro batch for each data-parallel rank of the profile, for a try-out on any number of ranks."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """Batch size ramp-up as three numbers: start, increment, samples. The global batch grows from
    `start` to `global_batch_size` in steps of `increment` while the run consumes its first
    `samples`. Empty: no ramp-up."""
    train_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the whole run. Default: 1000, if neither train_samples nor train_tokens is
    set. null: the column `epochs` of the table of corpora gives the length."""
    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of the whole run. Samples that do not fill a global batch are dropped."""
    train_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the whole run. Tokens that do not fill a global batch are dropped."""
    split: Split = "98,1,1"
    """Shares of the documents of each merged dataset for training, validation and test, as text or
    as a list: [98, 1, 1]. Without the last share, it is 0. The column `sets` of the table of
    corpora overrides it for a corpus."""
    split_rule: Literal["megatron_core", "megatron_deepspeed"] = "megatron_core"
    """How to round shares to whole documents: as megatron-core or as Megatron-DeepSpeed does."""
    blend: Literal["weighted", "exact", "corpora"] = "weighted"
    """How to interleave samples. weighted: datasets by weight, as Megatron-LM does. exact: datasets
    with exact integer counts. corpora: corpora with exact integer counts; `within_corpus` gives
    the order in each corpus."""
    within_corpus: Literal["concatenated", "shuffled", "blended"] = "shuffled"
    """Order of samples in a corpus, with `blend: corpora`. concatenated: dataset after dataset.
    shuffled: all samples of the corpus shuffled. blended: datasets by weight."""
    separate_last_epoch: bool | None = None
    """Shuffle the last, partial epoch separately from the full epochs. Empty: only if the run uses
    less than 80 % of it, as Megatron-LM does."""
    drop_last_partial_sequence: bool = True
    """Drop the last tokens of a validation split if they do not fill a sample. false: pad the last
    sample; padding has no loss."""
    fim: FimSettings = FimSettings()
    """Fill-in-the-middle."""
    reset_position_ids: bool = False
    """Restart position ids at 0 in each document of a sample."""
    reset_attention_mask: bool = False
    """Mask attention between different documents of a sample."""
    eod_mask_loss: bool = False
    """Mask the loss at end-of-document tokens: the token after them is not predictable."""
    dropout: DropoutSettings = DropoutSettings()
    """Dropout."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer and its hyperparameters."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Learning rate schedule."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the forward and backward pass. Master weights, gradient sums and optimizer
    states are always fp32. fp16 uses dynamic loss scaling. Empty: bf16 on accelerators, fp32 on
    the CPU."""
    loss_scaling: LossScalingSettings = LossScalingSettings()
    """Loss scaling. Only precision fp16 has it: other values than the defaults are refused with
    other precisions."""
    on_bad_step: BadStepSettings = BadStepSettings()
    """Action after a step whose loss or gradient norm is not finite, or a spike."""
    skip_data: StepRanges = ()
    """Steps whose data are left out, as ranges of their first and last step, such as
    [[120, 124]]. Such a step counts, but does not read its samples or update the weights."""
    deterministic: bool = False
    """Use only deterministic algorithms, even if they are slower."""
    compile: bool = False
    """Compile each layer, and on accelerators the loss, with torch.compile: faster steps, but a
    slower start."""
    backend: Annotated[str, plug_in("train/backends")] = "native"
    """Implementation of data parallelism: native (PyTorch's FSDP2) or deepspeed (ZeRO)."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """State that data-parallel ranks shard. 0: nothing. 1: optimizer states. 2: optimizer states
    and gradients. 3: optimizer states, gradients and weights."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where DeepSpeed keeps and updates optimizer states and master weights. none: on the device of
    the model. cpu: in host memory."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Further settings of DeepSpeed, as in its JSON file: sizes of buckets, prefetching, pinned
    memory, wall_clock_breakdown. Those that have a setting of their own here are refused, as are
    those without effect and those that would break a promise of another setting."""
    offload_param: Literal["none", "cpu"] = "none"
    """Where DeepSpeed keeps the weights that zero_stage 3 shards. none: on the device. cpu: in host
    memory until a layer needs them."""
    parallel: ParallelSettings = ParallelSettings()
    """Tensor, sequence, context and pipeline parallelism."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes to save memory. none: nothing. selective: cheap
    operations. full: whole layers."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Layers to recompute with recompute_granularity `full`. uniform: all layers, in groups of
    recompute_num_layers. block: the first recompute_num_layers of each pipeline stage."""
    recompute_num_layers: Annotated[int, Field(ge=1)] = 1
    """Number of layers for recompute_method."""
    verify_data: bool | Literal["auto"] = "auto"
    """Compare the datasets with the hashes in their manifests before training; a later job reads
    only files that have changed since. auto: up to 20 GB for each host."""
    init_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without progress after which the run counts as hung, until its first step is done.
    It then names the ranks and hosts that lag, writes the stacks of all ranks to
    training/hangs, and ends with exit status 75, so that it is tried again. Five minutes later,
    its process groups time out by themselves."""
    train_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without progress after which the run counts as hung, once its first step is done.
    Choose a time that is longer than a step, and longer than a rank waits for a checkpoint."""
    log_interval: Annotated[int, Field(ge=1)] = 10
    """Steps between log lines; train_steps turns off all but the first and the last."""
    log_style: Literal["plain", "megatron"] = "plain"
    """Log lines and TensorBoard tags of tokamake (plain) or of Megatron-LM, for programs that read
    its logs. metrics.jsonl is the same. As in Megatron-LM, a line has the learning rate of the next
    step; TensorBoard has that of the step."""
    log_settings: bool = False
    """Print all settings of training as a job begins; by default those that are changed."""
    trackers: TrackerSettings = TrackerSettings()
    """Trackers such as Weights & Biases."""
    log_layer_norms: bool = False
    """Record the gradient norm of each layer, and of all other parameters: grad_norm/layers.N and
    grad_norm/others."""
    log_corpus_losses: bool = False
    """Record the training loss of each corpus, a mean per token since the last record: loss/CORPUS.
    """
    profile_steps: Annotated[
        tuple[Annotated[int, Field(ge=1)], int] | None, BeforeValidator(_first_and_last)
    ] = None
    """First and last step to profile with torch.profiler, such as [20, 22]. The first 8 ranks write
    traces to training/profile, which Perfetto and chrome://tracing show. Empty: none."""
    evaluation_interval: Annotated[int, Field(ge=1)] = 100
    """Steps between measurements of the validation loss; evaluation_steps: 0 turns them off."""
    evaluation_steps: Annotated[int, Field(ge=0)] = 10
    """Global batches per measurement of the validation loss; 0 turns validation off."""
    save_interval: Annotated[int, Field(ge=1)] = 1000
    """Steps between checkpoints. The last step always saves one; train_steps turns others off."""
    keep_last: Annotated[int, Field(ge=2)] | None = None
    """Number of newest checkpoints to keep; older ones are deleted once a new one is complete. At
    least 2, because training goes back to the one before if the newest is damaged. Ends of segments
    and checkpoints that other runs start from stay, too. Empty: keep all."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """With keep_last: keep also the checkpoints of all steps that this number divides."""
    keep_best: Annotated[int, Field(ge=1)] | None = None
    """With keep_last: keep also this many checkpoints with the lowest validation loss. Only steps
    that are saved and validated count; see evaluation_interval."""
    segment_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps per job. A run that exceeds the time limit of a job becomes a chain of jobs, each with
    its own checkpoint and evaluation. Empty: one job."""

    @model_validator(mode="before")
    @classmethod
    def _usual_length(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.keys() & set(LENGTHS):
            return {**values, "train_steps": 1000}
        return values

    @model_validator(mode="before")
    @classmethod
    def _batch_of_all_ranks(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict) or values.get("global_batch_size", 1) is not None:
            return values
        parallel = values.get("parallel")
        stated = parallel.items() if isinstance(parallel, dict) else ()
        shares = [size for name, size in stated if name in _MODEL_SIZES and isinstance(size, int)]
        num_replicas = max(1, (info.context or {}).get("num_ranks", 1) // max(1, math.prod(shares)))
        micro = values.get("micro_batch_size", 1)
        return {
            **values,
            "global_batch_size": micro * num_replicas if isinstance(micro, int) else 1,
        }

    @model_validator(mode="after")
    def _fit_together(self) -> "TrainSettings":
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        self._check_length()
        check_objective(self)
        plugins.load(BACKEND_CHECKS, self.backend).check_settings(self)
        self._check_loss_scaling()
        self._check_offload()
        if self.parallel.data_parallel_replicate_size > 1 and not self.zero_stage:
            raise ValueError(
                f"parallel.data_parallel_replicate_size: "
                f"{self.parallel.data_parallel_replicate_size}: with zero_stage 0, which shards "
                "nothing; set zero_stage to 1 or more, or remove this setting"
            )
        self._check_sampled_labels()
        self._check_dropout()
        self._check_compile()
        self._check_split_backward()
        self._check_retention()
        if self.profile_steps and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(
                f"profile_steps: {list(self.profile_steps)}: the first step comes after the last; "
                "swap them"
            )
        if self.profile_steps and self.train_steps and self.profile_steps[0] > self.train_steps:
            raise ValueError(
                f"profile_steps: {list(self.profile_steps)}: the run ends at step "
                f"{self.train_steps}; give earlier steps"
            )
        return self

    def _check_retention(self) -> None:
        every, interval = self.keep_every, self.save_interval
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) and not self.keep_last:
                raise ValueError(
                    f"{name}: {getattr(self, name)}: without keep_last, all checkpoints are kept; "
                    "set keep_last, or remove this setting"
                )
        if every and every % interval:
            raise ValueError(
                f"keep_every: {every}: is not a multiple of save_interval {interval}, so that most "
                "of these steps have no checkpoint; set it to a multiple"
            )
        if self.keep_best and not self.evaluation_steps:
            raise ValueError(
                f"keep_best: {self.keep_best}: with evaluation_steps 0, nothing is validated; set "
                "evaluation_steps, or remove this setting"
            )

    def _check_loss_scaling(self) -> None:
        if self.precision == "fp16":
            return
        defaults = LossScalingSettings()
        for name, value in self.loss_scaling:
            if value != getattr(defaults, name):
                text = str(value).lower() if isinstance(value, bool) else f"{value:g}"
                raise ValueError(
                    f"loss_scaling.{name}: {text}: precision {self.precision or 'empty'} has no "
                    "loss scale; set precision to fp16, or remove this setting"
                )

    def _check_offload(self) -> None:
        for name in ("offload_optimizer", "offload_param"):
            if getattr(self, name) == "none":
                continue
            offloads = _backends_with("OFFLOADS").items()
            stages = {backend: each[name] for backend, each in offloads if name in each}
            if self.zero_stage < stages.get(self.backend, math.inf):
                raise ValueError(
                    f"{name}: {getattr(self, name)}: needs backend {' or '.join(stages)} and "
                    f"zero_stage {min(stages.values())} or more; set both, or set this to none"
                )

    def _check_sampled_labels(self) -> None:
        if not self.optimizer.facts.sampled_labels:
            return
        # The Gauss-Newton-Bartlett estimate needs a second backward pass, of sampled labels.
        name = f"optimizer.name: {self.optimizer.name}: needs gradients of labels"
        if self.backend not in (backends := _backends_with("SAMPLED_LABELS")):
            raise ValueError(
                f"{name} sampled from the model; set backend to {' or '.join(backends)}"
            )
        if self.parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"{name} sampled from logits, which only the last pipeline stage has; set "
                "parallel.pipeline_parallel_size to 1"
            )

    def _check_split_backward(self) -> None:
        schedule = self.parallel.pipeline_schedule
        if self.parallel.pipeline_parallel_size == 1 or schedule not in SPLIT_BACKWARD:
            return
        if self.recompute_granularity == "selective":
            # torch recomputes once per backward pass, but these schedules have two.
            raise ValueError(
                "recompute_granularity: selective: saved activations would be freed too early, "
                f"because pipeline_schedule {schedule} computes gradients of weights late; set it "
                "to full or none"
            )

    def _check_dropout(self) -> None:
        parallel = self.parallel
        has_ring = parallel.context_parallel_size > 1 and parallel.context_parallel_method == "ring"
        if self.dropout.attention and has_ring:
            raise ValueError(
                f"dropout.attention: {self.dropout.attention}: ring attention has no weights to "
                "drop; set parallel.context_parallel_method to ulysses, or this to 0"
            )

    def _check_compile(self) -> None:
        if not self.compile:
            return
        if self.recompute_granularity == "selective":
            raise ValueError(
                "compile: true: cannot be combined with recompute_granularity selective; set "
                "compile to false, or recompute_granularity to full or none"
            )
        schedule = self.parallel.pipeline_schedule
        if self.parallel.pipeline_parallel_size > 1 and schedule in SPLIT_BACKWARD:
            # Compiled backward passes free buffers that the second half needs.
            raise ValueError(
                "compile: true: gradients would be wrong, because pipeline_schedule "
                f"{schedule} computes gradients of weights late; set it to false, or use "
                "interleaved_1f1b"
            )

    def _check_length(self) -> None:
        lengths = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(lengths) > 1:
            names = f"{', '.join(lengths[:-1])} and {lengths[-1]}"
            number = "both" if len(lengths) == 2 else "all"
            raise ValueError(f"{names} {number} give the run's length; keep one")
        try:
            steps = self.num_steps
        except UserError as error:
            raise ValueError(str(error)) from None
        if steps == 0:
            raise ValueError(
                f"{lengths[0]}: {getattr(self, lengths[0])}: does not fill a global batch of "
                f"{self.batch_sizes.at(0)} × {self.sequence_length} tokens; raise it"
            )
        if self.span:
            check_schedule(self.schedule, self.optimizer, span=self.span)

    @property
    def span(self) -> Span | None:
        """Length of the run in all units; None if the epochs of the corpora give it."""
        steps = self.num_steps
        return Span(steps, self.batch_sizes, self.sequence_length) if steps else None

    @property
    def batch_sizes(self) -> BatchSizes:
        """Samples of each step."""
        ramp = Rampup(*self.rampup_batch_size) if self.rampup_batch_size else None
        return BatchSizes(self.global_batch_size, ramp)

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None if the epochs of the corpora give its length."""
        samples = self.train_samples
        if self.train_tokens is not None:
            samples = self.train_tokens // self.sequence_length
        sizes = self.batch_sizes
        return self.train_steps if samples is None else sizes.whole_steps(samples)

    @property
    def learning_rates(self) -> tuple[float, float]:
        """Highest and lowest learning rate of the schedule."""
        peak = self.optimizer.used("learning_rate")
        if self.schedule.min_learning_rate is not None:
            return peak, self.schedule.min_learning_rate
        # A schedule without a minimum stays at its peak.
        share = self.schedule.min_ratio
        return peak, peak if share is None else share * peak

    @property
    def num_samples(self) -> int | None:
        """Samples of the whole run; None if the epochs of the corpora give its length."""
        steps = self.num_steps
        return None if steps is None else self.batch_sizes.samples(steps)

    def segments(self, start_step: int = 0) -> list[int]:
        """Last steps of all jobs of the run except the last job; empty if its length is unknown."""
        if not self.segment_steps or self.num_steps is None:
            return []
        ends = range(self.segment_steps, self.num_steps, self.segment_steps)
        return [step for step in ends if step > start_step]


def _backends_with(feature: str) -> dict[str, Any]:
    """Back ends that have a feature, with the literal that states it."""
    stated = {
        name: plugins.constant(BACKEND_CHECKS, name, feature, default=False)
        for name in plugins.names(BACKEND_CHECKS)
    }
    return {name: value for name, value in stated.items() if value}


PACKING_SETTINGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Training settings about documents in a sample. They need the end-of-document token."""

INDEX_SETTINGS = (
    *("sequence_length", "split", "split_rule", "blend", "within_corpus"),
    *("separate_last_epoch", "drop_last_partial_sequence"),
)
"""Training settings that determine the sample index. They are options of the stage `index`; a run
that resumes compares them."""
