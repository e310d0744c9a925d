"""A watch over the ranks of a run: if they hang, it says which of them lag, and ends the run.

Each rank notes its phase in memory; a thread beside it looks at the note. While ranks wait
for each other, a rank that hangs soon stops them all. When nothing has changed for the time-out of
the run, each rank writes its note and the stacks of its threads into a folder that all hosts see.
One of them reads these files and prints which ranks lag; all exit with `HUNG`, so that the run
is tried again from its last checkpoint. A run that makes progress writes no file.
"""

import faulthandler
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tokamake.config.resolved_run import Run
from tokamake.errors import note_faulty_hosts
from tokamake.runtime.console import counted
from tokamake.runtime.device import host_name
from tokamake.runtime.exit_status import HUNG
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.torch_internals import set_group_timeouts
from tokamake.train.hooks import FinishedStep, Hook, Training

Item = TypeVar("Item")

FOLDER = "hangs"
"""Folder in the output folder of a run, with a folder for each job that hung."""
_GROUP_MARGIN_SECONDS = 300.0
"""Process groups time out this much later: their errors do not say which rank lags. It is longer
than the wait for other ranks' files, three times `_MAX_GRACE_SECONDS`."""
_MAX_INTERVAL_SECONDS = 5.0
_MAX_GRACE_SECONDS = 60.0
"""How long to wait for files of other ranks: hosts may see them late."""
_NUM_SHOWN = 4
"""Ranks that a line names, and ranks whose stacks are printed; files have the stacks of all."""
_PRINTED = "printed"
"""File that says that the ranks that lag are printed."""


class Beat(NamedTuple):
    """The note of a rank."""

    number: int
    """Notes so far; each rank makes the same ones."""
    phase: str
    """Its activity, such as `reads samples`."""
    step: int
    """Finished steps."""


class Report(NamedTuple):
    """Report of a rank when the run hangs."""

    beat: Beat
    call: str
    """Innermost call of its main thread."""
    stacks: str
    """Stacks of all its threads."""


class Heartbeat(Hook):
    """One rank's notes, and the thread that watches them.

    Args:
        folder: folder for the files of a hang; all ranks have the same one.
        init_seconds: time-out until a step is done, `train.init_timeout_seconds`.
        train_seconds: time-out after that, `train.train_timeout_seconds`.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        hosts: Sequence[str],
        init_seconds: float,
        train_seconds: float,
    ) -> None:
        self._folder, self._ranks, self.hosts = folder, ranks, hosts
        self._init_seconds, self._train_seconds = init_seconds, train_seconds
        self._is_prepared = False
        self._last = Beat(0, "starts", 0)
        self._ended = threading.Event()

    # ---- What the training calls ----

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """Note that this rank makes progress; None: phase or finished steps are the same."""
        last = self._last
        self._last = Beat(last.number + 1, phase or last.phase, last.step if step is None else step)

    def counted(self, items: Iterable[Item], phase: str) -> Iterator[Item]:
        """Yield the items; each one is a beat of a phase."""
        for item in items:
            self.beat(phase)
            yield item

    def prepare(self, phase: str) -> None:
        """Note a phase that may take as long as the start of a run, such as loading."""
        self.beat(phase)
        self._is_prepared = False
        self.set_group_timeouts()

    def end_step(self, finished: FinishedStep) -> None:
        """Note that a step is finished. Later ones are faster, so their time-out is shorter."""
        self.beat("ends a step", finished.state.step)
        if not self._is_prepared:
            # All groups exist now, and all modules are compiled.
            self._is_prepared = True
            self.set_group_timeouts()

    def set_group_timeouts(self) -> None:
        """Set the time-out of the process groups that exist now."""
        set_group_timeouts(self._seconds + _GROUP_MARGIN_SECONDS)

    @property
    def _seconds(self) -> float:
        return self._train_seconds if self._is_prepared else self._init_seconds

    def start(self) -> None:
        """Begin to watch."""
        self.set_group_timeouts()
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()

    # ---- The watch ----

    def _watch(self) -> None:
        silence = Silence(self._last, time.monotonic())
        while not self._ended.wait(interval := min(self._seconds / 10, _MAX_INTERVAL_SECONDS)):
            if silence.look(self._last, time.monotonic(), interval=interval) >= self._seconds:
                with suppress(Exception):  # whatever happens, the run ends
                    self._report()
                os._exit(HUNG)

    def _report(self) -> None:
        """Write what this rank knows; print which ranks lag, or wait until another rank has."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        write_report(self._folder / f"rank-{rank}.txt", self._last)
        grace = min(self._seconds, _MAX_GRACE_SECONDS)
        if rank == 0:
            _wait(grace, lambda: len(read_reports(self._folder)) == world_size)
        # If rank 0 itself hangs, the first other rank prints.
        elif _wait(2 * grace, (self._folder / _PRINTED).exists):
            return
        reports = read_reports(self._folder)
        if rank == min(reports):
            name = "train_timeout_seconds" if self._is_prepared else "init_timeout_seconds"
            timeout = f"{self._seconds:g} s (train.{name})"
            text = describe(reports, self.hosts, folder=self._folder, timeout=timeout)
            # Not print: the thread that hangs may hold the lock of standard error.
            os.write(2, text.encode())
            note_faulty_hosts(suspects(reports, self.hosts))
            (self._folder / _PRINTED).touch()
        else:
            _wait(grace, (self._folder / _PRINTED).exists)


