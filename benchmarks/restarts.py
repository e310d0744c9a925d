"""Time that kills of a rank cost a run which restarts in its job, and the cost of the heartbeat.

    python benchmarks/restarts.py results/tiny/run.yaml --ranks 2 --kills 4 --work DIR

Trains the run of a run.yaml twice in DIR through profiles/local: once undisturbed, and once while
ranks are killed with SIGKILL, at steps that divide the run evenly. The kills cost restarts and the
steps since the last checkpoint, which are trained again.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
import yaml

from tokamake.runtime.process_group import process_group
from tokamake.runtime.ranks import Ranks
from tokamake.runtime.restarts import newest_step
from tokamake.train import metrics
from tokamake.train.heartbeat import Heartbeat
from tokamake.train.stragglers import Stragglers, product_seconds

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path, help="run.yaml of a run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    undisturbed, _, step_seconds = train(options, "undisturbed", kills=0)
    killed, lost_steps, _ = train(options, "killed", kills=options.kills)
    lost = lost_steps * step_seconds
    each = (killed - undisturbed - lost) / options.kills
    print(f"undisturbed {undisturbed:.1f} s, {options.kills} kills {killed:.1f} s")
    print(f"{lost_steps} steps trained again, {lost:.1f} s; {each:.1f} s a restart")
    print(f"a run of {options.kills * each / 0.05 / 60:.0f} minutes loses 5 % by the restarts")
    measure_heartbeat(step_seconds)


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


def measure_heartbeat(step_seconds: float) -> None:
    """Print what the notes of a step take, and the comparison of ranks at a log line."""
    ranks, rounds = Ranks(0, 1, 0, 1), 10_000
    with process_group(ranks), tempfile.TemporaryDirectory() as folder:
        beats = Heartbeat(Path(folder), ranks, hosts=["n1"], seconds=600, train_seconds=600)
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
