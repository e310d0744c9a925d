"""Trackers of a run: rank 0 sends records of metrics.jsonl to each tracker in a thread of its own.

A tracker that is slow, unreachable or broken does not delay or end training. trackers.json in the
output folder has the id of the run for each tracker, so that later jobs continue the same run.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from tokamake import files, plugins
from tokamake.config.fields import dotted
from tokamake.config.resolved_run import Run
from tokamake.config.train_sections import TRACKERS
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.train.hooks import Hook, Training
from tokamake.train.metrics import Record, TextSample, measured
from tokamake.train.trackers._base import FollowedRun, Tracker

FILE = "trackers.json"
"""Name of the file in the output folder of a run."""
TEXTS = "texts"
"""Name of a step's texts in the queue of a tracker, and in trackers.json."""
CLOSE_SECONDS = 20.0
"""Time that trackers have at the end of a job to send the rest."""


class Tracking(Hook):
    """The trackers of a run; all ranks call its methods, rank 0 sends."""

    def __init__(self, run: Run, *, rank: int = 0) -> None:
        self._path = run.output / FILE
        states, names = _read(self._path), () if rank else run.train.trackers.names
        self._senders = [_Sender(run, name, state=states.get(name, {})) for name in names]

    def recorded(self, record: Record) -> None:
        """Send the measurements of a record, soon."""
        for sender in self._senders:
            sender.add(measured(record))

    def wrote(self, step: int, texts: Sequence[TextSample]) -> None:
        """Send texts, soon."""
        for sender in self._senders:
            sender.add({"step": step, TEXTS: texts})

    def sync(self) -> None:
        """Write trackers.json, with which later jobs continue."""
        with raise_on_all_ranks():
            self._write_states()

    def _write_states(self) -> None:
        if self._senders:
            states = {sender.name: sender.state for sender in self._senders}
            files.write_json(self._path, _read(self._path) | states)

    def close(self) -> None:
        """Let the trackers send the rest, for a limited time."""
        for sender in self._senders:
            sender.end()
        for sender in self._senders:
            sender.join(CLOSE_SECONDS)
            if sender.is_alive():
                sender.say(f"did not finish in {CLOSE_SECONDS:.0f} s; its last records may be lost")
        with suppress(OSError):  # `sync` before it reported a full disk
            self._write_states()


def open_hook(training: Training) -> Tracking:
    return Tracking(training.run, rank=training.ranks.rank)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """States of the trackers by name; none if the file is missing or damaged."""
    try:
        states = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    valid = isinstance(states, dict) and all(isinstance(state, dict) for state in states.values())
    return states if valid else {}


class _Sender(Thread):
    """Sends records to one tracker; `state` has its run's `id` and the last record it got."""

    def __init__(self, run: Run, name: str, *, state: dict[str, Any]) -> None:
        super().__init__(name=name, daemon=True)
        self.state = state
        trackers = run.train.trackers
        self._run = FollowedRun(
            name=run.run,
            project=trackers.project,
            online=trackers.online,
            folder=run.output / "trackers" / name,
            id=str(state.get("id", "")),
            settings=dotted(run.model_dump(mode="json", include={"seed", "architecture", "train"})),
        )
        self._records = SimpleQueue[Record | None]()
        self._sent_before = int(state.get("step", -1)), frozenset(state.get("names", ()))
        self.start()

    def add(self, record: Record) -> None:
        self._records.put(record)

    def end(self) -> None:
        self._records.put(None)

    def say(self, text: str) -> None:
        print(f"train.trackers: {self.name}: {text}", flush=True)

    def run(self) -> None:
        """Open the tracker and send records until the end; report the first error."""
        try:
            self._run.folder.mkdir(parents=True, exist_ok=True)
            tracker: Tracker = plugins.load(TRACKERS, self.name).Tracker(self._run)
            self.state = {**self.state, "id": tracker.id}
            while (record := self._records.get()) is not None:
                if missing := self._not_sent(record):
                    texts = missing.pop(TEXTS, ())
                    if texts:
                        tracker.add_texts(record["step"], texts)
                    if missing:
                        tracker.add({"step": record["step"], **missing})
                    self._note(record)
            tracker.close()
        except Exception as error:
            summary = " ".join(str(error).split())[:300] or type(error).__name__
            self.say(f"{summary}; training goes on without it")

    def _not_sent(self, record: Record) -> Record:
        """Values of a record that no earlier job has sent: a job repeats steps after a kill."""
        step, names = self._sent_before
        values = {name: value for name, value in record.items() if name != "step"}
        if record["step"] > step:
            return values
        return {k: v for k, v in values.items() if record["step"] == step and k not in names}

    def _note(self, record: Record) -> None:
        names = set(record) - {"step"}
        if record["step"] == self.state.get("step"):
            names |= set(self.state["names"])
        self.state = {**self.state, "step": record["step"], "names": sorted(names)}
