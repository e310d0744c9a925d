"""The section `finetune`, and which settings of `train` fit it."""

from typing import Any

import pytest

from tokamake.config.finetune import TRAIN_SETTINGS, FinetuneSettings, check_train_settings
from tokamake.config.root import Config
from tokamake.config.training import TrainSettings
from tokamake.config_files import validate
from tokamake.errors import UserError

TASK = {"task": "rte", "train_files": "a.tsv", "validation_files": ["b.tsv", "c.tsv"]}


def config(**changes: Any) -> Config:
    values = {"model": {"checkpoint": "bert"}, "finetune": TASK, **changes}
    return validate(Config, values, "my.yaml")


def test_a_task_is_its_name_and_files_are_one_or_several() -> None:
    finetune = config().finetune
    assert finetune is not None
    assert finetune.task.name == "rte"
    assert finetune.train_files == ("a.tsv",)
    assert finetune.validation_files == ("b.tsv", "c.tsv")
    again = FinetuneSettings.model_validate(finetune.model_dump(mode="json"))
    assert again == finetune


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"architecture": "a.yaml"}}, "finetune.task: rte: there is no model to finetu"),
        ({"train": {"finetune": False}}, "train.finetune: false: a run with the section finetune"),
        ({"finetune": {**TASK, "task": "rt"}}, "rt"),
        ({"finetune": {**TASK, "train_files": []}}, "finetune.train_files"),
        ({"finetune": {**TASK, "epochs": 0}}, "finetune.epochs"),
        ({"train": {"schedule": {"warmup_samples": 9}}}, "in samples or tokens, but the last step"),
        ({"train": {"backend": "deepspeed"}}, "train.backend: deepspeed: finetuning uses"),
        (
            {"train": {"optimizer": {"name": "sophia_g"}}},
            "train.optimizer.name: sophia_g: needs an extra pass",
        ),
        (
            {"train": {"parallel": {"pipeline_parallel_size": 2}, "global_batch_size": 8}},
            "pipeline_parallel_size: 2: the head of a task needs whole rows",
        ),
        (
            {"train": {"parallel": {"context_parallel_size": 2}}},
            "context_parallel_size: 2: the head of a task needs whole rows",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        config(**changes)
    assert message in str(caught.value)


def test_a_checkpoint_needs_no_setting_about_finetuning() -> None:
    assert config().train.finetune is None
    check_train_settings(TrainSettings())
    assert {*TRAIN_SETTINGS} <= {*TrainSettings.model_fields}