class Silence:
    """How long a rank has made no progress, as far as this process was awake."""

    def __init__(self, beat: Beat, now: float) -> None:
        self._seen, self._last_look, self._seconds = beat, now, 0.0

    def look(self, beat: Beat, now: float, *, interval: float) -> float:
        """Seconds without a new note; `interval` is the usual time between two looks.

        A suspended job (`scontrol suspend`, SIGSTOP) does not look: that time does not count.
        """
        passed, self._last_look = min(now - self._last_look, 2 * interval), now
        self._seconds = self._seconds + passed if beat == self._seen else 0.0
        self._seen = beat
        return self._seconds


def _wait(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds, or some time has passed; return whether it holds."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(min(seconds / 20, 1.0))
    return holds


def open_hook(training: Training) -> Hook:
    """Return the heartbeat that `watched` has started."""
    return training.heartbeat


@contextmanager
def watched(run: Run, ranks: Ranks) -> Iterator[Heartbeat]:
    """Watch over the ranks of a run; all ranks call this together."""
    import torch.distributed as dist

    name = time.strftime("%Y%m%d-%H%M%S")  # rank 0 decides the name
    gathered: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(gathered, (host_name(), name))
    heartbeat = Heartbeat(
        run.output / FOLDER / gathered[0][1],
        ranks,
        hosts=[host for host, _ in gathered],
        init_seconds=run.train.init_timeout_seconds,
        train_seconds=run.train.train_timeout_seconds,
    )
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        heartbeat.stop()


# ---- Reports of ranks ----


def write_report(path: Path, beat: Beat) -> None:
    """Write the note of this rank and the stacks of all its threads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with draft.open("w") as stream:
        stream.write(json.dumps(beat._asdict()) + "\n")
        stream.flush()
        faulthandler.dump_traceback(stream)
    draft.rename(path)


def read_reports(folder: Path) -> dict[int, Report]:
    """Reports that ranks have written, by rank."""
    return {
        int(path.stem.removeprefix("rank-")): _parse(path.read_text())
        for path in folder.glob("rank-*.txt")
    }


def _parse(text: str) -> Report:
    note, _, stacks = text.partition("\n")
    # faulthandler writes the main thread last, and in it the innermost call first.
    main = stacks.rpartition("(most recent call first):\n")[2]
    return Report(Beat(**json.loads(note)), main.partition("\n")[0].strip(), stacks.rstrip())


def describe(
    reports: dict[int, Report], hosts: Sequence[str], *, folder: Path, timeout: str
) -> str:
    """Say which ranks lag: ranks without a report, else ranks with the fewest notes.

    Ranks with the same note are grouped by the call that they are in.
    """
    lines = [
        f"tokamake train: no rank has made progress for {timeout}; the run ends with {HUNG}; if "
        "the ranks are only slow, raise the setting"
    ]
    if silent := [rank for rank in range(len(hosts)) if rank not in reports]:
        lines.append(f"  lags, stopped or stuck, without a report: {_named(silent, hosts)}")
    groups: dict[tuple[Beat, str], list[int]] = defaultdict(list)
    for rank, report in sorted(reports.items()):
        groups[report.beat, report.call].append(rank)
    most = max(report.beat.number for report in reports.values())
    # Lagging ranks come first; among ranks with the same note, the exception.
    ordered = sorted(groups.items(), key=lambda group: (group[0][0].number, len(group[1])))
    for (beat, call), members in ordered:
        title = "lags" if beat.number < most else "waits"
        phase = f"{beat.phase} after step {beat.step}"
        lines.append(f"  {title}, {phase}: {_named(members, hosts)}, in {call}")
    lines.append(f"  stacks of {counted(len(reports), 'rank')}: {folder}")
    for _, (rank, *_) in ordered[:_NUM_SHOWN]:
        lines.append(f"rank {rank} on {hosts[rank]}:\n{reports[rank].stacks}")
    return "\n".join(lines) + "\n"


def suspects(reports: dict[int, Report], hosts: Sequence[str]) -> list[str]:
    """Hosts of the ranks that lag, if they are at most half of all hosts: these seem faulty."""
    lagging = [rank for rank in range(len(hosts)) if rank not in reports]
    if not lagging:
        most = max(report.beat.number for report in reports.values())
        lagging = [rank for rank, report in reports.items() if report.beat.number < most]
    named = list(dict.fromkeys(hosts[rank] for rank in sorted(lagging)))
    return named if 2 * len(named) <= len(set(hosts)) else []


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """The first ranks with their hosts, and how many more there are."""
    names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:_NUM_SHOWN])
    more = len(ranks) - _NUM_SHOWN
    return f"{names} and {more} more" if more > 0 else names
