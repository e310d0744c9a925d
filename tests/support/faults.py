"""Faults that tests inject, by kind: how many, how many survived, and how many lost something.

A test of the marker `fault(kind)` injects one fault. One that injects several calls the fixture
`inject` before each. A fault is survived if the run, stage or workflow that it hits ends as without
it, or stops with a message and changes nothing. A test that fails lost its last fault.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest

KINDS = {
    "kill at a random instant": "SIGKILL of a rank or of all ranks while a run trains",
    "kill in a step": "SIGKILL of a rank in a backward pass, also in restarts within a job",
    "kill in a save": "SIGKILL at each file operation of a save, a deletion or a validation",
    "lost node": "all processes of a node of a job are killed, on a real Slurm",
    "kill of a stage": "SIGKILL of a stage, at file operations and instants",
    "kill of the controller": "SIGKILL of Snakemake while its jobs run on PBS or Slurm",
    "kill of the launcher": "SIGKILL of torchrun, while its ranks train on",
    "stop signal": "SIGTERM or SIGINT to ranks or to the whole workflow",
    "stopped rank": "SIGSTOP of a rank",
    "numbers that are not finite": "NaN or infinity on one rank or on all",
    "flipped bit": "a bit of a product of one rank, in a check that computes a micro batch twice",
    "little memory": "a limit of the address space, in data stages and in a training step",
    "full disk": "ENOSPC for a while, in checkpoints, metrics and data stages",
    "damaged checkpoint": "bytes or files of the newest checkpoint are changed or missing",
    "damaged file": "any kept file of a run: bits, digits, blocks, lengths, names, stale copies",
    "damaged data": "bytes of raw files or indexed datasets change, before or while they are read",
    "second trainer": "two processes train in one folder, with and without file locks",
}
"""What each kind does; `docs/explanation/reliability.md` has a row for each."""
Inject = Callable[[], None]
"""The fixture `inject`: counts a fault."""
MARKER = "fault"
PROPERTY = "injected faults"


def injected_by_default(item: pytest.Item) -> None:
    """Count one fault for a test of the marker that does not use the fixture `inject`."""
    if item.get_closest_marker(MARKER) and "inject" not in getattr(item, "fixturenames", ()):
        inject(item)


def inject(item: pytest.Item) -> None:
    """Count one fault of the kind that the test's marker names.

    Raises:
        LookupError: the test has no marker, or it names an unknown kind.
    """
    marker = item.get_closest_marker(MARKER)
    if not marker or marker.args[0] not in KINDS:
        raise LookupError(f"{item.nodeid}: give it a marker fault(kind) with a kind of KINDS")
    item.user_properties.append((PROPERTY, marker.args[0]))


def table(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Lines of a Markdown table: faults of each kind that tests injected, survived and lost."""
    injected, lost = defaultdict(int), defaultdict(int)
    for report in reports:
        kinds = [kind for name, kind in report.user_properties if name == PROPERTY]
        for kind in kinds:
            injected[kind] += 1
        if report.failed and kinds:
            lost[kinds[-1]] += 1
    if not injected:
        return []
    rows = [(kind, injected[kind], lost[kind]) for kind in KINDS if kind in injected]
    rows.append(("all", sum(injected.values()), sum(lost.values())))
    lines = ["| fault | injected | survived | lost |", "|---|---:|---:|---:|"]
    return lines + [f"| {kind} | {number} | {number - bad} | {bad} |" for kind, number, bad in rows]
