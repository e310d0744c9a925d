"""Random compositions: runs whose model, layout and step have settings drawn from the schema.

Families, objectives, optimizers and back ends are the folders and files that exist; choices and
flags come from the fields of the config. A new plug-in or a new choice joins by itself; a new field
fails `test_each_setting_is_an_axis_or_is_named` until it is named here.
"""

import math
import os
import random
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
import torch
import torch.distributed as dist
import yaml
from pydantic import ValidationError

from tests.support.ranks import RanksFailed, spawn
from tokamake import plugins
from tokamake.config.architecture import objectives
from tokamake.config.optimization import optimizer_facts
from tokamake.config.parallel import ParallelSettings
from tokamake.config.resolved_run import Run
from tokamake.config.train_fields import TrainFields
from tokamake.errors import UserError
from tokamake.preflight.run import check_run
from tokamake.prove.comparison import differences
from tokamake.runtime.ranks import Ranks

KINDS = ("tensor", "context", "pipeline")
LAID_OUT, CHANGED = 0.75, 0.4
"""Shares of the sizes of a layout, and of the other axes, that are drawn; the rest has defaults."""
Values = dict[str, Any]
"""Values of axes by their names, without axes that have their default."""

WORLD_SIZES = (1, 2, 2, 2, 4, 4, 4, 8)
SIZES: dict[str, tuple[Any, ...]] = {
    "parallel.tensor_parallel_size": (1, 2, 2, 4),
    "parallel.context_parallel_size": (1, 2, 2, 4),
    "parallel.pipeline_parallel_size": (1, 2, 2, 4),
    "parallel.virtual_pipeline_size": (1, 2),
    "parallel.data_parallel_replicate_size": (1, 2),
    "parallel.pipeline_layers": ((), "uneven"),
    "micro_batch_size": (2, 1, 3),
    "num_micro_batches": (2, 1, 4),
    "gradient_clipping": (0.05, 0.0),
    "recompute_num_layers": (1, 2),
    "dropout.hidden": (0.0, 0.1),
    "dropout.attention": (0.0, 0.1),
    "dropout.embedding": (0.0, 0.1),
    "optimizer.weight_decay": (0.1, 0.0),
    "precision": ("fp32", "fp32", "bf16", "fp16"),
    "architecture.num_key_value_heads": (2, 4, 1),
    "architecture.num_hidden_layers": (2, 4, 8),
    "architecture.head_dim": (8, 16),
}
"""Values of fields that have no list of choices; the first one is the default."""

NOT_OF_A_STEP = {
    *("finetune", "load_optimizer", "on_change", "masking", "sequence_length", "train_steps"),
    *("train_samples", "train_tokens", "split", "split_rule", "blend", "within_corpus", "fim"),
    *("separate_last_epoch", "drop_last_partial_sequence", "schedule", "loss_scaling"),
    *("on_bad_step", "skip_data", "deterministic", "deepspeed", "verify_data", "log_interval"),
    *("init_timeout_seconds", "train_timeout_seconds", "log_style", "log_settings", "trackers"),
    *("profile_steps", "evaluation_interval", "evaluation_steps", "save_interval", "keep_last"),
    *("keep_every", "keep_best", "segment_steps", "global_batch_size", "rampup_batch_size"),
}
"""Settings of `train` that decide which samples a step has, what is written, or when."""
SLOW = {"compile", "offload_optimizer", "offload_param"}
"""Settings with tests of their own: they take seconds, or need DeepSpeed's compiled kernels."""
OPTIMIZERS_WITH_OTHER_PASSES = {"sophia_g"}
"""It draws labels from logits in a second pass; tests/optim compares layouts."""


EFFECTS: dict[str, tuple[Any, ...]] = {
    "parallel.sequence_parallel": ("parallel.tensor_parallel_size", 1),
    "parallel.context_parallel_method": ("parallel.context_parallel_size", 1),
    "parallel.pipeline_schedule": ("parallel.pipeline_parallel_size", 1),
    "parallel.pipeline_layers": ("parallel.pipeline_parallel_size", 1),
    "recompute_method": ("recompute_granularity", "none", "selective"),
    "recompute_num_layers": ("recompute_granularity", "none", "selective"),
}
"""Another axis, and the values of it with which an axis has no effect."""
INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv")
TOGETHER: dict[tuple[str, Any], Values] = {
    ("parallel.pipeline_parallel_size", 4): {
        "num_micro_batches": 4,
        "architecture.num_hidden_layers": 4,
    },
    **{
        ("parallel.pipeline_schedule", name): {
            "parallel.virtual_pipeline_size": 2,
            "architecture.num_hidden_layers": 8,
        }
        for name in INTERLEAVED
    },
    ("parallel.data_parallel_replicate_size", 2): {"zero_stage": 1},
}
"""Values that a value of an axis needs."""


