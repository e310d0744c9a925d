"""Optional packages that a config needs are named by the dry run, before any job."""

import os
import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.workflows import CONFIG, MINE, SNAKEMAKE, make_workspace
from tokamake import plugins
from tokamake.config.trackers import FOLDER
from tokamake.config.training import BACKEND_CHECKS, TrainSettings
from tokamake.errors import UserError
from tokamake.workflow import packages

OPTIONAL = {
    package
    for kind in (BACKEND_CHECKS, "optim", FOLDER)
    for name in plugins.names(kind)
    for package in plugins.constant(kind, name, "PACKAGES", default=())
}


def only_base(name: str) -> ModuleSpec | None:
    """As `find_spec` in an environment without the optional packages and the executors."""
    return None if name in {*OPTIONAL, "snakemake_executor_plugin_pbs"} else ModuleSpec(name, None)


@pytest.fixture
def _base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", only_base)
    monkeypatch.delenv("JOB_CONTAINER", raising=False)


def settings(**train: Any) -> TrainSettings:
    return TrainSettings.model_validate({**CONFIG["train"], **train})


@pytest.mark.usefixtures("_base")
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
        packages.check_packages(settings(**train))
    message = str(caught.value)
    assert message.startswith(f"train.{setting}: needs ")
    assert f"; run `{command}`, or change the setting" in message


@pytest.mark.usefixtures("_base")
def test_the_default_config_needs_no_optional_package() -> None:
    packages.check_packages(settings())


@pytest.mark.usefixtures("_base")
def test_ranks_in_an_image_have_packages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_CONTAINER", "tokamake.sif")
    packages.check_packages(settings(backend="deepspeed"))


@pytest.mark.usefixtures("_base")
def test_a_job_in_an_image_of_the_profile_has_packages_of_its_own() -> None:
    packages.check_packages(settings(backend="deepspeed"), image="tokamake.sif")


@pytest.mark.slow
def test_the_dry_run_names_it(tmp_path: Path) -> None:
    """A folder without `torchao` stands for an environment that lacks it."""
    folder = make_workspace(tmp_path)
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torchao' else find(name, *rest)\n"
    )
    train = {**CONFIG["train"], "optimizer": {"name": "adamw_8bit"}}
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "train": train}))
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}

    def dry_run(target: str) -> subprocess.CompletedProcess[str]:
        command = (*SNAKEMAKE, "-n", *MINE, target)
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    result = dry_run("train")
    assert result.returncode == 2
    assert "tokamake: run smoke: train.optimizer.name: adamw_8bit: needs torchao" in result.stderr
    assert dry_run("data").returncode == 0  # data need no package of training
