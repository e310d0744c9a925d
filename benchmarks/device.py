"""Check and measure tokamake on one accelerator, in at most 6 minutes.

    benchmarks/device.sh --work DIR
    benchmarks/device.sh --work DIR --only "dense, compiled"
    benchmarks/device.sh --work DIR --device cpu

Runs each case of `CASES` in processes of its own, until the time is over. Writes DIR/device.json
and DIR/device.md, the table for RESULTS.md; both name what was left out, and why. The exit status
is 1 if a case failed, 3 if none failed but something was left out, and 2 without an accelerator.
`--device cpu` runs each case with tiny sizes, to test this script without one: its
speeds mean nothing.

`tokamake benchmark-train` measures speeds with the shape of Llama 3.2 1B in bf16, on documents of
512 tokens. The mixture of experts has 3.7 billion parameters; a token uses as many as in the dense
model. fp8 is left out: tokamake does not train in it.
"""

import argparse
import filecmp
import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.device_bench import (
    LARGE,
    ROOT,
    TINY,
    Bench,
    Failure,
    LeftOut,
    Settings,
    prepare,
)

SECONDS = 360
TOLERANCE = 0.1
"""Largest share by which peak memory may differ from the estimate."""
USABLE_MEMORY = 0.9
"""Share of the device's memory that a run may need by the estimate."""
PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"


# ---- Cases ----


def speed(bench: Bench, name: str, *, shape: Settings | None = None, **train: Any) -> Settings:
    """Speed of training steps, and their peak memory beside the estimate."""
    settings = {**train, "micro_batch_size": _micro_batch_size(bench, shape, **train)}
    config = bench.run(name, shape or bench.sizes.shape, **settings)
    output = config.parent / "speed.json"
    command = ["-m", "tokamake", "benchmark-train", "--config", str(config)]
    command += ["--steps", str(bench.sizes.steps), "--warmup-steps", str(bench.sizes.warmup_steps)]
    bench.call(*command, "--output", str(output), log=name)
    measured: Settings = json.loads(output.read_text())
    estimated = estimated_bytes(config, bench.kind)
    shows = (
        f"{measured['tokens_per_second']:,.0f} tokens/s, "
        f"{measured['model_tflops_per_rank']:.4g} TFLOP/s, {measured['mfu']:.1%} MFU; "
        f"{measured['peak_memory_bytes'] / 1e9:.1f} GB, estimated {estimated / 1e9:.1f} GB"
    )
    found = {**measured, **settings, "estimated_bytes": estimated, "shows": shows}
    if bench.kind != "cpu":  # there, a process also holds torch itself
        check_memory(measured["peak_memory_bytes"], estimated)
    return found


def experts(bench: Bench, name: str) -> Settings:
    """Speed of a mixture of experts that uses as many weights for a token as the dense model."""
    shape = bench.sizes.shape
    chosen = {"num_experts": 32, "num_experts_per_tok": 8}
    width = shape["intermediate_size"] // chosen["num_experts_per_tok"]
    changes = {"family": "mixtral", "intermediate_size": width, **chosen}
    return speed(bench, name, shape={**shape, **changes})


