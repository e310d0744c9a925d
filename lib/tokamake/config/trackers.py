"""Settings of experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio."""

from typing import Annotated

from pydantic import AfterValidator, Field

from tokamake.config.fields import Settings, plug_in

FOLDER = "train/trackers"


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a name occurs twice; keep one")
    return names


class TrackerSettings(Settings):
    """Experiment trackers. They get the records of metrics.jsonl."""

    names: Annotated[tuple[Annotated[str, plug_in(FOLDER)], ...], AfterValidator(_once)] = ()
    """Names of files in lib/tokamake/train/trackers, such as [wandb]. Empty: none."""
    project: Annotated[str, Field(min_length=1)] = "tokamake"
    """Project of the run; MLflow calls it experiment."""
    online: bool = False
    """Send records to the tracker's server while the run trains. Environment variables of the
    tracker name the server. false: keep them in the run's folder `training/trackers`."""
