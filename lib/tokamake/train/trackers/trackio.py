"""trackio (https://huggingface.co/docs/trackio). TRACKIO_SPACE_ID or TRACKIO_SERVER_URL applies.

Offline, runs are in a database: `TRACKIO_DIR=... trackio show` shows them.
"""

import os
from collections.abc import Sequence
from uuid import uuid4

from tokamake.train.metrics import Record, TextSample
from tokamake.train.trackers._base import FollowedRun

PACKAGES = ("trackio",)


class Tracker:
    """See `_base.Tracker`."""

    def __init__(self, run: FollowedRun) -> None:
        if not run.online:
            os.environ["TRACKIO_DIR"] = str(run.folder)
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio

        # trackio continues a run by its name, so that it must be unique in the project.
        self.id = run.id or f"{run.name}-{uuid4().hex[:8]}"
        self._run = trackio.init(
            project=run.project,
            name=self.id,
            resume="allow",
            config=run.settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def add(self, record: Record) -> None:
        values = {name: value for name, value in record.items() if name != "step"}
        self._run.log(values, step=int(record["step"]))

    def add_texts(self, step: int, texts: Sequence[TextSample]) -> None:
        import trackio

        table = trackio.Table(columns=[*TextSample._fields], data=[[*each] for each in texts])
        self._run.log({"texts": table}, step=step)

    def close(self) -> None:
        self._run.finish()
