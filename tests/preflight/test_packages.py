"""Optional packages that a training needs are named with the command that installs them."""

from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from tests.support.workflows import CONFIG
from tokamake import plugins
from tokamake.config.train_sections import TRACKERS
from tokamake.config.training import BACKEND_CHECKS, TrainSettings
from tokamake.errors import UserError
from tokamake.preflight import packages

OPTIONAL = {
    package
    for kind in (BACKEND_CHECKS, "optim", TRACKERS)
    for name in plugins.names(kind)
    for package in plugins.constant(kind, name, "PACKAGES", default=())
}


def only_base(name: str) -> ModuleSpec | None:
    """As `find_spec` in an environment without the optional packages."""
    return None if name in OPTIONAL else ModuleSpec(name, None)


@pytest.fixture(autouse=True)
def _base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", only_base)


def settings(**train: Any) -> TrainSettings:
    return TrainSettings.model_validate({**CONFIG["train"], **train})


@pytest.mark.parametrize(
    ("train", "setting", "command"),
    [
        ({"backend": "deepspeed"}, "backend: deepspeed", "pip install 'deepspeed<0.20,>=0.19'"),
        (
            {"optimizer": {"name": "adamw_8bit"}},
            "optimizer.name: adamw_8bit",
            "pip install 'torchao>=0.10'",
        ),
        (
            {"trackers": {"names": ["wandb"]}},
            "trackers.names: wandb",
            "pip install 'tokamake[trackers]'",
        ),
        (
            {"trackers": {"names": ["mlflow"]}},
            "trackers.names: mlflow",
            "pip install 'tokamake[trackers]'",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    train: dict[str, Any], setting: str, command: str
) -> None:
    with pytest.raises(UserError) as caught:
        packages.check_training_packages(settings(**train))
    message = str(caught.value)
    assert message.startswith(f"train.{setting}: needs ")
    assert f"; run `{command}`, or change the setting" in message


def test_the_default_config_needs_no_optional_package() -> None:
    packages.check_training_packages(settings())
