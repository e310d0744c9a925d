"""A profile of some steps by torch.profiler: `train.profile_steps`.

The traces open in Perfetto (https://ui.perfetto.dev) or in chrome://tracing.
"""

import gzip
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tokamake import files
from tokamake.train.hooks import FinishedStep, Hook, Training

MAX_RANKS = 8
"""Only the first ranks write traces: traces of all ranks would fill the disk of a large run."""


class StepProfile(Hook):
    """Profiles the first to the last of `steps` on this rank; writes profile/rank-N.json.gz."""

    def __init__(
        self, folder: Path, steps: tuple[int, int] | None, *, rank: int, device: torch.device
    ) -> None:
        self._rank = rank
        self._path = folder / f"profile/rank-{rank}.json.gz"
        self._steps = steps if rank < MAX_RANKS else None
        kinds = torch.profiler.ProfilerActivity
        self._activities = [kinds.CPU]
        if device.type != "cpu":
            self._activities.append(getattr(kinds, device.type.upper()))
        self._profiler: Any = None

    def begin_step(self, step: int) -> None:
        """Begin a step; the first one begins the profile, also where training resumes within it."""
        if self._steps and not self._profiler and self._steps[0] <= step <= self._steps[1]:
            self._profiler = torch.profiler.profile(activities=self._activities)
            self._profiler.start()

    def end_step(self, finished: FinishedStep) -> None:
        """End a step; the last one writes the trace."""
        if self._steps and finished.state.step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write the trace of the steps so far, if a profile has begun."""
        profiler, self._profiler = self._profiler, None
        if profiler:
            profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory() as folder, files.atomic(self._path) as (path,):
                trace = Path(folder, "trace.json")
                profiler.export_chrome_trace(str(trace))
                with trace.open("rb") as source, gzip.open(path, "wb", compresslevel=5) as target:
                    shutil.copyfileobj(source, target)
            if self._rank == 0:
                print(f"{self._path}: trace of the profiled steps", flush=True)


def open_hook(training: Training) -> StepProfile:
    run, rank = training.run, training.ranks.rank
    return StepProfile(run.output, run.train.profile_steps, rank=rank, device=training.device)
