"""Random compositions: runs whose model, layout and step have values of `composition_axes`."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import yaml
from pydantic import ValidationError

from tests.support.composition_axes import (
    EFFECTS,
    FAMILIES,
    KINDS,
    MOST_RANKS,
    SECTIONS,
    SHAPE,
    TASK_SETTINGS,
    TOGETHER,
    Axes,
    Values,
    learner_axes,
    rope_scaling,
    tasks,
)
from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.families import objectives
from tokamake.config.finetune import FinetuneSettings, FinetuneTask
from tokamake.config.optimization import optimizer_facts
from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.preflight.finetune import check_settings, finetuned_architecture
from tokamake.preflight.run import check_on_ranks, check_run


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
        others = EFFECTS.get(axis, {})
        known = {other: values for other, values in others.items() if other in self.axes}
        return not others or any(self.value(n) not in values for n, values in known.items())

    @property
    def facts(self) -> dict[str, Any]:
        """Value of each axis that has an effect; family and objective are axes, too."""
        named = {axis: self.value(axis) for axis in self.axes if self.has_effect(axis)}
        return {**named, "family": self.family, "objective": self.objective}

    @property
    def world_size(self) -> int:
        return math.prod(self.value(kind) for kind in KINDS)

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
        train, shape = self._settings()
        device = torch.device("cpu")
        if self.objective in tasks():
            # Eight steps, as of all compositions.
            run: Run = self._finetuning(train, shape).resolved(train["global_batch_size"])
            run = run.model_copy(update={"checkpoint": None})
            check_settings(run.train)
            check_on_ranks(run, world_size=self.world_size, device=device)
            return run
        train["objective"] = self.objective
        if self.objective in SECTIONS:
            own = train.get(self.objective, {})
            train[self.objective] = SECTIONS[self.objective] | own
        run = Run.model_validate({**self._names, "architecture": shape, "train": train})
        check_run(run, index=None, world_size=self.world_size, device=device)
        return run

    def _settings(self) -> tuple[dict[str, Any], Architecture]:
        """The section `train`, and the architecture without a head."""
        assert self.values.keys() <= self.axes.keys(), self.values.keys() - self.axes.keys()
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
        rope_type = train.pop("rope_type", "")
        self._complete(train, architecture)
        shape = Architecture.model_validate({"family": self.family, **architecture})
        if rope_type:
            scaling = rope_scaling(rope_type, shape.rotary_width // 2)
            changed = {"family": self.family, **architecture, "rope_scaling": scaling}
            shape = Architecture.model_validate(changed)
        return train, shape

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
        if "rho" in plugins.constant("optim", train["optimizer"]["name"], "SETTINGS"):
            train["optimizer"]["rho"] = 20.0  # or all updates of a tiny model would be clipped
        if not self.has_effect("optimizer.hessian_interval"):
            del train["optimizer"]["hessian_interval"]
        if optimizer_facts(train["optimizer"]["name"]).averages_weights:
            train["schedule"] = {"name": "constant"}
        is_static = train.pop("static_loss_scale")
        if train["precision"] == "fp16":
            train["loss_scaling"] = {"static": is_static, "initial_scale": 16.0}
        if self.objective == "masked" and not architecture["sentence_order_head"]:
            train["masking"] = {"sentence_order": False}
        train |= {"global_batch_size": batch * count, "sequence_length": 16, "train_steps": 8}
        if train.get("rampup_batch_size"):  # the first step has half of the micro batches
            half = batch * count // 2
            train["rampup_batch_size"] = (half, half, half)

    def _finetuning(self, train: dict[str, Any], shape: Architecture) -> FinetuneRun:
        task = FinetuneTask(name=self.objective, **TASK_SETTINGS.get(self.objective, {}))
        nothing = dict.fromkeys(("checkpoint", "pretrained", "tokenizer", "output"), Path("none"))
        return FinetuneRun(
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

    @property
    def config(self) -> str:
        """The run.yaml, which `tokamake prove` takes."""
        finetunes = self.objective in tasks()
        run = self._finetuning(*self._settings()) if finetunes else self.run()
        return yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False)


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
