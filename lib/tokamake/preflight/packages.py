"""Optional packages that plug-ins of a training need: does this Python environment have them?

The dry run asks before any job, and a job asks as it starts.
"""

from collections.abc import Iterator
from importlib.util import find_spec

from tokamake import plugins
from tokamake.config.trackers import FOLDER as TRACKERS
from tokamake.config.training import BACKEND_CHECKS, TrainSettings
from tokamake.errors import UserError
from tokamake.runtime.requirements import required


def check_packages(train: TrainSettings) -> None:
    """Check that the packages of the back end, the optimizer and the trackers are installed."""
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
