"""Compare all ranks and measure their communication; rank 0 returns the results.

Ranks exchange facts and times through the store of torch.distributed. Only the measured operations
use the process group.
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

from tokamake.doctor.environment import torch_facts
from tokamake.doctor.hosts import (
    Facts,
    expected_hosts,
    host_results,
    missing_result,
    own_facts,
    slow_hosts,
    slowness_result,
)
from tokamake.doctor.result import Result, ok, wrong
from tokamake.doctor.watch import Watch
from tokamake.errors import UserError
from tokamake.runtime.device import synchronize
from tokamake.runtime.process_group import meeting, process_group
from tokamake.runtime.ranks import Ranks

_REPEATS = 5
_ELEMENTS = {"cpu": 2**20}
"""float32 elements of the tensor that measures bandwidth; 2^24 on accelerators."""
_WIDTH = {"cpu": 512}
"""Width of the matrices that measure the speed of a device; 4096 on accelerators."""
_LINK_FACTOR, _DEVICE_FACTOR = 2.0, 1.5
"""Hosts slower than this multiple of the median get a warning."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a rank. Times are in seconds, the best of several."""

    host: str
    right: bool
    """Whether all sums were correct."""
    latency: float
    """Time of an all-reduce of one number."""
    reduce: float
    """Time of an all-reduce of `num_bytes`."""
    num_bytes: int
    link: float
    """Time to send `num_bytes` to the next rank while receiving as many from the previous one."""
    device: float
    """Time of a matrix product."""


def check_ranks(ranks: Ranks, directory: Path, *, watch: Watch, seconds: float) -> list[Result]:
    """Connect all ranks, compare them and measure their communication; return results on rank 0.

    UserError: rank 0 does not connect within `seconds`, or exits, or two ranks share a device.
    """
    store = meeting(ranks, seconds)
    facts = own_facts(ranks, torch_facts())
    store.set(f"facts/{ranks.rank}", json.dumps(asdict(facts)))
    store.set(f"here/{ranks.rank}", facts.host)
    if ranks.rank:
        proceed, results = _await_verdict(store, ranks.rank, host=facts.host, seconds=seconds), []
    else:
        present = roll_call(store, ranks.world_size, seconds=seconds)
        if missing := len(present) < ranks.world_size:
            results = [
                missing_result(
                    present, ranks.world_size, expected=expected_hosts(), seconds=seconds
                )
            ]
        else:
            results = host_results(
                _gather(store, "facts", world_size=ranks.world_size, make=_facts)
            )
        # Different versions of torch may hang or crash in a process group.
        versions = next((r for r in results if r.name == "torch on hosts"), None)
        proceed = not missing and versions is not None and versions.state == "ok"
        store.set("verdict", "go" if proceed else "stop")
        if not proceed:
            _await_readers(store, [rank for rank in present if rank], seconds=seconds)
    if proceed:
        watch.begin(
            ""
            if ranks.local_rank
            else f"tokamake doctor: {facts.host}: the all-reduce of all ranks hangs"
        )
        results += _communicate(ranks, store, directory=directory, host=facts.host)
    return results


