"""Optional packages that plug-ins of a config need: does this Python environment have them?"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from tokamake import plugins
from tokamake.config.trackers import FOLDER as TRACKERS
from tokamake.config.training import BACKEND_CHECKS, TrainSettings
from tokamake.doctor.environment import required
from tokamake.errors import UserError


def check_packages(train: TrainSettings, *, image: str | None = None) -> None:
    """Check that the packages of the back end, the optimizer and the trackers are installed.

    Ranks in the image of a container have packages of their own, so then nothing is checked.

    Args:
        train: settings of a run that is to be trained.
        image: the resource `container` of its job, if the profile sets it.

    Raises:
        UserError: one is missing.
    """
    if image or _has_image():
        return
    for setting, kind, name in _plug_ins(train):
        packages = plugins.constant(kind, name, "PACKAGES", default=())
        if missing := [package for package in packages if find_spec(package) is None]:
            # The extra has mlflow-skinny, and what that lacks, in place of mlflow.
            specs = ["tokamake[trackers]"] if kind == TRACKERS else map(_requirement, missing)
            command = "pip install " + " ".join(f"'{spec}'" for spec in specs)
            raise UserError(
                f"train.{setting}: {name}: needs {', '.join(missing)}, which this Python "
                f"environment lacks; run `{command}`, or change the setting"
            )


def _requirement(package: str) -> str:
    return f"{package}{required(package)}"


def _plug_ins(train: TrainSettings) -> Iterator[tuple[str, str, str]]:
    """Setting, kind and name of each plug-in of training."""
    yield "backend", BACKEND_CHECKS, train.backend
    yield "optimizer.name", "optim", train.optimizer.name
    for tracker in train.trackers.names:
        yield "trackers.names", TRACKERS, tracker


def _has_image() -> bool:
    """Whether ranks run in an image: the user file of an executor, or the environment, names it."""
    if os.environ.get("JOB_CONTAINER"):
        return True
    if find_spec("snakemake_executor_plugin_pbs") is None:
        return False
    from snakemake_executor_plugin_pbs.personal import has_value

    return has_value("container")
