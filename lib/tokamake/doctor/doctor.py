"""Stage `doctor`: check that a run can work here before it uses compute time."""

import os
import shlex
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokamake.doctor.result import Result

    Check = Callable[[], Sequence[Result]]

_GRACE = 60.0
"""Seconds for libraries to report their own timeouts before the watchdog kills the process."""


def doctor(
    *,
    profile: str = "",
    directory: Path = Path(),
    data: Iterable[Path] = (),
    tokenizer: Path | None = None,
    ranks: bool = False,
    timeout: float = 120,
    output: Path | None = None,
) -> None:
    """Check that a run can work here, and print a remedy for each fault.

    Each line is a check: its state (ok, warning or wrong), name and value. The exit status is 1 if
    a check is wrong. On a login node, give the profile; doctor queries its scheduler once. With
    --ranks, started on several ranks by the profile's launch.sh, doctor compares all ranks and
    measures the correctness and speed of their communication; rank 0 reports. doctor does not see
    the run: `tokamake prove CONFIG` compares the gradients of its layout with one process.

    Args:
        profile: Name or folder of the profile to check. By default $SNAKEMAKE_PROFILE, if set.
        directory: Working directory of the workflow.
        data: Folders of raw data. doctor measures their disks and the disk of
            TOKAMAKE_DATA_ROOT.
        tokenizer: Folder or file of a tokenizer. doctor says which encoder it has, how fast that is
            on Python code, and why it is not the fast one.
        ranks: Check communication between the ranks of this command.
        timeout: Seconds that ranks wait for each other.
        output: JSON file for the report.
    """
    from tokamake.doctor.result import ok

    if ranks:
        _on_ranks(directory, timeout, output=output)
        return
    name = profile or os.environ.get("SNAKEMAKE_PROFILE", "")
    data_folders = [*data, *map(Path, filter(None, [os.environ.get("TOKAMAKE_DATA_ROOT")]))]
    results = [] if name else [ok("profile", "none; check one with --profile NAME")]
    checks = _checks(name, directory, data=data_folders)
    if tokenizer is not None:
        from tokamake.doctor.encoder import check_encoder

        checks.append(lambda: check_encoder(tokenizer))
    results += _run_concurrently(checks)
    is_wrong = _print_report(results, output)
    if is_wrong:
        raise SystemExit(1)
    _name_next_step(directory)


def _name_next_step(directory: Path) -> None:
    config = directory / "config/config.yaml"
    named = shlex.quote(str(config)) if config.exists() else "CONFIG"
    step = f"tokamake prove {named}"
    print(f"next: {step}    # compares the gradients of the run's layout with one process")


def _checks(name: str, directory: Path, *, data: Iterable[Path]) -> "list[Check]":
    """Return the checks without --ranks, in the order of the report."""
    from tokamake.doctor import disk, environment, launcher, profile, result, scheduler
    from tokamake.doctor.find_profile import find_profile
    from tokamake.errors import UserError

    faults: list[Result] = []
    site = profile.Profile(None)
    try:
        site = profile.read_profile(find_profile(name), directory) if name else site
    except UserError as error:
        value, _, remedy = str(error).rpartition("; ")
        faults = [result.wrong("profile", value, remedy)]
    profile_checks: list[Check] = [lambda: profile.check_profile(site)] if site.path else []
    return [
        environment.check_python,
        environment.check_torch,
        lambda: environment.check_mpi(site.launcher),
        environment.check_compiler,
        lambda: environment.check_snakemake(site.executor),
        lambda: environment.check_limits(cluster=site.cluster),
        lambda: faults,
        *profile_checks,
        lambda: launcher.check_launcher(site.launcher),
        lambda: profile.check_personal(site),
        lambda: scheduler.check_scheduler(site),
        lambda: disk.check_disks(directory, data, cluster=site.cluster),
    ]


def _run_concurrently(checks: "Sequence[Check]") -> "list[Result]":
    """Run checks in threads, because most of them wait for other processes; keep their order."""
    with ThreadPoolExecutor(len(checks)) as pool:
        return [result for results in pool.map(lambda check: check(), checks) for result in results]


def _on_ranks(directory: Path, timeout: float, *, output: Path | None) -> None:
    from tokamake.doctor.watch import watched
    from tokamake.runtime.rank_errors import leave
    from tokamake.runtime.ranks import Ranks

    # Otherwise c10d prints its C++ stack for each failure.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    prefix = f"tokamake doctor: {socket.gethostname()}:"
    message = f"{prefix} ranks did not connect within {timeout:g} s"
    # The watchdog forks, so it must start before torch and MPI are imported.
    with watched(2 * timeout + _GRACE, message) as watch:
        ranks = Ranks.find()
        from tokamake.doctor import communication, disk, environment

        results = communication.check_ranks(ranks, directory, watch=watch, seconds=timeout)
        if ranks.rank == 0:
            watch.begin(f"{prefix} the disk of {directory} hangs")
            results = [
                *environment.check_python(),
                *environment.torch_results(environment.torch_facts(), os.environ),
                *environment.check_limits(cluster=False),
                *disk.check_disks(directory, (), cluster=False),
                *results,
            ]
    is_wrong = ranks.rank == 0 and _print_report(results, output)
    leave(ranks, int(is_wrong))


def _print_report(results: "Sequence[Result]", output: Path | None) -> bool:
    """Print the report and write it to `output`; return whether a check is wrong."""
    from tokamake import files
    from tokamake.doctor.result import report

    for result in results:
        print(result.line)
    states = [result.state for result in results]
    num_wrong, num_warnings = states.count("wrong"), states.count("warning")
    print(f"{len(results)} checks, {num_wrong} wrong, {num_warnings} with a warning")
    if output:
        files.write_json(output, report(results))
    return num_wrong > 0
