"""Measure how long one of thousands of ranks takes to start.

    python benchmarks/starting.py --ranks 2000 4000 10000 --work benchmark-work

The other ranks are simulated: torch's process group `fake` answers at once, and objects that ranks
exchange are copies of this rank's. All else is the start of a real run of GPT-3 175B, from run.yaml
to the first step: checks, the lock, the layout, this rank's weights, optimizer and samples. Each
number of ranks runs in a process of its own, on one core. Counted are the bytes that a rank
receives.
"""

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TENSOR, PIPELINE = 8, 10
TOKENS, LENGTH = 4_000_000, 2048


def main() -> None:
    """Measure each number of ranks."""
    options = _options()
    if options.rank is not None:
        print(json.dumps(start(options.work, options.ranks[0], rank=options.rank)))
        return
    make_folder(options.work)
    print(
        " ranks   seconds to the first step   seconds for the mesh   bytes received   collectives"
    )
    for ranks in options.ranks:
        shown = [measure(options.work, ranks, rank=0) for _ in range(options.rounds)]
        median = sorted(shown, key=lambda result: result["seconds"])[len(shown) // 2]
        print(
            f"{ranks:6,} {median['seconds']:27.1f} {median['mesh']:22.1f} "
            f"{median['bytes']:16,} {median['collectives']:10}"
        )


def measure(folder: Path, ranks: int, *, rank: int) -> dict[str, Any]:
    """Start in a new process, on one core."""
    command = [sys.executable, __file__, "--work", str(folder), "--ranks", str(ranks)]
    command += ["--rank", str(rank)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    core = min(os.sched_getaffinity(0))
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    shown: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return shown


def make_folder(folder: Path) -> None:
    """Write a dataset and its index; an existing folder is replaced."""
    import numpy as np

    from tokamake.data.indexed.dataset import DatasetWriter, bin_path, idx_path
    from tokamake.data.indexed.manifest import manifest_path, sizes_and_hashes, write_manifest
    from tokamake.data.samples.index import index

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lengths = np.full(TOKENS // 1000, 1000, np.int32)
    with DatasetWriter(folder / "corpus.bin", folder / "corpus.idx", dtype=np.uint16) as writer:
        writer.add(np.random.default_rng(0).integers(0, 50257, TOKENS), lengths)
    paths = bin_path(folder / "corpus"), idx_path(folder / "corpus")
    write_manifest(manifest_path(folder / "corpus"), sizes_and_hashes(*paths))
    (folder / "weights.txt").write_text("1.0 corpus corpus\n")
    index(
        weights=folder / "weights.txt",
        data_root=folder,
        output=folder / "index",
        sequence_length=LENGTH,
        split="98,2,0",
        seed=1,
        train_samples=20_000,
        valid_samples=0,
    )


class Traffic:
    """Counts the collectives of this rank and the bytes that it receives.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size, self._bytes, self._count, self._on = world_size, 0, 0, True

    def stop(self) -> None:
        self._on = False

    def result(self) -> dict[str, int]:
        return {"bytes": self._bytes, "collectives": self._count}

    def _add(self, num_bytes: int) -> None:
        if self._on:
            self._bytes += num_bytes
            self._count += 1

    def count(self) -> None:
        """Replace torch's collectives by ones that count."""
        import torch.distributed as dist

        def all_gather_object(objects: list[Any], value: Any, group: Any = None) -> None:
            size = dist.get_world_size(group)
            self._add(len(pickle.dumps(value)) * size)
            objects[:] = [value] * size

        def broadcast_object_list(objects: list[Any], *_: Any, **__: Any) -> None:
            if objects[0] is None:
                raise SystemExit("simulate rank 0: other ranks wait for what it broadcasts")
            self._add(len(pickle.dumps(objects)))

        def counting(name: str, received: Any) -> Any:
            original = getattr(dist, name)

            def counted(*arguments: Any, **options: Any) -> Any:
                self._add(received(*arguments))
                return original(*arguments, **options)

            return counted

        dist.all_gather_object = all_gather_object
        dist.broadcast_object_list = broadcast_object_list
        for name in ("all_reduce", "broadcast", "all_gather_into_tensor"):
            setattr(dist, name, counting(name, lambda tensor, *_: tensor.nbytes))
        dist.barrier = counting("barrier", lambda *_: 0)
        new_group = dist.new_group
        dist.new_group = lambda ranks=None, **_: new_group(ranks)  # gloo cannot be simulated


def start(folder: Path, world_size: int, *, rank: int) -> dict[str, Any]:
    """Start a run as one of many ranks, up to its first step."""
    begin = time.perf_counter()
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tokamake.config.architecture import read_architecture
    from tokamake.config.resolved_run import Run
    from tokamake.parallel import mesh
    from tokamake.runtime.ranks import Ranks
    from tokamake.train import trainer
    from tokamake.train.train import start_run

    torch.set_num_threads(1)
    architecture = read_architecture(ROOT / "config/models/gpt3-175b.yaml")
    parallel = {"tensor_parallel_size": TENSOR, "pipeline_parallel_size": PIPELINE}
    data = world_size // (TENSOR * PIPELINE)
    train = {
        "sequence_length": LENGTH,
        "micro_batch_size": 1,
        "global_batch_size": data * PIPELINE,
        "train_steps": 4,
        "split": "98,2,0",
        "evaluation_steps": 0,
        "precision": "bf16",
        "parallel": parallel,
    }
    run = Run(
        run="start",
        seed=1,
        index=folder / "index",
        data_root=folder,
        output=folder / f"output-{world_size}-{rank}",
        architecture=architecture,
        train=train,  # type: ignore[arg-type]
    )
    shutil.rmtree(run.output, ignore_errors=True)
    traffic = Traffic(world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    traffic.count()
    seconds: dict[str, float] = {}
    build = mesh.build

    def timed_build(*arguments: Any, **options: Any) -> Any:
        built_at = time.perf_counter()
        built = build(*arguments, **options)
        seconds["mesh"] = time.perf_counter() - built_at
        return built

    mesh.build = timed_build

    def stop(self: Any) -> Any:
        next(self.steps)  # the samples of the first step
        seconds["seconds"] = time.perf_counter() - begin
        traffic.stop()
        print(json.dumps({**seconds, **traffic.result()}), flush=True)
        os._exit(0)

    trainer.Trainer.train = stop  # type: ignore[method-assign]
    local = 8
    ranks = Ranks(rank, world_size, rank % local, local)
    start_run(run, ranks, device=torch.device("cpu"))
    raise AssertionError("the trainer returned")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2000, 4000, 10000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
