"""MLflow (https://mlflow.org). MLFLOW_TRACKING_URI names the server.

Offline, runs are in a database: `mlflow ui --backend-store-uri sqlite:///.../mlflow.db` shows them.
"""

import logging
import time
from collections.abc import Sequence

from tokamake.train.metrics import Record, TextSample
from tokamake.train.trackers._base import FollowedRun

PACKAGES = ("mlflow", "alembic", "sqlalchemy")

_MAX_PARAMETERS = 100
"""Parameters that a request may have."""
_MAX_CHARACTERS = 500
"""Characters of a parameter that all versions of MLflow take."""


class Tracker:
    """See `_base.Tracker`."""

    def __init__(self, run: FollowedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        database = f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=None if run.online else database)
        self.id = run.id
        if self.id:
            self._client.update_run(self.id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(
                run.project,
                # By default, files of an offline run would lie in the working folder.
                artifact_location=None if run.online else (run.folder / "artifacts").as_uri(),
            )
        )
        self.id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        values = [Param(name, str(value)[:_MAX_CHARACTERS]) for name, value in run.settings.items()]
        for start in range(0, len(values), _MAX_PARAMETERS):
            self._client.log_batch(self.id, params=values[start : start + _MAX_PARAMETERS])

    def add(self, record: Record) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), int(record["step"])
        metrics = [
            Metric(name, value, now, step) for name, value in record.items() if name != "step"
        ]
        self._client.log_batch(self.id, metrics=metrics)

    def add_texts(self, step: int, texts: Sequence[TextSample]) -> None:
        columns = {name: [getattr(each, name) for each in texts] for name in TextSample._fields}
        self._client.log_table(self.id, columns, f"texts/step-{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self.id)
