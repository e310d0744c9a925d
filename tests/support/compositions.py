"""Random compositions: runs whose model, layout and step have settings drawn from the schema.

Families, objectives, tasks, optimizers and back ends are the folders and files that exist; choices
and flags come from the fields of the config. A new plug-in or a new choice joins by itself; a new
field fails `test_each_setting_is_an_axis_or_is_named` until it is named here.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin
from unittest.mock import patch

import torch
import yaml
from pydantic import ValidationError

from tokamake import plugins
from tokamake.config.architecture import Architecture, objectives
from tokamake.config.finetune import (
    FOLDER,
    TRAIN_SETTINGS,
    FinetuneSettings,
    FinetuneTask,
)
from tokamake.config.optimization import optimizer_facts
from tokamake.config.parallel import INTERLEAVED, ParallelSettings
from tokamake.config.resolved_run import Run
from tokamake.config.train_fields import TrainFields
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.preflight.finetune import check_settings, finetuned_architecture
from tokamake.preflight.run import check_on_ranks, check_run

KINDS = ("tensor", "context", "pipeline")
MOST_RANKS = 16
"""Ranks of two kinds of parallelism with their largest sizes."""
Values = dict[str, Any]
"""Values of axes by their names, without axes that have their default."""
Axes = dict[str, tuple[Any, ...]]
"""Values of each axis by its name; the first value is the default."""

SIZES: Axes = {
    "data_parallel_size": (1, 2, 4),
    "parallel.tensor_parallel_size": (1, 2, 4),
    "parallel.context_parallel_size": (1, 2, 4),
    "parallel.expert_parallel_size": (1, 2, 4),
    "parallel.pipeline_parallel_size": (1, 2, 4),
    "parallel.virtual_pipeline_size": (1, 2),
    "parallel.data_parallel_replicate_size": (1, 2),
    "parallel.pipeline_layers": ((), "uneven"),
    "micro_batch_size": (2, 1, 3),
    "num_micro_batches": (2, 1, 4),
    "rampup_batch_size": (None, "grows"),
    "gradient_clipping": (0.05, 0.0),
    "recompute_num_layers": (1, 2),
    "dropout.hidden": (0.0, 0.1),
    "dropout.attention": (0.0, 0.1),
    "dropout.embedding": (0.0, 0.1),
    "optimizer.weight_decay": (0.1, 0.0),
    "router.balance_coefficient": (0.5, 0.0),
    "router.z_coefficient": (0.1, 0.0),
    "router.bias_update_rate": (0.001, 0.0),
    "mtp.loss_scaling_factor": (0.3, 1.0, 0.0),
    "router.capacity_factor": (None, 0.5, 1.0),
    "precision": ("fp32", "bf16", "fp16"),
    "architecture.num_key_value_heads": (2, 4, 1),
    "layers_of_stage": (1, 2),
    "architecture.head_dim": (8, 16),
}
"""Values of fields that have no list of choices; the first one is the default."""

NOT_OF_A_STEP = {
    *("finetune", "load_optimizer", "on_change", "masking", "sequence_length", "train_steps"),
    *("train_samples", "train_tokens", "split", "split_rule", "blend", "within_corpus", "fim"),
    *("separate_last_epoch", "drop_last_partial_sequence", "schedule", "loss_scaling"),
    *("on_bad_step", "skip_data", "deterministic", "deepspeed", "verify_data", "log_interval"),
    *("verify_interval", "sample_interval", "sample_prompts", "sample_tokens"),
    "sample_temperature",
    *("init_timeout_seconds", "train_timeout_seconds", "log_style", "log_settings", "trackers"),
    *("profile_steps", "evaluation_interval", "evaluation_steps", "save_interval", "keep_last"),
    *("keep_every", "keep_best", "segment_steps", "global_batch_size"),
}
"""Settings of `train` that decide which samples a step has, what is written, or when."""
SLOW = {"compile", "offload_optimizer", "offload_param"}
"""Settings that take seconds each, or need DeepSpeed's compiled kernels: tests of their own have
them."""
ROUNDED_BY_LAYOUT = {"adamw_8bit"}
"""Optimizers whose states are rounded in blocks of a rank's part: layouts differ."""

