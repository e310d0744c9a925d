"""Settings of a training run: batches, length, data order, optimizer, precision, parallelism."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from tokamake.config.fields import Settings, Split, plug_in
from tokamake.config.objective import DEFAULT, ObjectiveName
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.parallel import ParallelSettings
from tokamake.config.schedule import ScheduleSettings
from tokamake.config.train_sections import (
    BadStepSettings,
    DropoutSettings,
    FimSettings,
    LossScalingSettings,
    MaskingSettings,
    MTPSettings,
    RouterSettings,
    StepRanges,
    TrackerSettings,
)

OnChange = Literal["refuse", "continue", "restart"]
_BATCH_SCHEMA = {"anyOf": [{"minimum": 1, "type": "integer"}, {"type": "null"}]}


def _first_and_last(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) != 2:
        raise ValueError("not two steps; give the first and the last one, such as [20, 22]")
    return value


class TrainFields(Settings):
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
    objective: ObjectiveName = DEFAULT
    """Training objective. causal: predict the next token. retro: the same, with similar text of
    other documents in sight; it needs the family retro. masked: restore masked tokens, as BERT
    does. span_corruption: restore spans of text in a decoder, as T5 does. ict: find the block of a
    sentence, for retrieval. The last three need families that learn them (bert; t5, hf_t5;
    biencoder), and data with `tokenize.split_sentences: true`."""
    masking: MaskingSettings = MaskingSettings()
    """Masking of the objectives masked and span_corruption."""
    pack_samples: bool = False
    """Let short samples of a micro batch share rows, to reduce padding. Samples do not see
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
    router: RouterSettings = RouterSettings()
    """Losses of the routers of mixtures of experts, and the capacity of experts."""
    mtp: MTPSettings = MTPSettings()
    """Losses of layers that predict further tokens (MTP)."""
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
    memory, wall_clock_breakdown. A setting is refused if
    tokamake has its own, if it has no effect, or if it would break another setting."""
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
    verify_interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between checks of the hardware: each rank computes a micro batch twice, and other bits
    end the job with the name of the host that computed them, which the next job leaves out. A check
    takes somewhat longer than two micro batches, in a pipeline than three for each of its ranks. It
    needs `deterministic: true` on accelerators. Errors that repeat, and errors of the update, are
    not found. Empty: no checks."""
    log_interval: Annotated[int, Field(ge=1)] = 10
    """Steps between log lines; train_steps turns off all but the first and the last."""
    log_style: Literal["plain", "megatron"] = "plain"
    """Log lines and TensorBoard tags of tokamake (plain) or of Megatron-LM, for programs that read
    its logs. metrics.jsonl is the same. As in Megatron-LM, a line has the learning rate of the next
    step; TensorBoard has the rate of the step."""
    log_settings: bool = False
    """Print all settings of training as a job begins; by default, the changed settings."""
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
    sample_interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between samples of text: the model continues some prompts. They are written to
    training/samples.jsonl, and the report and trackers show them. Training itself does not change.
    Only for the objective causal. Empty: none."""
    sample_prompts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts to continue. Empty: the first words of some documents of each validation split."""
    sample_tokens: Annotated[int, Field(ge=1)] = 48
    """Tokens to add to each prompt, at most; the end of a document ends a sample."""
    sample_temperature: Annotated[float, Field(ge=0)] = 0.8
    """Softmax temperature of samples; 0 always takes the most likely token. The draws are the same
    at each step."""
    save_interval: Annotated[int, Field(ge=1)] = 1000
    """Steps between checkpoints, besides the last step; train_steps turns off all but the last."""
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
