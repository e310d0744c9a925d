"""Weights & Biases (https://wandb.ai). WANDB_API_KEY, WANDB_ENTITY and WANDB_BASE_URL apply.

Offline, each job writes a folder of its own for the same run; `wandb sync` uploads them.
"""

import os
from collections.abc import Sequence
from uuid import uuid4

from tokamake.train.metrics import Record, TextSample
from tokamake.train.trackers._base import FollowedRun

PACKAGES = ("wandb",)


class Tracker:
    """See `_base.Tracker`."""

    def __init__(self, run: FollowedRun) -> None:
        # By default, it reads the program's memory and the git repository, and repeats its output.
        settings = {"console": "off", "silent": True, "disable_git": True, "x_disable_stats": True}
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.id = run.id or uuid4().hex[:12]
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow" if run.online else None,
            dir=run.folder,
            mode="online" if run.online else "offline",
            config=run.settings,
            settings=wandb.Settings(**settings),
        )

    def add(self, record: Record) -> None:
        values = {name: value for name, value in record.items() if name != "step"}
        self._run.log(values, step=int(record["step"]))

    def add_texts(self, step: int, texts: Sequence[TextSample]) -> None:
        import wandb

        table = wandb.Table(columns=[*TextSample._fields], data=[[*each] for each in texts])
        self._run.log({"texts": table}, step=step)

    def close(self) -> None:
        self._run.finish()
