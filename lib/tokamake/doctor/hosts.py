"""What each rank is and has, who is missing, and where hosts differ or are slow.

Facts come from the ranks through their store; what is made of them needs no torch.
"""

import os
import platform
import resource
import socket
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.batch_systems import hosts_of
from tokamake.doctor.environment import LOCKED_BYTES, RECIPE, judge_limit
from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.runtime.console import counted
from tokamake.runtime.ranks import Ranks

_SAME = {
    "python": "Python on hosts",
    "torch": "torch on hosts",
    "tokamake": "tokamake on hosts",
    "device": "devices on hosts",
}


@dataclass(frozen=True)
class Facts:
    """A rank as it tells of itself."""

    rank: int
    host: str
    python: str
    torch: str
    tokamake: str
    """Version and a digest of the sources; of a host's first rank, else empty."""
    device: str
    locked: tuple[int, int]
    """Locked memory that it may have, in bytes, and the upper bound."""


def own_facts(ranks: Ranks, torch: Mapping[str, Any]) -> Facts:
    """Facts of this rank; sources are read by the first of a host alone.

    Args:
        ranks: this process among its peers.
        torch: of `torch_facts`.
    """
    return Facts(
        rank=ranks.rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=torch["torch"],
        tokamake=sources() if ranks.local_rank == 0 else "",
        device=" ".join(filter(None, (torch["device"], torch["name"]))),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK),
    )


def sources(folder: Path = Path(__file__).parent.parent) -> str:
    """tokamake's version, with a digest of its modules: a copy can be older than the other."""
    found = [(str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*.py"))]
    digest = files.digest([(name, files.sha256(path)) for name, path in found])
    return f"{metadata.version('tokamake')} ({digest[:8]})"


def judge_hosts(facts: Sequence[Facts]) -> list[Result]:
    """Results for what all ranks told of themselves."""
    counts: dict[str, int] = {}
    for one in facts:
        counts[one.host] = counts.get(one.host, 0) + 1
    shown = shorten([f"{host}: {number}" for host, number in counts.items()])
    results = [ok("ranks", f"{len(facts):,} on {counted(len(counts), 'host')} ({shown})")]
    for name, title in _SAME.items():
        remedy = f"let all hosts have the same environment; {RECIPE}"
        results.append(judge_same(title, _by_value(facts, name), remedy))
    least = min(facts, key=lambda one: one.locked[0] % 2**64)  # RLIM_INFINITY is -1
    if len(counts) > 1:
        title = f"locked memory, on {least.host}"
        results.append(
            judge_limit(title, least.locked, LOCKED_BYTES, command="ulimit -l", unit=1024)
        )
    return results


def _by_value(facts: Iterable[Facts], name: str) -> dict[str, list[str]]:
    """Hosts by what they have."""
    found: dict[str, dict[str, None]] = {}
    for one in facts:
        if value := getattr(one, name):
            found.setdefault(value, {})[one.host] = None
    return {value: list(hosts) for value, hosts in found.items()}


def judge_same(title: str, hosts: Mapping[str, Sequence[str]], remedy: str) -> Result:
    """Result for a value that all hosts should share; the rarest comes first."""
    if len(hosts) == 1:
        return ok(title, next(iter(hosts)))
    rare = sorted(hosts.items(), key=lambda item: len(item[1]))
    told = "; ".join(f"{value} on {shorten(names)}" for value, names in rare)
    return wrong(title, told, remedy)


def judge_missing(
    came: Mapping[int, str], world_size: int, expected: Iterable[str], seconds: float
) -> Result:
    """Result for ranks that did not come in time.

    Args:
        came: host of each rank that did.
        world_size: ranks that the launcher started.
        expected: hosts of the job, as the batch system names them; may be empty.
        seconds: how long they were waited for.
    """
    missing = [str(rank) for rank in range(world_size) if rank not in came]
    here = {name.partition(".")[0] for name in came.values()}
    silent = [host for host in dict.fromkeys(expected) if host.partition(".")[0] not in here]
    hosts = f"; no rank came from {shorten(silent)}" * bool(silent)
    value = (
        f"{len(came):,} of {world_size:,} came within {seconds:g} s, rank "
        f"{shorten(missing)} did not{hosts}"
    )
    remedy = "look for their words above, ask for other hosts, or tell your site which these are"
    return wrong("ranks", value, remedy)


def expected_hosts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Hosts of this job, as PBS or Slurm names them; none outside one."""
    listed = Path(environment.get("PBS_NODEFILE", ""))
    if listed.is_file():
        return list(dict.fromkeys(listed.read_text().split()))
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    return hosts_of(nodes)


def slow_hosts(seconds: Sequence[tuple[str, float]], factor: float) -> dict[str, float]:
    """Hosts that take longer than the others, and how many times the median of all hosts.

    Args:
        seconds: host and time of each rank; a host's own is the median of its ranks'.
        factor: from which on it counts as slow.
    """
    of_host: dict[str, list[float]] = {}
    for host, time in seconds:
        of_host.setdefault(host, []).append(time)
    times = {host: statistics.median(each) for host, each in of_host.items()}
    usual = statistics.median_low(times.values())
    return {host: time / usual for host, time in times.items() if time > factor * usual}


def judge_slow(title: str, value: str, slow: Mapping[str, float]) -> Result:
    """Result for a measurement, with the hosts that are slow in it."""
    if not slow:
        return ok(title, value)
    worst = sorted(slow.items(), key=lambda item: -item[1])
    told = shorten([f"{host} takes {times:.1f} times as long as others" for host, times in worst])
    remedy = "measure again; if it stays so, leave these hosts out and tell your site"
    return warning(title, f"{value}; {told}", remedy)


def shorten(names: Sequence[str], most: int = 8) -> str:
    """Names in a line, of many only the first."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")