EFFECTS: dict[str, tuple[Any, ...]] = {
    "parallel.sequence_parallel": ("parallel.tensor_parallel_size", 1),
    "parallel.context_parallel_method": ("parallel.context_parallel_size", 1),
    "parallel.pipeline_schedule": ("parallel.pipeline_parallel_size", 1),
    "parallel.pipeline_layers": ("parallel.pipeline_parallel_size", 1),
    "parallel.virtual_pipeline_size": ("parallel.pipeline_parallel_size", 1),
    "recompute_method": ("recompute_granularity", "none", "selective"),
    "recompute_num_layers": ("recompute_granularity", "none", "selective"),
    "mtp.loss_scaling_factor": ("architecture.num_nextn_predict_layers", 0),
}
"""Another axis, and the values of it with which an axis has no effect."""
TOGETHER: dict[tuple[str, Any], Values] = {
    ("parallel.pipeline_parallel_size", 4): {"num_micro_batches": 4},
    **{
        ("parallel.pipeline_schedule", name): {"parallel.virtual_pipeline_size": 2}
        for name in INTERLEAVED
    },
    ("parallel.virtual_pipeline_size", 2): {
        "parallel.pipeline_parallel_size": 2,
        "parallel.pipeline_schedule": INTERLEAVED[0],
    },
    ("parallel.data_parallel_replicate_size", 2): {"zero_stage": 1, "data_parallel_size": 2},
    ("parallel.expert_parallel_size", 2): {
        "data_parallel_size": 2,
        "architecture.num_experts": 4,
    },
    ("parallel.expert_parallel_size", 4): {
        "data_parallel_size": 4,
        "architecture.num_experts": 4,
    },
    ("parallel.pipeline_layers", "uneven"): {"layers_of_stage": 2},
    ("rampup_batch_size", "grows"): {"num_micro_batches": 4},
}
"""Values that a value of an axis needs."""


@cache
def axes() -> Axes:
    """Values of each axis of a step."""
    found: Axes = {}
    for prefix, model in (("", TrainFields), ("parallel.", ParallelSettings)):
        for name, field in model.model_fields.items():
            values = SIZES.get(prefix + name) or choices(field.annotation)
            if values and name not in NOT_OF_A_STEP | SLOW:
                found[prefix + name] = values
    found |= {name: values for name, values in SIZES.items() if "." in name or name not in found}
    found["backend"] = ("native", *sorted({*plugins.names("train/backends")} - {"native"}))
    usable = {*plugins.names("optim")} - {"adamw"} - ROUNDED_BY_LAYOUT
    found["optimizer.name"] = ("adamw", *sorted(usable))
    return found


def choices(annotation: Any) -> tuple[Any, ...]:
    """Choices of a field: both values of a flag, or the values of a Literal; else empty."""
    if annotation is bool:
        return (False, True)
    arguments = (annotation, *get_args(annotation))
    literals = [each for each in arguments if get_origin(each) is Literal]
    return tuple(value for each in literals for value in get_args(each))


LATENT: Axes = {
    "q_lora_rank": (12, 0),
    "kv_lora_rank": (10,),
    "qk_nope_head_dim": (4,),
    "qk_rope_head_dim": (4,),
    "v_head_dim": (6,),
}
SHARED_EXPERTS: Axes = {
    "moe_intermediate_size": (8,),
    "num_experts": (6, 4),
    "num_experts_per_tok": (2,),
    "n_shared_experts": (2,),
    "first_k_dense_replace": (1, 0),
    "n_group": (2, 1),
    "topk_group": (1,),
    "routed_scaling_factor": (1.5,),
}
MTP: Axes = {"num_nextn_predict_layers": (0, 1, 2)}