def windows(bench: Bench, name: str) -> Settings:
    """Speed of the dense model with a window of a quarter of a row in each layer."""
    changes = {"family": "mistral", "sliding_window": bench.sizes.length // 4}
    return speed(bench, name, shape={**bench.sizes.shape, **changes})


def _micro_batch_size(bench: Bench, shape: Settings | None, **train: Any) -> int:
    """The first size of a micro batch that fits the memory of the device.

    Raises:
        LeftOut: none fits.
    """
    memory, needed = bench.device["memory_bytes"], 0.0
    for size in bench.sizes.micro_batches:
        settings = {**train, "micro_batch_size": size}
        config = bench.run("fits", shape or bench.sizes.shape, **settings)
        needed = estimated_bytes(config, bench.kind)
        if memory is None or needed <= USABLE_MEMORY * memory:
            return size
    raise LeftOut(f"it needs {needed / 1e9:.0f} GB, the device has {memory / 1e9:.0f} GB")


def estimated_bytes(config: Path, kind: str) -> float:
    """Memory of the run by the estimate that `tokamake estimate` prints."""
    from tokamake.config.resolved_run import read_run
    from tokamake.estimate.parameters import stage_sizes
    from tokamake.train import memory

    return memory.estimate(read_run(config), 1, kind, stages=stage_sizes).total


def check_memory(peak_bytes: float, estimated: float) -> None:
    """Compare peak memory with its estimate.

    Raises:
        Failure: they differ by more than `TOLERANCE`.
    """
    apart = peak_bytes / estimated - 1
    if abs(apart) > TOLERANCE:
        raise Failure(
            f"peak memory {peak_bytes / 1e9:.2f} GB, {apart:+.0%} of the estimated "
            f"{estimated / 1e9:.2f} GB"
        )


def proof(bench: Bench, name: str) -> Settings:
    """Two steps on the device against a plain loop on the CPU: losses, gradients, weights."""
    config = bench.run(name, bench.sizes.small, precision="fp32", reset_attention_mask=True)
    bench.call(str(Path(__file__)), "--prove", str(config), log=name)
    return {"shows": "losses, gradients and weights of a CPU, in fp32"}


def resumed(bench: Bench, name: str) -> Settings:
    """A run in two jobs has the checkpoint of a run in one, bit by bit."""
    folders = []
    for part, stops in (("whole", ()), ("parts", ("3",))):
        settings = {"deterministic": True, "dropout": {"hidden": 0.1}, "save_interval": 3}
        length = {"train_steps": 6, "evaluation_interval": 100}
        config = bench.run(f"{name}-{part}", bench.sizes.small, **settings, **length)
        train = ("-m", "tokamake", "train", "--config", str(config))
        for step in stops:
            bench.call(*train, "--until-step", step, log=f"{name}-{part}-{step}")
        bench.call(*train, log=f"{name}-{part}")
        folders.append(config.parent / "training/global_step6")
    names = sorted(path.name for path in folders[0].glob("*.distcp"))
    _, differ, missing = filecmp.cmpfiles(*folders, names, shallow=False)
    if differ or missing or not names:
        raise Failure(f"the files of the last checkpoint differ: {[*differ, *missing] or 'none'}")
    return {"shows": "the checkpoint after 3 + 3 steps has the bytes of the one after 6"}


SHARED = "have the same device"
"""What tokamake says of two ranks on one device of CUDA, which NCCL would refuse."""


def two_processes(bench: Bench, name: str) -> Settings:
    """Two ranks with tensor parallelism train as one process does."""
    parallel = {"tensor_parallel_size": 2, "sequence_parallel": True}
    config = bench.run(name, bench.sizes.small, parallel=parallel)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    try:
        output = bench.call(*launch, "-m", "tokamake", "prove", str(config), log=name)
    except Failure:
        if SHARED in (bench.work / f"{name}.log").read_text():
            raise LeftOut("NCCL needs a device for each rank, and there is one") from None
        raise
    if not re.search("^proved: ", output, re.M):
        raise Failure(f"no proof; see {name}.log")
    return {"shows": "two ranks with tensor and sequence parallelism train as one process"}


MARKED = ("mark.gpu", "support.accelerators")
"""Texts in the files with tests of the marker `gpu`."""


def marked_tests(bench: Bench, name: str) -> Settings:
    """The tests of the marker `gpu`, in the time that is left."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if _is_marked(path)]
    command = ("-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider", *_workers())
    output = bench.call(*command, *map(str, sorted(files)), log=name)
    passed = re.search(r"(\d+) passed", output)
    skipped = re.findall(r"^SKIPPED \[(\d+)\] ([^:]+):\d*:? *(.*)", output, re.M)
    parts = [f"{count} of {path}: {reason}" for count, path, reason in skipped]
    if passed is None:
        raise LeftOut(f"all tests skipped: {'; '.join(parts)}")
    return {"shows": f"{passed[1]} passed", "left_out": parts}


def _is_marked(path: Path) -> bool:
    text = path.read_text()
    return any(mark in text for mark in MARKED)


def _workers() -> tuple[str, ...]:
    """Options of pytest: several tests at a time, if there are cores for them."""
    cores = len(os.sched_getaffinity(0))
    return ("-n", str(min(4, cores // 2))) if cores >= 4 else ()


MASKS = {"reset_attention_mask": True, "reset_position_ids": True}
"""Settings that keep documents apart."""
CASES: dict[str, Callable[[Bench, str], Settings]] = {
    "dense": speed,
    "dense, document masks": partial(speed, **MASKS),
    "dense, compiled": partial(speed, compile=True),
    "dense, compiled, document masks": partial(speed, compile=True, **MASKS),
    "experts": experts,
    "windows": windows,
    "proof": proof,
    "resume": resumed,
    "two processes": two_processes,
    "marked tests": marked_tests,
}
"""Cases by name, in the order of their run; a further family is a function as `windows`."""


# ---- The script ----


def main() -> None:
    """Run the cases; write JSON and a table."""
    options = _options()
    if options.prove:
        prove_here(options.prove)
        return
    begin = time.monotonic()
    device = find_device(options.device)
    if isinstance(device, str):
        print(f"device.sh: {device}", file=sys.stderr)
        raise SystemExit(2)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    sizes = TINY if device["kind"] == "cpu" else LARGE
    bench = Bench(work, device, sizes, begin + options.seconds)
    prepare(work, sizes)
    chosen = {name: case for name, case in CASES.items() if options.only in (None, name)}
    results: dict[str, Settings] = {}
    for name, case in chosen.items():
        results[name] = outcome(bench, name, case=case)
        # After each case, so that the job's end loses none of them.
        seconds = time.monotonic() - begin
        found = {"seconds": seconds, "left_out": left_out(results), "cases": results}
        (work / "device.json").write_text(json.dumps({"device": device, **found}, indent=1) + "\n")
        (work / "device.md").write_text(table(device, results, seconds=seconds))
    print((work / "device.md").read_text(), end="")
    raise SystemExit(exit_status(results))


def find_device(kind: str | None) -> Settings | str:
    """Facts of the accelerator, or of the CPU if it is asked for; else why there is none."""
    import torch

    from tokamake.runtime.device import accelerators, device_memory, device_name
    from tokamake.runtime.ranks import Ranks

    version = f"torch {torch.__version__}"
    if kind == "cpu":
        return {"kind": "cpu", "name": "cpu", "count": 1, "memory_bytes": None, "torch": version}
    found = {each: module for each, module in accelerators() if kind in (None, each)}
    if not found:
        wanted = {"cuda": "CUDA", "xpu": "XPU"}.get(str(kind), "CUDA or XPU")
        return (
            f"{version} finds no device of {wanted}; install a torch for it, or give --device cpu"
        )
    name, module = next(iter(found.items()))
    first = torch.device(name, 0)
    return {
        "kind": name,
        "name": device_name(first),
        "count": module.device_count(),
        "memory_bytes": device_memory(first, Ranks(0, 1, 0, 1)),
        "torch": version,
    }


def outcome(bench: Bench, name: str, *, case: Callable[[Bench, str], Settings]) -> Settings:
    """Run a case; its verdict, seconds and numbers."""
    begin = time.monotonic()
    try:
        if begin >= bench.deadline:
            raise LeftOut("the time was over")
        found = {"verdict": PASSED, **case(bench, name.replace(", ", "-").replace(" ", "-"))}
    except LeftOut as error:
        found = {"verdict": LEFT_OUT, "shows": str(error)}
    except Exception as error:  # on hardware that we have not seen; later cases may pass
        shows = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
        found = {"verdict": FAILED, "shows": shows}
    return {**found, "seconds": time.monotonic() - begin}


def left_out(results: dict[str, Settings]) -> list[str]:
    """What did not run: cases, and parts of cases that passed, with reasons."""
    cases = [f"{n}: {each['shows']}" for n, each in results.items() if each["verdict"] == LEFT_OUT]
    parts = [f"{n}: {part}" for n, each in results.items() for part in each.get("left_out", ())]
    return [*cases, *parts]


def exit_status(results: dict[str, Settings]) -> int:
    """1 if a case failed, 3 if none failed but something did not run, else 0."""
    if any(each["verdict"] == FAILED for each in results.values()):
        return 1
    return 3 if left_out(results) else 0


def table(device: Settings, results: dict[str, Settings], *, seconds: float) -> str:
    """Markdown for RESULTS.md."""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    head = f"{date}, {device['name']} ({device['kind']}), {device['torch']}, {seconds:.0f} s"
    lines = [head, "", "| case | verdict | | s |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {each['verdict']} | {each['shows'].replace('|', ' ')} | "
        f"{each['seconds']:.0f} |"
        for name, each in results.items()
    ]
    missing = left_out(results)
    lines += ["", "Left out:" if missing else "Nothing was left out."]
    lines += ["", *(f"- {each}" for each in missing)] if missing else []
    return "\n".join(lines) + "\n"


def prove_here(config: Path) -> None:
    """Compare two steps of a run's miniature on the device with a plain loop on the CPU."""
    from tokamake.config.resolved_run import read_run
    from tokamake.prove.comparison import differences
    from tokamake.prove.miniature import miniature
    from tokamake.runtime.process_group import process_group
    from tokamake.runtime.ranks import Ranks

    ranks = Ranks(0, 1, 0, 1)
    with process_group(ranks) as device:
        run = miniature(read_run(config), 1, precision="fp32")
        found = differences(run, ranks, device=device)
    print(*found, sep="\n")
    raise SystemExit(bool(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("device-work"), help="scratch folder")
    parser.add_argument(
        "--device", choices=("cuda", "xpu", "cpu"), help="default: what torch finds"
    )
    parser.add_argument("--only", choices=[*CASES], help="run one case")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all cases")
    parser.add_argument("--prove", type=Path, help="internal: a run.yaml to prove here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