@cache
def axes() -> dict[str, tuple[Any, ...]]:
    """Values of each axis of a step, by name; the first value is the default."""
    found: dict[str, tuple[Any, ...]] = {}
    for prefix, model in (("", TrainFields), ("parallel.", ParallelSettings)):
        for name, field in model.model_fields.items():
            values = SIZES.get(prefix + name) or choices(field.annotation)
            if values and name not in NOT_OF_A_STEP | SLOW:
                found[prefix + name] = values
    found |= {name: values for name, values in SIZES.items() if "." in name or name not in found}
    found["backend"] = ("native", *sorted({*plugins.names("train/backends")} - {"native"}))
    usable = {*plugins.names("optim")} - OPTIMIZERS_WITH_OTHER_PASSES - {"adamw", "adamw_8bit"}
    found["optimizer.name"] = ("adamw", *sorted(usable))
    return found


def choices(annotation: Any) -> tuple[Any, ...]:
    """Choices of a field: both values of a flag, or the values of a Literal; else empty."""
    if annotation is bool:
        return (False, True)
    arguments = (annotation, *get_args(annotation))
    literals = [each for each in arguments if get_origin(each) is Literal]
    return tuple(value for each in literals for value in get_args(each))


FAMILIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "biencoder": {"projection_dim": (0, 24)},
    "hf_t5": {"num_decoder_layers": (0, 2), "relative_attention_num_buckets": (8,)},
    "retro": {
        "chunk_length": (4,),
        "first_retrieval_layer": (2, 1),
        "retrieval_interval": (2, 1),
        "num_encoder_layers": (1, 2),
        "encoder_hidden_dropout": (0.0, 0.1),
        "encoder_attention_dropout": (0.0, 0.1),
    },
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


@cache
def learners() -> tuple[tuple[str, str], ...]:
    """Each family with each objective that it learns."""
    return tuple(
        (family, objective)
        for family in sorted(plugins.names("models/*/model"))
        for objective in objectives(family)
    )


@cache
def family_axes(family: str) -> dict[str, tuple[Any, ...]]:
    """Values of the settings of a family that have choices."""
    settings = plugins.constant("models/*/model", family, "SETTINGS")
    own = {name: values for name, values in settings.items() if isinstance(values, tuple)}
    own |= FAMILIES.get(family, {})
    return {f"architecture.{n}": v for n, v in own.items() if n not in OF_TASKS}


class Composition(NamedTuple):
    """A run on some ranks."""

    world_size: int
    family: str
    objective: str
    values: Values
    """Values of axes that do not have their defaults."""
    seed: int

    @property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        return axes() | family_axes(self.family)

    def value(self, axis: str) -> Any:
        return self.values.get(axis, self.axes[axis][0])

    @property
    def facts(self) -> set[tuple[str, Any]]:
        """Each axis with its value; ranks, family and objective are axes, too."""
        named = {(axis, self.value(axis)) for axis in axes()}
        return named | {
            ("family", self.family),
            ("objective", self.objective),
            ("data_parallel_size", self.data_parallel_size),
        }

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.num_sharers

    @property
    def num_sharers(self) -> int:
        """Ranks that share a model."""
        return math.prod(self.value(f"parallel.{kind}_parallel_size") for kind in KINDS)

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
        micro, count = train["micro_batch_size"], train.pop("num_micro_batches")
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
            train["loss_scaling"] = {"static": True, "initial_scale": 256.0}
        train |= {
            "objective": self.objective,
            "global_batch_size": micro * count * self.data_parallel_size,
            "sequence_length": 16,
            "train_steps": 8,
        }
        if self.objective in SECTIONS:
            train[self.objective] = SECTIONS[self.objective]
        content = {
            "run": "composition",
            "seed": self.seed,
            "index": "none",
            "data_root": ".",
            "output": "none",
            "eod": 7,
            "architecture": {"family": self.family, **architecture},
            "train": train,
        }
        run = Run.model_validate(content)
        check_run(run, index=None, world_size=self.world_size, device=torch.device("cpu"))
        return run

    @property
    def fits(self) -> bool:
        """Whether the ranks are a multiple of the ranks that share a model."""
        return self.data_parallel_size * self.num_sharers == self.world_size

    @property
    def is_possible(self) -> bool:
        """Whether tokamake accepts the run."""
        try:
            self.run()
        except (ValidationError, UserError):
            return False
        return True

    def __str__(self) -> str:
        described = {"ranks": self.world_size, "family": self.family, "objective": self.objective}
        return yaml.safe_dump(described | self.values | {"seed": self.seed}, sort_keys=False)