def _await_readers(store: dist.Store, ranks: list[int], *, seconds: float) -> None:
    """Wait until all ranks have read the verdict, because the store ends with rank 0."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if store.check([f"heard/{rank}" for rank in ranks]):
            return
        time.sleep(0.05)


def _await_verdict(store: dist.Store, rank: int, *, host: str, seconds: float) -> bool:
    """Wait for the decision of rank 0; return whether to proceed."""
    store.set_timeout(timedelta(seconds=2 * seconds))
    try:
        verdict = store.get("verdict")
        store.set(f"heard/{rank}", "")
        return bool(verdict == b"go")
    except dist.DistError:
        raise UserError(f"{host}: rank 0 exited; look for its error message") from None


def roll_call(store: dist.Store, world_size: int, *, seconds: float) -> dict[int, str]:
    """Return rank → host of ranks that connect in time; return early when all have connected."""
    present: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    while len(present) < world_size and time.monotonic() < deadline:
        for rank in range(world_size):
            if rank not in present and store.check([f"here/{rank}"]):
                present[rank] = store.get(f"here/{rank}").decode()
        time.sleep(0.05)
    return present


def _facts(values: dict[str, Any]) -> Facts:
    return Facts(**{**values, "locked": tuple(values["locked"])})


def _gather(
    store: dist.Store, name: str, *, world_size: int, make: Callable[[dict[str, Any]], Any]
) -> list[Any]:
    return [make(json.loads(store.get(f"{name}/{rank}"))) for rank in range(world_size)]


def _communicate(ranks: Ranks, store: dist.Store, *, directory: Path, host: str) -> list[Result]:
    """Measure on all ranks; check that all hosts see the folder of rank 0."""
    with process_group(ranks, store) as device:
        measured = measure(device, host)
    mark = directory / ".doctor-seen"
    if ranks.rank == 0:
        mark.touch()
    store.set("mark" if ranks.rank == 0 else f"unmarked/{ranks.rank}", "")
    store.get("mark")  # Wait until rank 0 has written the file.
    seen = {"host": host, "seen": mark.exists()}
    store.set(f"measured/{ranks.rank}", json.dumps(asdict(measured)))
    store.set(f"seen/{ranks.rank}", json.dumps(seen))
    if ranks.rank:
        return []
    try:
        measurements = _gather(
            store, "measured", world_size=ranks.world_size, make=lambda v: Measured(**v)
        )
        sightings = _gather(store, "seen", world_size=ranks.world_size, make=lambda v: v)
    finally:
        mark.unlink()
    blind = list(dict.fromkeys(s["host"] for s in sightings if not s["seen"]))
    return [folder_result(directory, blind), *measured_results(measurements, device)]


def measure(device: torch.device, host: str) -> Measured:
    """Measure times and check sums. A collective: every rank of the process group calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # Small integers, which float32 adds exactly in any order.
    numbers = torch.arange(_ELEMENTS.get(device.type, 2**24), device=device) % 5
    outgoing = (numbers + rank % 7).float()
    expected = (numbers * size + sum(peer % 7 for peer in range(size))).float()
    total = outgoing.clone()
    dist.all_reduce(total)
    right = bool(torch.equal(total, expected))
    scalar, incoming = torch.ones(1, device=device), torch.empty_like(outgoing)
    width = _WIDTH.get(device.type, 4096)
    matrix = torch.ones(width, width, device=device)

    def exchange() -> None:
        if size == 1:
            return
        send = dist.P2POp(dist.isend, outgoing, (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    def best(action: Callable[[], object]) -> float:
        return min(_seconds(action, device) for _ in range(_REPEATS))

    times = {
        "latency": best(lambda: dist.all_reduce(scalar)),
        "reduce": best(lambda: dist.all_reduce(total)),
        "link": best(exchange),
        "device": best(lambda: matrix @ matrix),
    }
    right = right and (size == 1 or bool(torch.equal(incoming, numbers + (rank - 1) % size % 7)))
    return Measured(host, right, num_bytes=outgoing.nbytes, **times)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
    synchronize(device)
    begin = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - begin


def folder_result(directory: Path, blind: list[str]) -> Result:
    """Return the result for hosts that do not see the folder of rank 0."""
    if not blind:
        return ok("folder", f"all hosts see {directory.resolve()}")
    remedy = "work on a file system that all hosts share, and add it to the job's filesystems"
    return wrong("folder", f"{directory.resolve()} is not visible on {', '.join(blind)}", remedy)


def measured_results(measurements: list[Measured], device: torch.device) -> list[Result]:
    """Return the results for the measurements of all ranks."""
    size, num_bytes = len(measurements), measurements[0].num_bytes
    bad = list(dict.fromkeys(m.host for m in measurements if not m.right))
    results = [ok("sums of the all-reduce", f"correct on {size:,} ranks, {device.type}")]
    if bad:
        remedy = (
            "the network or its library is faulty: exclude these hosts and report them to your site"
        )
        results = [wrong("sums of the all-reduce", f"wrong on {', '.join(bad)}", remedy)]
    if size > 1:
        latency = min(m.latency for m in measurements)
        reduce = max(m.reduce for m in measurements)
        # Bus bandwidth of a ring all-reduce, as nccl-tests defines it.
        bandwidth = num_bytes * 2 * (size - 1) / size / reduce
        value = (
            f"{latency * 1e6:,.0f} µs for 4 bytes; {bandwidth / 1e9:,.2f} GB/s per rank for "
            f"{num_bytes / 1e6:,.0f} MB"
        )
        results.append(ok("all-reduce", value))
        links = slow_hosts([(m.host, m.link) for m in measurements], _LINK_FACTOR)
        slowest = max(m.link for m in measurements)
        value = f"at least {num_bytes / slowest / 1e9:,.2f} GB/s from rank to rank"
        results.append(slowness_result("links", value, slow=links))
    devices = slow_hosts([(m.host, m.device) for m in measurements], _DEVICE_FACTOR)
    value = f"at most {max(m.device for m in measurements) * 1e3:,.2f} ms for a matrix product"
    return [*results, slowness_result("speed of devices", value, slow=devices)]
