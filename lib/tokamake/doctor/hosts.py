"""Facts about ranks and hosts, and checks for missing, different and slow hosts.

Ranks exchange facts through a store of torch. The checks need no torch.
"""

import os
import platform
import resource
import socket
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.doctor.environment import LOCKED_BYTES, RECIPE, limit_result
from tokamake.doctor.result import Result, ok, warning, wrong
from tokamake.runtime.console import counted, shortened
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.spare_nodes import hosts_of_job
from tokamake.scheduler_formats import hosts_of

_SAME = {
    "python": "Python on hosts",
    "torch": "torch on hosts",
    "tokamake": "tokamake on hosts",
    "device": "devices on hosts",
}


@dataclass(frozen=True)
class Facts:
    """Facts that a rank reports about itself."""

    rank: int
    host: str
    python: str
    torch: str
    tokamake: str
    """Version and digest of the sources; empty except for the first rank of a host."""
    device: str
    locked: tuple[int, int]
    """Soft and hard limit of locked memory in bytes."""


def own_facts(ranks: Ranks, torch: Mapping[str, Any]) -> Facts:
    """Collect the facts of this rank. Only the first rank of a host reads the sources."""
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
    """tokamake's version and a digest of its modules: copies on hosts may differ in age."""
    modules = [(str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*.py"))]
    digest = files.digest([(name, files.sha256(path)) for name, path in modules])
    return f"{metadata.version('tokamake')} ({digest[:8]})"


def host_results(facts: Sequence[Facts]) -> list[Result]:
    """Return the results for the facts of all ranks."""
    counts = Counter(fact.host for fact in facts)
    ranks_of_hosts = shortened([f"{host}: {number}" for host, number in counts.items()])
    results = [ok("ranks", f"{len(facts):,} on {counted(len(counts), 'host')} ({ranks_of_hosts})")]
    for name, title in _SAME.items():
        remedy = f"use the same environment on all hosts; {RECIPE}"
        results.append(equality_result(title, _by_value(facts, name), remedy=remedy))
    least = min(facts, key=lambda fact: fact.locked[0] % 2**64)  # RLIM_INFINITY is -1
    if len(counts) > 1:
        title = f"locked memory, on {least.host}"
        results.append(
            limit_result(title, least.locked, minimum=LOCKED_BYTES, command="ulimit -l", unit=1024)
        )
    return results


def _by_value(facts: Iterable[Facts], name: str) -> dict[str, list[str]]:
    """Return value of a fact → hosts with this value."""
    hosts_of_value: dict[str, dict[str, None]] = {}  # Inner dicts are ordered sets.
    for fact in facts:
        if value := getattr(fact, name):
            hosts_of_value.setdefault(value, {})[fact.host] = None
    return {value: list(hosts) for value, hosts in hosts_of_value.items()}


def equality_result(title: str, hosts: Mapping[str, Sequence[str]], *, remedy: str) -> Result:
    """Return the result for a value that all hosts should share; the rarest value is first."""
    if len(hosts) == 1:
        return ok(title, next(iter(hosts)))
    by_count = sorted(hosts.items(), key=lambda item: len(item[1]))
    message = "; ".join(f"{value} on {shortened(names)}" for value, names in by_count)
    return wrong(title, message, remedy)


def missing_result(
    present: Mapping[int, str], world_size: int, *, expected: Iterable[str], seconds: float
) -> Result:
    """Return the result for ranks that did not connect in time; `present`: host of each that did.

    The batch system may not report the `expected` hosts.
    """
    missing = [str(rank) for rank in range(world_size) if rank not in present]
    # The batch system and gethostname may differ in the domain, so compare short names.
    seen = {name.partition(".")[0] for name in present.values()}
    silent = [host for host in dict.fromkeys(expected) if host.partition(".")[0] not in seen]
    hosts = f"; no rank of {shortened(silent)} connected" * bool(silent)
    value = (
        f"{len(present):,} of {world_size:,} connected within {seconds:g} s, rank "
        f"{shortened(missing)} did not{hosts}"
    )
    remedy = "look for their errors above, request other hosts, or report these hosts to your site"
    return wrong("ranks", value, remedy)


def expected_hosts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Hosts of this job or its step from PBS or Slurm; empty outside a job."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    return hosts_of(nodes) if nodes else hosts_of_job(environment)


def slow_hosts(seconds: Sequence[tuple[str, float]], factor: float) -> dict[str, float]:
    """Return hosts slower than `factor` times the median, and their times relative to it.

    The time of a host is the median of its ranks.
    """
    times_of_host: dict[str, list[float]] = {}
    for host, time in seconds:
        times_of_host.setdefault(host, []).append(time)
    times = {host: statistics.median(rank_times) for host, rank_times in times_of_host.items()}
    median = statistics.median_low(times.values())
    return {host: time / median for host, time in times.items() if time > factor * median}


def slowness_result(title: str, value: str, *, slow: Mapping[str, float]) -> Result:
    """Return a warning that names slow hosts, the slowest first; ok if none is slow."""
    if not slow:
        return ok(title, value)
    worst = sorted(slow.items(), key=lambda item: -item[1])
    hosts = [f"{host} takes {times:.1f} times as long as other hosts" for host, times in worst]
    remedy = "measure again; if they stay slow, exclude these hosts and report them to your site"
    return warning(title, f"{value}; {shortened(hosts)}", remedy)
