"""All ranks meet, tell of themselves and measure an all-reduce; rank 0 makes results of it.

Facts and times go through the store in which the ranks meet, sums through the process group.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokamake.doctor.hosts import (
    Facts,
    expected_hosts,
    judge_hosts,
    judge_missing,
    judge_slow,
    own_facts,
    slow_hosts,
)
from tokamake.doctor.result import Result, ok, wrong
from tokamake.doctor.torch_facts import torch_facts
from tokamake.doctor.watch import Watch
from tokamake.errors import UserError
from tokamake.runtime.process_group import meeting, process_group
from tokamake.runtime.ranks import Ranks

_REPEATS = 5
_ELEMENTS = {"cpu": 2**20}
"""Of the tensor that tells the bandwidth, float32; 2^24 on accelerators."""
_WIDTH = {"cpu": 512}
"""Of the matrices that tell the speed of a device; 4096 on accelerators."""
_LINK_FACTOR, _DEVICE_FACTOR = 2.0, 1.5


@dataclass(frozen=True)
class Measured:
    """What a rank measured; times in seconds, each the best of some."""

    host: str
    right: bool
    """Whether the sums were those of all ranks."""
    latency: float
    """Of an all-reduce of one number."""
    reduce: float
    """Of an all-reduce of `num_bytes`."""
    num_bytes: int
    link: float
    """Of sending as many to the next rank and taking them from the one before."""
    device: float
    """Of a product of matrices."""


def check_ranks(ranks: Ranks, directory: Path, watch: Watch, seconds: float) -> list[Result]:
    """Let all ranks meet and measure.

    Args:
        ranks: this process among its peers.
        directory: a folder that all hosts should see.
        watch: told what is being waited for.
        seconds: how long ranks are waited for.

    Returns:
        On rank 0 the results; on others nothing.

    Raises:
        UserError: rank 0 does not come or goes away, or two ranks have the same device.
    """
    store = meeting(ranks, seconds)
    facts = own_facts(ranks, torch_facts())
    store.set(f"facts/{ranks.rank}", json.dumps(asdict(facts)))
    store.set(f"here/{ranks.rank}", facts.host)
    if ranks.rank:
        go_on, results = _verdict(store, ranks.rank, facts.host, seconds), []
    else:
        came = roll_call(store, ranks.world_size, seconds)
        if missing := len(came) < ranks.world_size:
            results = [judge_missing(came, ranks.world_size, expected_hosts(), seconds)]
        else:
            results = judge_hosts(_gather(store, "facts", ranks.world_size, _facts))
        versions = next((one for one in results if one.name == "torch on hosts"), None)
        go_on = not missing and versions is not None and versions.state == "ok"
        store.set("verdict", "go" if go_on else "stop")
        if not go_on:
            _await_heard(store, [rank for rank in came if rank], seconds)
    if go_on:
        watch.begin(
            ""
            if ranks.local_rank
            else f"tokamake doctor: {facts.host}: the all-reduce of all ranks hangs"
        )
        results += _communicate(ranks, store, directory, facts.host)
    return results


def _await_heard(store: dist.Store, ranks: list[int], seconds: float) -> None:
    """Wait until all have read the verdict, for the store ends with rank 0."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if store.check([f"heard/{rank}" for rank in ranks]):
            return
        time.sleep(0.05)


def _verdict(store: dist.Store, rank: int, host: str, seconds: float) -> bool:
    """Whether rank 0 has it that all go on."""
    store.set_timeout(timedelta(seconds=2 * seconds))
    try:
        verdict = store.get("verdict")
        store.set(f"heard/{rank}", "")
        return bool(verdict == b"go")
    except dist.DistError:
        raise UserError(f"{host}: rank 0 has gone away; look for its words") from None


def roll_call(store: dist.Store, world_size: int, seconds: float) -> dict[int, str]:
    """Host of each rank that comes within the time; returns at once when all have come."""
    came: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    while len(came) < world_size and time.monotonic() < deadline:
        for rank in range(world_size):
            if rank not in came and store.check([f"here/{rank}"]):
                came[rank] = store.get(f"here/{rank}").decode()
        time.sleep(0.05)
    return came


def _facts(found: dict[str, Any]) -> Facts:
    return Facts(**{**found, "locked": tuple(found["locked"])})


def _gather(
    store: dist.Store, name: str, world_size: int, make: Callable[[dict[str, Any]], Any]
) -> list[Any]:
    return [make(json.loads(store.get(f"{name}/{rank}"))) for rank in range(world_size)]


