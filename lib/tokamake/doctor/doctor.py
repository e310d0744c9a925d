"""The stage `doctor`: whether a run can work here, told before it costs anything."""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokamake.doctor.result import Result

    Check = Callable[[], Sequence[Result]]

_GRACE = 60.0
"""Seconds that libraries have to say of themselves that they wait in vain."""


def doctor(
    *,
    profile: Path | None = None,
    directory: Path = Path(),
    data: Iterable[Path] = (),
    ranks: bool = False,
    timeout: float = 120,
    output: Path | None = None,
) -> None:
    """Check that a run can work here; each fault is told with its remedy.

    A line a check: ok, warning or wrong, what it is, its value. The exit status is 1 where anything
    is wrong. On a login node, give the profile; its scheduler is asked one question. Started on
    several ranks with --ranks, by the profile's launch.sh, all ranks are compared and measure how
    fast and how rightly they talk to each other; rank 0 reports.

    Args:
        profile: Folder of the Snakemake profile to check; by default SNAKEMAKE_PROFILE, if that is
            set.
        directory: Folder that the workflow runs in.
        data: Folders of raw data, to measure the disks they are on; the one in
            TOKAMAKE_DATA_ROOT is among them.
        ranks: Check communication among the ranks that this command was started on.
        timeout: Seconds for which ranks wait for one another.
        output: File for a report as JSON.

    Raises:
        UserError: ranks cannot meet.
    """
    from tokamake.doctor.result import ok

    if ranks:
        _on_ranks(directory, timeout, output)
        return
    given = profile or (Path(found) if (found := os.environ.get("SNAKEMAKE_PROFILE")) else None)
    places = [*data, *map(Path, filter(None, [os.environ.get("TOKAMAKE_DATA_ROOT")]))]
    results = [] if given else [ok("profile", "none given; --profile FOLDER checks one")]
    results += _at_once(_checks(given, directory, places))
    if _tell(results, output):
        raise SystemExit(1)


def _checks(given: Path | None, directory: Path, data: Iterable[Path]) -> "list[Check]":
    """Checks of one process, in the order of the report."""
    from tokamake.doctor import disk, environment, launcher, profile, result, scheduler
    from tokamake.errors import UserError

    faults: list[Result] = []
    found = profile.Profile(None)
    try:
        found = profile.read_profile(given, directory) if given else found
    except UserError as error:
        faults = [result.wrong("profile", str(error), "mend it")]
    of_profile: list[Check] = [lambda: profile.check_profile(found)] if found.path else []
    return [
        environment.check_python,
        environment.check_torch,
        lambda: environment.check_mpi(found.launcher),
        environment.check_compiler,
        lambda: environment.check_snakemake(found.executor),
        lambda: environment.check_limits(cluster=found.cluster),
        lambda: faults,
        *of_profile,
        lambda: launcher.check_launcher(found.launcher),
        lambda: profile.check_personal(found),
        lambda: scheduler.check_scheduler(found),
        lambda: disk.check_disks(directory, data, cluster=found.cluster),
    ]


def _at_once(checks: "Sequence[Check]") -> "list[Result]":
    """Results of checks, which wait for other processes, in their order."""
    with ThreadPoolExecutor(len(checks)) as pool:
        return [result for found in pool.map(lambda check: check(), checks) for result in found]


def _on_ranks(directory: Path, timeout: float, output: Path | None) -> None:
    from tokamake.doctor.watch import watched
    from tokamake.runtime.rank_errors import leave
    from tokamake.runtime.ranks import Ranks

    # Of what goes wrong, c10d would tell its own stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    told = f"tokamake doctor: {socket.gethostname()}: ranks did not meet within {timeout:g} s"
    with watched(2 * timeout + _GRACE, told) as watch:
        among = Ranks.find()
        from tokamake.doctor import communication, disk, environment, torch_facts

        results = communication.check_ranks(among, directory, watch, timeout)
        if among.rank == 0:
            watch.begin(f"tokamake doctor: {socket.gethostname()}: the disk of {directory} hangs")
            results = [
                *environment.check_python(),
                *environment.judge_torch(torch_facts.torch_facts(), os.environ),
                *environment.check_limits(cluster=False),
                *disk.check_disks(directory, (), cluster=False),
                *results,
            ]
    bad = among.rank == 0 and _tell(results, output)
    leave(among, int(bad))


def _tell(results: "Sequence[Result]", output: Path | None) -> bool:
    """Print the report, and write it; returns whether anything is wrong."""
    from tokamake import files
    from tokamake.doctor.result import report

    for result in results:
        print(result.line)
    found = report(results)
    counts = {state: sum(one.state == state for one in results) for state in ("wrong", "warning")}
    print(f"{len(results)} checks, {counts['wrong']} wrong, {counts['warning']} with a warning")
    if output:
        files.write_json(output, found)
    return bool(found["state"] == "wrong")
