"""Section `train`: checks across its settings, and quantities that follow from them."""

import math
from typing import TYPE_CHECKING, Any

from pydantic import ValidationInfo, create_model, model_validator

from tokamake import plugins
from tokamake.config.batching import BatchSizes, Rampup
from tokamake.config.objective import SECTIONS, check_sections, objective_data, section_fields
from tokamake.config.schedule import Span, check_schedule
from tokamake.config.train_fields import TrainFields
from tokamake.config.train_sections import LossScalingSettings
from tokamake.errors import UserError

BACKEND_CHECKS = "train/backends/checks"
"""Folder with the checks of each back end, which do not import torch."""

LENGTHS = ("train_steps", "train_samples", "train_tokens")
"""Settings that give the length of a run, each in its own unit."""
_MODEL_SIZES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")


if TYPE_CHECKING:
    _AllFields = TrainFields
else:
    _AllFields = create_model("TrainFields", __base__=TrainFields, **section_fields())


class TrainSettings(_AllFields):
    """The training run."""

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
                f"micro_batch_size {self.micro_batch_size}; make it "
                f"{-(-self.global_batch_size // self.micro_batch_size) * self.micro_batch_size}"
            )
        self._check_length()
        check_sections(self)
        objective_data(self.objective).check_settings(self)
        plugins.load(BACKEND_CHECKS, self.backend).check_settings(self)
        self.check_precision()
        self._check_loss_scaling()
        self._check_offload()
        if self.parallel.data_parallel_replicate_size > 1 and not self.zero_stage:
            raise ValueError(
                f"parallel.data_parallel_replicate_size: "
                f"{self.parallel.data_parallel_replicate_size}: with zero_stage 0, which shards "
                "nothing; set zero_stage to 1 or more, or remove this setting"
            )
        self._check_extra_pass()
        self._check_dropout()
        self._check_compile()
        self._check_split_backward()
        self._check_retention()
        self._check_samples()
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

    def check_precision(self, device_type: str | None = None) -> None:
        """Refuse settings that the precision makes wrong; ranks fill an empty precision in.

        Args:
            device_type: type of a rank's device; None where it is not known yet.

        Raises:
            ValueError: the message begins with the setting.
        """
        parallel = self.parallel
        if parallel.splits_backward and self.precision in ("bf16", "fp16"):
            raise ValueError(
                f"parallel.pipeline_schedule: {parallel.pipeline_schedule}: would add up gradients "
                f"in {self.precision}; use interleaved_1f1b, or set precision to fp32"
            )
        plugins.load(BACKEND_CHECKS, self.backend).check_precision(self, device_type)

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

    def _check_samples(self) -> None:
        interval = self.sample_interval
        if interval is None:
            if self.sample_prompts:
                raise ValueError(
                    "sample_prompts: without sample_interval, no text is written; set "
                    "sample_interval, or remove this setting"
                )
        elif not objective_data(self.objective).continues_prompts:
            raise ValueError(
                f"sample_interval: {interval}: models of objective {self.objective} do not "
                "continue a prompt while they train; remove it"
            )
        elif not self.sample_prompts and not self.evaluation_steps:
            raise ValueError(
                f"sample_interval: {interval}: with evaluation_steps 0, no validation split has "
                "prompts; give sample_prompts, or set evaluation_steps"
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

    def _check_extra_pass(self) -> None:
        if not self.optimizer.facts.extra_pass:
            return
        name = f"optimizer.name: {self.optimizer.name}: needs an extra pass"
        if self.backend not in (backends := _backends_with("EXTRA_PASS")):
            raise ValueError(
                f"{name} over the batches of a step; set backend to {' or '.join(backends)}"
            )
        if self.parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"{name} with labels made from logits, which only the last pipeline stage has; set "
                "parallel.pipeline_parallel_size to 1"
            )

    def _check_split_backward(self) -> None:
        schedule = self.parallel.pipeline_schedule
        if self.parallel.splits_backward and self.recompute_granularity == "selective":
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
        if self.parallel.splits_backward:
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


def check_finetune(train: TrainSettings, *, start: str | None) -> None:
    """Check that `finetune` is set if a run starts from a checkpoint, and only then.

    Args:
        start: reason why it must be set, for the message; None: the weights are random.
    """
    if start is not None and train.finetune is None:
        raise UserError(
            f"train.finetune: missing, but {start}; add true (load its weights, start at step 0) "
            "or false (continue with its optimizer states at its step)"
        )
    if start is None and train.finetune is not None:
        raise UserError(
            f"train.finetune: {str(train.finetune).lower()}: there is no model.checkpoint; set it, "
            "or remove this setting to start from random weights"
        )


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


ADDED_SETTINGS = (
    *("verify_data", "keep_last", "keep_every", "keep_best"),
    *("init_timeout_seconds", "train_timeout_seconds"),
    *("on_bad_step", "skip_data", "loss_scaling", "log_style", "trackers"),
    *("profile_steps", "log_layer_norms", "log_corpus_losses", "load_optimizer", "verify_interval"),
    *("sample_interval", "sample_prompts", "sample_tokens", "sample_temperature"),
    *("deepspeed", "dropout", "router", "mtp", "objective", "masking", "pack_samples"),
    "log_settings",
    *SECTIONS,
)
"""Training settings that earlier versions did not have. The workflow leaves them out of `params` of
rules, and `train` out of the run's digest, where they have their default; otherwise, an update
would train all runs again."""


def without_added_defaults(train: dict[str, Any]) -> dict[str, Any]:
    """Settings of `train` as JSON, without fields of `ADDED_SETTINGS` with their defaults."""
    defaults = TrainSettings().model_dump(mode="json", include={*ADDED_SETTINGS})
    return {
        name: value
        for name, value in train.items()
        if name not in defaults or value != defaults[name]
    }