FAMILIES: dict[str, Axes] = {
    "biencoder": {"projection_dim": (0, 24)},
    "deepseek_v2": {**LATENT, **SHARED_EXPERTS},
    "deepseek_v3": {**LATENT, **SHARED_EXPERTS, **MTP},
    "gemma2": {
        "sliding_window": (5, 0),
        "full_attention_interval": (2, 0),
        "query_pre_attn_scalar": (12.0,),
        "attn_logit_softcapping": (0.5, 0.0),
        "final_logit_softcapping": (0.5, 0.0),
    },
    "gemma3": {
        "sliding_window": (5,),
        "full_attention_interval": (2, 0),
        "local_rope_theta": (700.0,),
        "query_pre_attn_scalar": (12.0,),
        "final_logit_softcapping": (0.0, 0.5),
    },
    "glm4_moe": {**SHARED_EXPERTS, **MTP, "partial_rotary_factor": (0.5,)},
    "gpt_neox": {"partial_rotary_factor": (0.25, 1.0)},
    "gpt_oss": {
        "num_experts": (5, 4),
        "num_experts_per_tok": (3,),
        "sliding_window": (5, 0),
        "full_attention_interval": (2, 0),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (0.1,),
    },
    "hf_t5": {"num_decoder_layers": (0, 2), "relative_attention_num_buckets": (8,)},
    "mistral": {"sliding_window": (0, 5)},
    "mixtral": {"num_experts": (3, 4), "num_experts_per_tok": (2, 1), "sliding_window": (0, 5)},
    "olmoe": {"num_experts": (5, 4), "num_experts_per_tok": (3,)},
    "olmo3": {
        "sliding_window": (5,),
        "full_attention_interval": (2, 0),
        "local_rope_theta": (500000.0,),
    },
    "phi3": {"partial_rotary_factor": (1.0, 0.5), "sliding_window": (0, 5)},
    "qwen3_moe": {
        "num_experts": (5, 4),
        "num_experts_per_tok": (2,),
        "moe_intermediate_size": (8,),
    },
    "retro": {
        "chunk_length": (4,),
        "first_retrieval_layer": (2, 1),
        "retrieval_interval": (2, 1),
        "num_encoder_layers": (1, 2),
        "encoder_hidden_dropout": (0.0, 0.1),
        "encoder_attention_dropout": (0.0, 0.1),
    },
    "smollm3": {"no_rope_layer_interval": (2, 0)},
    "t5": {"num_decoder_layers": (0, 2)},
}
"""Values of a family's own settings that are numbers."""
OF_TASKS = {"task_head"}
"""Settings of a family that finetuning sets."""
SHAPE = {
    "vocab_size": 61,  # odd, so that ranks have uneven parts
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
SECTIONS: dict[str, Values] = {"ict": {"topk": 1}, "retro": {"chunk_length": 4}}
"""Sections of `train` that an objective needs in addition."""
TASK_SETTINGS: dict[str, Values] = {"labeled_text": {"labels": ["no", "yes"]}}
"""Settings that a task needs."""


@cache
def tasks() -> tuple[str, ...]:
    """A task of finetuning for each kind of head."""
    kinds: dict[Any, str] = {}
    for name in plugins.names(FOLDER):
        task = FinetuneTask(name=name, **TASK_SETTINGS.get(name, {}))
        kinds.setdefault((task.objective, task.head), name)
    return (*kinds.values(),)


@cache
def learners() -> tuple[tuple[str, str], ...]:
    """Each family with each objective, and with each kind of task, that it learns."""
    found = []
    for family in plugins.names("models/*/model"):
        found += [(family, objective) for objective in objectives(family)]
        for task in tasks():
            try:
                Composition(family, task, {}, 0).run()
            except (ValidationError, UserError):
                continue
            found.append((family, task))
    return tuple(sorted(found))


@cache
def learner_axes(family: str, objective: str) -> Axes:
    """Values of all axes of a family with an objective or a task."""
    settings = plugins.constant("models/*/model", family, "SETTINGS")
    own = {name: values for name, values in settings.items() if isinstance(values, tuple)}
    own |= FAMILIES.get(family, {})
    found = {f"architecture.{n}": v for n, v in own.items() if n not in OF_TASKS}
    of_step = axes()
    if not plugins.constant("models/*/model", family, "HAS_ROUTERS", default=False):
        of_experts = ("router.", "parallel.expert_")
        of_step = {axis: v for axis, v in of_step.items() if not axis.startswith(of_experts)}
    if "num_nextn_predict_layers" not in own:
        of_step = {axis: v for axis, v in of_step.items() if not axis.startswith("mtp.")}
    without = {"router.bias_update_rate"}
    if plugins.constant("models/*/model", family, "HAS_ROUTER_BIASES", default=False):
        without = set()
    if "kv_lora_rank" in own:  # keys and values follow from other settings
        without |= {"architecture.head_dim", "architecture.num_key_value_heads"}
    of_step = {axis: v for axis, v in of_step.items() if axis not in without}
    if objective in tasks():
        sizes = ("data_parallel_size", "num_micro_batches", "layers_of_stage")
        known = {*TRAIN_SETTINGS, *sizes, "architecture"}
        of_step = {axis: v for axis, v in of_step.items() if axis.partition(".")[0] in known}
    return {**of_step, **{axis: v for axis, v in found.items() if axis not in of_step}}


class Composition(NamedTuple):
    """A run on some ranks."""

    family: str
    objective: str
    """Objective, or the task of a finetuning."""
    values: Values
    """Values of axes that do not have their defaults."""
    seed: int

    @property
    def axes(self) -> Axes:
        return learner_axes(self.family, self.objective)

    def value(self, axis: str) -> Any:
        return self.values[axis] if axis in self.values else self.axes[axis][0]

    def has_effect(self, axis: str) -> bool:
        """Whether another value of an axis would change anything."""
        other, *without = EFFECTS.get(axis, ("",))
        return not without or self.value(other) not in without

    @property
    def facts(self) -> dict[str, Any]:
        """Value of each axis that has an effect; family and objective are axes, too."""
        named = {axis: self.value(axis) for axis in self.axes if self.has_effect(axis)}
        return {**named, "family": self.family, "objective": self.objective}

    @property
    def world_size(self) -> int:
        sharers = [self.value(f"parallel.{kind}_parallel_size") for kind in KINDS]
        return math.prod((self.value("data_parallel_size"), *sharers))

    @property
    def num_layers(self) -> int:
        """Layers of the model: a multiple of the pipeline stages, but 2 or more."""
        stages = self.value("parallel.pipeline_parallel_size")
        stages *= self.value("parallel.virtual_pipeline_size")
        return max(2, stages) * int(self.value("layers_of_stage"))

    def run(self) -> Run:
        """The run.

        Raises:
            ValidationError, UserError: tokamake refuses it.
        """
        architecture = SHAPE | {
            name: values[0] for name, values in FAMILIES.get(self.family, {}).items()
        }
        train: dict[str, Any] = {}
        for axis in self.axes:
            section, _, name = axis.rpartition(".")
            if section == "architecture":
                architecture[name] = self.value(axis)
            elif section:
                train.setdefault(section, {})[name] = self.value(axis)
            else:
                train[name] = self.value(axis)
        architecture["num_hidden_layers"] = self.num_layers
        del train["layers_of_stage"]
        self._complete(train, architecture)
        shape = Architecture.model_validate({"family": self.family, **architecture})
        device = torch.device("cpu")
        if self.objective in tasks():
            run = self._finetuned(train, shape)
            check_settings(run.train)
            check_on_ranks(run, world_size=self.world_size, device=device)
            return run
        train["objective"] = self.objective
        if self.objective in SECTIONS:
            train[self.objective] = SECTIONS[self.objective]
        run = Run.model_validate({**self._names, "architecture": shape, "train": train})
        check_run(run, index=None, world_size=self.world_size, device=device)
        return run

    @property
    def _names(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("index", "data_root", "output"), Path("none"))
        return {"run": "composition", "seed": self.seed, "eod": 7, **nothing}

    def _complete(self, train: dict[str, Any], architecture: dict[str, Any]) -> None:
        """Turn axes into settings, and add settings that follow from them."""
        micro, count = train["micro_batch_size"], train.pop("num_micro_batches")
        batch = micro * train.pop("data_parallel_size")
        parallel = train["parallel"]
        stages = parallel["pipeline_parallel_size"] * parallel["virtual_pipeline_size"]
        if parallel["pipeline_layers"]:
            most = architecture["num_hidden_layers"] - stages + 1
            parallel["pipeline_layers"] = (*[1] * (stages - 1), most)
        train["optimizer"] |= {"learning_rate": 0.01}
        if "epsilon" in plugins.constant("optim", train["optimizer"]["name"], "SETTINGS"):
            train["optimizer"]["epsilon"] = 1e-3
        if optimizer_facts(train["optimizer"]["name"]).averages_weights:
            train["schedule"] = {"name": "constant"}
        if train["precision"] == "fp16":
            train["loss_scaling"] = {"static": True, "initial_scale": 16.0}
        if self.objective == "masked" and not architecture["sentence_order_head"]:
            train["masking"] = {"sentence_order": False}
        train |= {"global_batch_size": batch * count, "sequence_length": 16, "train_steps": 8}
        if train.get("rampup_batch_size"):  # the first step has half of the micro batches
            half = batch * count // 2
            train["rampup_batch_size"] = (half, half, half)

    def _finetuned(self, train: dict[str, Any], shape: Architecture) -> Run:
        task = FinetuneTask(name=self.objective, **TASK_SETTINGS.get(self.objective, {}))
        nothing = dict.fromkeys(("checkpoint", "pretrained", "tokenizer", "output"), Path("none"))
        finetuning = FinetuneRun(
            run="composition",
            seed=self.seed,
            new_tensors=(),
            dropped_tensors=(),
            architecture=finetuned_architecture(shape, task),
            train=TrainSettings.model_validate(train),
            finetune=FinetuneSettings(
                task=task, train_files=("none",), validation_files=("none",), epochs=8
            ),
            **nothing,
        )
        run = finetuning.resolved(train["global_batch_size"])
        return run.model_copy(update={"checkpoint": None})

    @property
    def refusal(self) -> str:
        """Reason why tokamake refuses the run; empty: it accepts it."""
        if self.world_size > MOST_RANKS:
            return f"{self.world_size} ranks"
        try:
            self.run()
        except ValidationError as error:
            return error.errors()[0]["msg"]
        except UserError as error:
            return str(error)
        return ""

    def __str__(self) -> str:
        described = {"family": self.family, "objective": self.objective}
        return yaml.safe_dump(described | self.values | {"seed": self.seed}, sort_keys=False)


def changed(composition: Composition, axis: str, value: Any) -> Composition:
    """The composition with another value of an axis, and with the values that this one needs."""
    values = composition.values | {axis: value}
    values |= {n: v for n, v in TOGETHER.get((axis, value), {}).items() if n in composition.axes}
    defaults = composition.axes
    kept = {name: each for name, each in values.items() if each != defaults[name][0]}
    return composition._replace(values=kept)


@contextmanager
def known_plug_ins() -> Iterator[None]:
    """Look for plug-ins on the disk once: a validation of a run does so often."""
    with patch.object(plugins, "_paths", cache(plugins._paths)):
        yield