def _communicate(ranks: Ranks, store: dist.Store, directory: Path, host: str) -> list[Result]:
    """Measure on all ranks; see whether all hosts have the folder of rank 0."""
    with process_group(ranks, store) as device:
        measured = measure(device, host)
    mark = directory / ".doctor-seen"
    if ranks.rank == 0:
        mark.touch()
    store.set("mark" if ranks.rank == 0 else f"unmarked/{ranks.rank}", "")
    store.get("mark")
    seen = {"host": host, "seen": mark.exists()}
    store.set(f"measured/{ranks.rank}", json.dumps(asdict(measured)))
    store.set(f"seen/{ranks.rank}", json.dumps(seen))
    if ranks.rank:
        return []
    try:
        everyone = _gather(store, "measured", ranks.world_size, lambda found: Measured(**found))
        sights = _gather(store, "seen", ranks.world_size, lambda found: found)
    finally:
        mark.unlink()
    blind = list(dict.fromkeys(one["host"] for one in sights if not one["seen"]))
    return [judge_folder(directory, blind), *judge_measured(everyone, device)]


def measure(device: torch.device, host: str) -> Measured:
    """Times and sums of this rank; every rank of the process group calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(_ELEMENTS.get(device.type, 2**24), device=device) % 5
    own = (numbers + rank % 7).float()
    expected = (numbers * size + sum(other % 7 for other in range(size))).float()
    total = own.clone()
    dist.all_reduce(total)
    right = bool(torch.equal(total, expected))
    one, incoming = torch.ones(1, device=device), torch.empty_like(own)
    width = _WIDTH.get(device.type, 4096)
    matrix = torch.ones(width, width, device=device)

    def exchange() -> None:
        if size == 1:
            return
        out = dist.P2POp(dist.isend, own, (rank + 1) % size)
        into = dist.P2POp(dist.irecv, incoming, (rank - 1) % size)
        for work in dist.batch_isend_irecv([out, into]):
            work.wait()

    def best(action: Callable[[], object]) -> float:
        return min(_seconds(action, device) for _ in range(_REPEATS))

    times = {
        "latency": best(lambda: dist.all_reduce(one)),
        "reduce": best(lambda: dist.all_reduce(total)),
        "link": best(exchange),
        "device": best(lambda: matrix @ matrix),
    }
    right = right and (size == 1 or bool(torch.equal(incoming, numbers + (rank - 1) % size % 7)))
    return Measured(host, right, num_bytes=own.nbytes, **times)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
    _settle(device)
    begin = time.perf_counter()
    action()
    _settle(device)
    return time.perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def judge_folder(directory: Path, blind: list[str]) -> Result:
    """Result for hosts that do not see a folder of rank 0's."""
    if not blind:
        return ok("folder", f"all hosts see {directory.resolve()}")
    remedy = "work on a file system that all hosts share, and name it among the job's filesystems"
    return wrong("folder", f"{directory.resolve()} is not seen by {', '.join(blind)}", remedy)


def judge_measured(everyone: list[Measured], device: torch.device) -> list[Result]:
    """Results for what all ranks measured."""
    size, num_bytes = len(everyone), everyone[0].num_bytes
    bad = list(dict.fromkeys(one.host for one in everyone if not one.right))
    results = [ok("sums of the all-reduce", f"right on {size:,} ranks, {device.type}")]
    if bad:
        remedy = "the network or its library is broken there: leave these hosts out, tell your site"
        results = [wrong("sums of the all-reduce", f"wrong on {', '.join(bad)}", remedy)]
    if size > 1:
        latency = min(one.latency for one in everyone)
        reduce = max(one.reduce for one in everyone)
        through = num_bytes * 2 * (size - 1) / size / reduce
        told = (
            f"{latency * 1e6:,.0f} µs for 4 bytes; {through / 1e9:,.2f} GB/s a rank for "
            f"{num_bytes / 1e6:,.0f} MB"
        )
        results.append(ok("all-reduce", told))
        links = slow_hosts([(one.host, one.link) for one in everyone], _LINK_FACTOR)
        slowest = max(one.link for one in everyone)
        value = f"at least {num_bytes / slowest / 1e9:,.2f} GB/s from rank to rank"
        results.append(judge_slow("links", value, links))
    devices = slow_hosts([(one.host, one.device) for one in everyone], _DEVICE_FACTOR)
    value = f"{max(one.device for one in everyone) * 1e3:,.2f} ms at most for a product of matrices"
    return [*results, judge_slow("speed of devices", value, devices)]
