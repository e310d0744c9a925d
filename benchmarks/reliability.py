"""Costs of reliability: restarts, saves, checksums at load, guards and heartbeat.

    python benchmarks/reliability.py restarts results/tiny/run.yaml --ranks 2 --work DIR
    python benchmarks/reliability.py steps results/tiny/run.yaml --work DIR

`restarts` trains the run of a run.yaml in DIR through profiles/local, undisturbed and while ranks
are killed with SIGKILL at steps that divide the run evenly, in turns. The kills cost restarts and
the steps since the last checkpoint, which are trained again.

`steps` trains it in this process. It prints what a save costs (time that training waits, and
steps that are slower beside it), what checksums cost a load, and what each step spends on guards
and heartbeat.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from tokamake.checkpoint.native.resume_state import GuardState
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.config.resolved_run import read_run
from tokamake.config.train_sections import BadStepSettings
from tokamake.runtime.process_group import process_group
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.restarts import newest_step
from tokamake.train import metrics
from tokamake.train.hooks.heartbeat import Heartbeat
from tokamake.train.hooks.stragglers import Stragglers, product_seconds
from tokamake.train.stability.spikes import find_fault
from tokamake.train.train import start_run
from tokamake.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
SAVE_INTERVAL = 8
"""Steps from a save to the next one in `steps`; the second half of them is undisturbed."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["restarts", "steps"])
    parser.add_argument("config", type=Path, help="run.yaml of a run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if options.what == "restarts":
        measure_restarts(options)
    else:
        measure_steps(options)


# ---- Restarts ----


def measure_restarts(options: argparse.Namespace) -> None:
    """Print what kills cost a run that restarts in its job."""
    results = []
    for number in range(options.rounds):
        calm, _, step_seconds = train(options, f"undisturbed-{number}", kills=0)
        killed, num_lost, _ = train(options, f"killed-{number}", kills=options.kills)
        restart = (killed - calm - num_lost * step_seconds) / options.kills
        results.append((calm, killed, num_lost * step_seconds, restart))
        print(*(f"{seconds:.1f}" for seconds in results[-1]), file=sys.stderr, flush=True)
    calm, killed, lost, restart = (median(values) for values in zip(*results, strict=True))
    print(f"undisturbed {calm:.1f} s, with {options.kills} kills {killed:.1f} s")
    print(f"steps that are trained again {lost:.1f} s, a restart {restart:.1f} s")
    print(f"{options.kills} restarts are 5 % of {options.kills * restart / 0.05 / 60:.0f} minutes")


def train(options: argparse.Namespace, name: str, *, kills: int) -> tuple[float, int, float]:
    """Train; return the wall time, the steps that were lost, and the median time of a step."""
    folder = options.work.absolute() / name
    folder.mkdir(parents=True)
    settings = yaml.safe_load(options.config.read_text())
    settings["output"] = str(folder / "training")
    settings["train"]["log_interval"] = 1
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    output, steps = folder / "training", settings["train"]["train_steps"]
    command = [
        *(sys.executable, "-m", "tokamake.runtime.restarts", "3", str(output)),
        *(str(ROOT / "profiles/local/launch.sh"), "1", str(options.ranks)),
        *("tokamake", "train", "--config", str(folder / "run.yaml")),
    ]
    lost = list[int]()
    at_steps = [steps * number // (kills + 1) for number in range(1, kills + 1)]
    killer = threading.Thread(target=kill_ranks, args=(folder, at_steps, lost), daemon=True)
    begin = time.perf_counter()
    with (folder / "train.log").open("w") as log:
        killer.start()
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    seconds = time.perf_counter() - begin
    assert len(lost) == kills
    records = [entry for entry in metrics.read(output / metrics.FILE) if "step_seconds" in entry]
    return seconds, sum(lost), median(entry["step_seconds"] for entry in records[1:])


def kill_ranks(folder: Path, at_steps: list[int], lost: list[int]) -> None:
    """Kill a random rank at each of these steps; append the steps since the last checkpoint."""
    choose = random.Random(0).choice
    for number, step in enumerate(at_steps):
        while last_step(folder) < step or starts(folder) <= number:
            time.sleep(0.05)
        os.kill(choose(ranks_of(folder / "run.yaml")), 9)
        lost.append(last_step(folder) - newest_step(folder / "training"))


def last_step(folder: Path) -> int:
    """Last step that is logged."""
    with suppress(OSError, IndexError):
        return int(metrics.read(folder / "training" / metrics.FILE)[-1]["step"])
    return 0


def starts(folder: Path) -> int:
    """How often the run has begun to train."""
    return (folder / "train.log").read_text().count("\nlayout ")


def ranks_of(config: Path) -> list[int]:
    """Process ids of the ranks that train a run."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            variables = (path / "environ").read_bytes().split(b"\0")
            is_rank = any(variable.startswith(b"RANK=") for variable in variables)
            if is_rank and b"train" in words and str(config).encode() in words:
                pids.append(int(path.name))
    return pids


# ---- Steps ----


def measure_steps(options: argparse.Namespace) -> None:
    """Print what saves, checksums, guards and the heartbeat cost."""
    settings = yaml.safe_load(options.config.read_text())
    settings["output"] = str(options.work.absolute() / "training")
    settings["train"] |= {
        "train_steps": SAVE_INTERVAL * (options.rounds + 1),
        "save_interval": SAVE_INTERVAL,
        "evaluation_steps": 0,
    }
    options.work.mkdir(parents=True)
    (options.work / "run.yaml").write_text(yaml.safe_dump(settings))
    ranks = Ranks(0, 1, 0, 1)
    with process_group(ranks):
        step_seconds = measure_saves(options.work / "run.yaml", ranks)
        measure_load(options, ranks)
        print(f"a step {step_seconds:.3f} s")
        measure_guard(step_seconds)
        measure_heartbeat(ranks, step_seconds)


def measure_saves(config: Path, ranks: Ranks) -> float:
    """Train and print what a save costs; return the time of a step that no save disturbs."""
    steps, waits = [], []
    timed(Trainer, "step", steps)
    timed(Trainer, "save", waits)
    start_run(read_run(config), ranks, device=torch.device("cpu"))
    half = SAVE_INTERVAL // 2
    after_saves = [steps[first:] for first in range(SAVE_INTERVAL, len(steps), SAVE_INTERVAL)]
    calm = median(second for group in after_saves for second in group[half:SAVE_INTERVAL])
    slower = [sum(group[:half]) - half * calm for group in after_saves]
    waits = waits[: len(slower)]
    cost = median(wait + more for wait, more in zip(waits, slower, strict=True))
    print(
        f"a save: training waits {median(waits):.3f} s, steps beside it take {median(slower):.3f} "
        f"s more; together {cost / calm:.1%} of a step"
    )
    return calm


def measure_load(options: argparse.Namespace, ranks: Ranks) -> None:
    """Print what checksums cost when a checkpoint is loaded from the page cache, and from disk."""
    from tokamake.train.backends.native import Engine

    run = read_run(options.work / "run.yaml")
    folder = max(run.output.glob("global_step*"), key=lambda path: int(path.name[11:]))
    files = [path for path in folder.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    engine = Engine(run, ranks, device=torch.device("cpu"), continues=True)
    check = torch_archive.check_checksums
    engine.load(folder)  # the first load allocates the states
    for source in ("the page cache", "disk"):
        seconds: dict[str, list[float]] = {"verified": [], "unverified": []}
        for _ in range(4 * options.rounds):
            for name, checks in (("verified", check), ("unverified", lambda *_, **__: None)):
                torch_archive.check_checksums = checks  # type: ignore[assignment]
                if source == "disk":
                    drop_from_cache(files)
                begin = time.perf_counter()
                engine.load(folder)
                seconds[name].append(time.perf_counter() - begin)
        verified, plain = (median(values) for values in seconds.values())
        print(
            f"a load of {size / 1e6:,.0f} MB from {source}: {verified:.3f} s with checksums, "
            f"{plain:.3f} s without: {verified / plain - 1:.1%} more"
        )
    torch_archive.check_checksums = check


def drop_from_cache(files: list[Path]) -> None:
    """Make the next reads of files come from disk."""
    for path in files:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_guard(step_seconds: float) -> None:
    """Print what a step spends on the search for a fault of its numbers."""
    settings, state, rounds = BadStepSettings(), GuardState(), 2_000
    chance = random.Random(0)
    begin = time.perf_counter()
    for _ in range(rounds):
        loss, norm = chance.gauss(3, 0.03), chance.gauss(0.5, 0.05)
        find_fault(settings, state.recent, loss=loss, grad_norm=norm)
        state = state.after_good(loss, norm, window=settings.spike_window)
    guard = (time.perf_counter() - begin) / rounds
    print(f"guards {guard * 1e6:.0f} µs, {guard / step_seconds:.3%} of a step")


def timed(owner: Any, name: str, seconds: list[float]) -> None:
    """Append the seconds of each call of a method to a list."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(owner, name, call)


def measure_heartbeat(ranks: Ranks, step_seconds: float) -> None:
    """Print what the notes of a step take, and the comparison of ranks at a log line."""
    rounds = 10_000
    with tempfile.TemporaryDirectory() as folder:
        beats = Heartbeat(Path(folder), ranks, hosts=["n1"], init_seconds=600, train_seconds=600)
        begin = time.perf_counter()
        for step in range(rounds):
            beats.beat("reads samples")
            beats.beat("trains")
            beats.end_step(step)
        notes = (time.perf_counter() - begin) / rounds
        device = torch.device("cpu")
        watch = Stragglers(Path(folder), ["n1"], rank=0, device=device)
        watch.look(0, reading=0.0, step_seconds=1.0)  # measures a product and writes the file
        begin = time.perf_counter()
        for step in range(rounds // 10):
            watch.look(step, reading=0.0, step_seconds=1.0)
        look = (time.perf_counter() - begin) / (rounds // 10)
        begin = time.perf_counter()
        product_seconds(device)
        product = time.perf_counter() - begin
    print(
        f"notes of a step {notes * 1e6:.1f} µs ({notes / step_seconds:.4%} of a step of "
        f"{step_seconds:.3f} s), look at a log line {look * 1e6:.0f} µs, products every 30 s "
        f"{product * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
