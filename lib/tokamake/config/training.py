"""Settings of the training run: what it trains on, for how long, with which optimizer."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokamake.config.batching import BatchSizes, Rampup
from tokamake.config.fields import Settings, Split, plug_in
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.parallel import SPLIT_BACKWARD, ParallelSettings
from tokamake.config.schedule import ScheduleSettings, Span, check_schedule
from tokamake.errors import UserError

LENGTHS = ("train_steps", "train_samples", "train_tokens")
"""Settings that say how long a run is, each in its own unit."""


class FimSettings(Settings):
    """Fill-in-the-middle: training documents rearranged so that the model learns to fill gaps."""

    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of documents that are rearranged; 0: none."""
    spm_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the rearranged whose suffix comes first (SPM), before the prefix (PSM)."""
    split_token: str = ""
    """Special token that parts a document, as a repository into files; empty: nothing does."""
    fragment_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the parts of such a document that are rearranged, each by itself."""
    prefix: str = "<fim_prefix>"
    """Special token before the prefix."""
    suffix: str = "<fim_suffix>"
    """Special token before the suffix."""
    middle: str = "<fim_middle>"
    """Special token before the middle."""


class TrainSettings(Settings):
    """The training run itself."""

    finetune: bool | None = None
    """How to start from model.checkpoint. true: take its weights alone, at step 0, with a fresh
    optimizer. false: continue it, with its optimizer states, step and samples. Without one, empty:
    there are random weights."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Tokens that the model sees per sample; a sample holds one more, the last label."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples per rank and forward pass."""
    global_batch_size: Annotated[int, Field(ge=1)] = 8
    """Samples per step over all ranks; a multiple of micro_batch_size × ranks."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """Start, increment, samples: global batches grow from `start` to `global_batch_size` by
    `increment` while the run consumes its first `samples`; empty: full size at once."""
    train_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the whole run, 1000 where neither train_samples nor train_tokens is given
    instead; empty: as many as the corpora's epochs give, exactly."""
    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of the whole run; those that fill no global batch are left."""
    train_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the whole run; those that fill no global batch are left."""
    split: Split = "98,1,1"
    """Shares of each merged file's documents for training, validation and test; a corpus may name
    its own in the column `sets` of the table of corpora."""
    split_rule: Literal["megatron_core", "megatron_deepspeed"] = "megatron_core"
    """How shares become documents: as megatron-core rounds bounds, or Megatron-DeepSpeed parts."""
    blend: Literal["weighted", "exact", "corpora"] = "weighted"
    """Order of samples: as Megatron draws files by weight; exact in integers, of files; or of
    corpora, each ordered by `within_corpus`."""
    within_corpus: Literal["concatenated", "shuffled", "blended"] = "shuffled"
    """Order inside a corpus where corpora are blended: files one after the other, all samples
    shuffled, or files blended by their weights."""
    separate_last_epoch: bool | None = None
    """Shuffle a last epoch that is used in part by itself; empty: if less than 80 % of it is used,
    as Megatron does."""
    drop_last_partial_sequence: bool = True
    """Leave out the last tokens of a validation set where they do not fill a sample; else the
    sample is filled up with what has no loss."""
    fim: FimSettings = FimSettings()
    """Fill-in-the-middle."""
    reset_position_ids: bool = False
    """Count positions anew in each document of a sample."""
    reset_attention_mask: bool = False
    """Let no token attend to those of other documents in its sample."""
    eod_mask_loss: bool = False
    """Leave out the loss of what follows an end of document, which nothing foretells."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer and its rates."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Learning rate over time."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of forward and backward; weights that are updated, sums of gradients and
    optimizer states stay fp32. fp16 scales the loss, as large as gradients allow. Empty: bf16 on
    accelerators, fp32 on the CPU."""
    deterministic: bool = False
    """Take no algorithm whose results differ from run to run, even where it is faster."""
    compile: bool = False
    """Let torch.compile make the kernels of each layer anew; starts take longer for it."""
    backend: Annotated[str, plug_in("train/backends")] = "native"
    """What shares the work of data-parallel ranks: PyTorch's FSDP2, or DeepSpeed."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What data-parallel ranks share instead of each keeping it: 0 nothing, 1 optimizer states,
    2 gradients, too, 3 weights, too."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where DeepSpeed keeps optimizer states and fp32 weights, and updates them: as the model, or
    in the host's memory."""
    offload_param: Literal["none", "cpu"] = "none"
    """Where DeepSpeed keeps the weights that zero_stage 3 shares, until they are needed."""
    parallel: ParallelSettings = ParallelSettings()
    """How ranks share the model and its sequences."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again to save memory: nothing, what is cheap, or layers."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which layers, of `full`: all in groups of recompute_num_layers, or the first so many of each
    pipeline stage."""
    recompute_num_layers: Annotated[int, Field(ge=1)] = 1
    """See recompute_method."""
    log_interval: Annotated[int, Field(ge=1)] = 10
    """Steps between log lines."""
    evaluation_interval: Annotated[int, Field(ge=1)] = 100
    """Steps between measurements of the validation loss."""
    evaluation_steps: Annotated[int, Field(ge=0)] = 10
    """Global batches per measurement; 0 turns validation off."""
    save_interval: Annotated[int, Field(ge=1)] = 1000
    """Steps between checkpoints; the last step always saves one."""
    segment_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of one job: a run that is longer than a job may be becomes a chain of jobs, each with
    its checkpoint and its evaluation. Empty: one job."""

    @model_validator(mode="before")
    @classmethod
    def _usual_length(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.keys() & set(LENGTHS):
            return {**values, "train_steps": 1000}
        return values

    @model_validator(mode="after")
    def _fit_together(self) -> "TrainSettings":
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        self._check_length()
        if self.backend == "deepspeed" and self.precision == "bf16" and self.zero_stage == 0:
            # DeepSpeed would train in bf16 alone, with a much larger error.
            raise ValueError(
                "zero_stage: 0: keeps no fp32 weights beside bf16; set it to 1 or precision to fp32"
            )
        self._check_offload()
        if self.parallel.data_parallel_replicate_size > 1 and not self.zero_stage:
            raise ValueError(
                f"parallel.data_parallel_replicate_size: "
                f"{self.parallel.data_parallel_replicate_size}: with zero_stage 0, which shards "
                "nothing; set zero_stage to 1 or more, or leave it out"
            )
        self._check_hessian()
        self._check_compile()
        self._check_split_backward()
        return self

    def _check_offload(self) -> None:
        for name, stage in (("offload_optimizer", 1), ("offload_param", 3)):
            least = self.backend == "deepspeed" and self.zero_stage >= stage
            if getattr(self, name) != "none" and not least:
                raise ValueError(
                    f"{name}: {getattr(self, name)}: needs backend deepspeed and zero_stage "
                    f"{stage} or more; set these or none"
                )

    def _check_hessian(self) -> None:
        if self.optimizer.hessian_interval is None:
            return
        name = f"optimizer.name: {self.optimizer.name}: needs gradients of labels that are drawn"
        if self.backend != "native":
            raise ValueError(f"{name} from the model, for which set backend to native")
        if self.parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"{name} from logits, which one pipeline stage alone has; set "
                "parallel.pipeline_parallel_size to 1"
            )

    def _check_split_backward(self) -> None:
        schedule = self.parallel.pipeline_schedule
        if self.parallel.pipeline_parallel_size == 1 or schedule not in SPLIT_BACKWARD:
            return
        late = f"with pipeline_schedule {schedule}, which computes gradients of weights late"
        if self.backend == "native" and self.zero_stage == 3:
            # Weights would be gone before their gradients are computed, with no error.
            raise ValueError(f"zero_stage: 3: {late}, they come out wrong; set it to 2")
        if self.recompute_granularity == "selective":
            # torch computes again once for a backward pass, and here are two.
            raise ValueError(
                f"recompute_granularity: selective: {late}, what is kept is gone by then; "
                "set it to full or none"
            )

    def _check_compile(self) -> None:
        if not self.compile:
            return
        if self.backend == "deepspeed":
            raise ValueError(
                "compile: true: is not supported by backend deepspeed; set it to false or backend "
                "to native"
            )
        if self.recompute_granularity == "selective":
            raise ValueError(
                "compile: true: does not go with recompute_granularity selective, which tells "
                "operators apart; set compile to false, or the other to full or none"
            )
        schedule = self.parallel.pipeline_schedule
        if self.parallel.pipeline_parallel_size > 1 and schedule in SPLIT_BACKWARD:
            # Compiled backward passes give away buffers that the second half needs.
            raise ValueError(
                f"compile: true: with pipeline_schedule {schedule}, which computes gradients of "
                "weights late, these come out wrong; set it to false or take interleaved_1f1b"
            )

    def _check_length(self) -> None:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both say how long; give one of them")
        try:
            steps = self.num_steps
        except UserError as error:
            raise ValueError(str(error)) from None
        if steps == 0:
            raise ValueError(
                f"{given[0]}: {getattr(self, given[0])}: fills no global batch of "
                f"{self.batch_sizes.at(0)} × {self.sequence_length} tokens; raise it"
            )
        if steps:
            span = Span(steps, self.batch_sizes, self.sequence_length)
            check_schedule(self.schedule, self.optimizer, span)

    @property
    def batch_sizes(self) -> BatchSizes:
        """Samples of each step."""
        ramp = Rampup(*self.rampup_batch_size) if self.rampup_batch_size else None
        return BatchSizes(self.global_batch_size, ramp)

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None where the corpora's epochs decide."""
        samples = self.train_samples
        if self.train_tokens is not None:
            samples = self.train_tokens // self.sequence_length
        sizes = self.batch_sizes
        return self.train_steps if samples is None else sizes.whole_steps(samples)

    @property
    def num_samples(self) -> int | None:
        """Samples of the whole run; None where the corpora's epochs decide."""
        steps = self.num_steps
        return None if steps is None else self.batch_sizes.samples(steps)

    def segments(self, begun: int = 0) -> list[int]:
        """Steps at which all jobs of the run but the last one end; none if its length is not known.

        Args:
            begun: step that the run starts from.
        """
        if not self.segment_steps or self.num_steps is None:
            return []
        ends = range(self.segment_steps, self.num_steps, self.segment_steps)
        return [step for step in ends if step > begun]


PACKING_SETTINGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Training settings about documents that share a sample, which need the end-of-document token."""

INDEX_SETTINGS = (
    "sequence_length",
    "split",
    "split_rule",
    "blend",
    "within_corpus",
    "separate_last_epoch",
    "drop_last_partial_sequence",
)
"""Training settings that decide the index: options of that stage, compared when a run starts."""