def draw(generator: random.Random) -> Composition:
    """A random composition that tokamake accepts.

    It begins with a layout and changes one axis after the other; a refused change is dropped.
    """
    family, objective = generator.choice(learners())
    seed = generator.randrange(10_000)
    drawn = Composition(generator.choice(WORLD_SIZES), family, objective, {}, seed)
    assert drawn.is_possible, f"its defaults are refused: {drawn}"
    sizes = [f"parallel.{kind}_parallel_size" for kind in KINDS]
    rest = [axis for axis in drawn.axes if axis not in sizes]
    for share, names in ((LAID_OUT, sizes), (CHANGED, rest)):
        for axis in generator.sample(names, len(names)):
            value = generator.choice(drawn.axes[axis])
            if generator.random() < share and has_effect(axis, drawn):
                drawn = changed(drawn, axis, value)
    return drawn


def has_effect(axis: str, composition: Composition) -> bool:
    """Whether another value of an axis would change anything."""
    condition = EFFECTS.get(axis)
    return condition is None or composition.value(condition[0]) not in condition[1:]


def changed(composition: Composition, axis: str, value: Any) -> Composition:
    """The composition with another value of an axis, or as it is if tokamake refuses that."""
    further = TOGETHER.get((axis, value), {})
    values = composition.values | {axis: value} | further
    defaults = composition.axes
    kept = {name: each for name, each in values.items() if each != defaults[name][0]}
    new = composition._replace(values=kept)
    return new if new.fits and new.is_possible else composition


def drawn_compositions(seed: int, count: int) -> list[Composition]:
    """Random compositions, the same for a seed."""
    generator = random.Random(seed)
    return [draw(generator) for _ in range(count)]


def prove_all(compositions: list[Composition]) -> list[list[str]]:
    """Prove compositions on these ranks; returns the differences of each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)
    ranks = Ranks(rank, size, rank, size)
    return [differences(each.run(), ranks, device=torch.device("cpu")) for each in compositions]


def failures(compositions: Iterable[Composition]) -> list[tuple[Composition, str]]:
    """Compositions that fail, each with its first difference or error."""
    by_size: dict[int, list[Composition]] = {}
    for each in compositions:
        by_size.setdefault(each.world_size, []).append(each)
    found = []
    for size, group in by_size.items():
        try:
            of_each = spawn(prove_all, size, group, timeout=900)[0]
        except RanksFailed as error:
            # One of them has ended the ranks of all.
            if len(group) > 1:
                found += [failure for each in group for failure in failures([each])]
                continue
            of_each = [[str(error)]]
        found += [(each, lines[0]) for each, lines in zip(group, of_each, strict=True) if lines]
    return found


Fails = Callable[[Composition], object]
"""Whether a composition fails."""


def shrunk(composition: Composition, fails: Fails) -> Composition:
    """The smallest composition that still fails: each axis in turn gets its default."""
    for axis in [*composition.values]:
        values = {name: value for name, value in composition.values.items() if name != axis}
        smaller = composition._replace(values=values)
        # As many data-parallel ranks as before.
        ranks = smaller.num_sharers * composition.data_parallel_size
        smaller = smaller._replace(world_size=ranks)
        if ranks <= max(WORLD_SIZES) and smaller.is_possible and fails(smaller):
            return shrunk(smaller, fails)
    return composition


def assert_proved(compositions: Iterable[Composition]) -> None:
    """Check that all compositions train as one process; the message has the smallest that fails."""
    if not (failed := failures(compositions)):
        return
    smallest = shrunk(failed[0][0], lambda each: failures([each]))
    ((_, line),) = failures([smallest])
    pytest.fail(f"{len(failed)} compositions fail; the smallest form of one:\n{smallest}{line}")
