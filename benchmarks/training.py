"""Compare the trainer with plain PyTorch and transformers' Llama: same shape, data, batch, dtype.

    python benchmarks/training.py --rounds 3 --threads 2

Contestants take turns, round by round, each in a process of its own; medians of the tokens a
second, shares of the trainer's step that are neither forward, backward nor optimizer, and peaks of
memory are printed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
"""32 million parameters."""
ROWS, LENGTH = 4, 512
CONTESTANTS = ("transformers", "tokamake")
PRECISIONS = ("fp32", "bf16")

_HELD = ExitStack()
"""The process group of a contestant, until its process ends."""

Step = Callable[[np.ndarray], None]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured, after 4 to warm up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="one contestant and precision: what a process of it runs")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(*options.only.split(), options)))
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for precision in PRECISIONS:
            for name in CONTESTANTS:
                one = in_a_process(f"{name} {precision}", options)
                found.setdefault((precision, name), []).append(one)
                print(precision, name, one, file=sys.stderr, flush=True)
    print("| | transformers, tokens/s | tokamake, tokens/s | ratio | besides, share of a step |")
    print("| --- | --- | --- | --- | --- |")
    for precision in PRECISIONS:
        theirs, ours = (found[precision, name] for name in CONTESTANTS)
        speeds = [median(one["tokens_per_second"] for one in some) for some in (theirs, ours)]
        besides = median(one["besides"] for one in ours)
        print(
            f"| {precision} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {speeds[1] / speeds[0]:.2f} "
            f"| {besides:.1%} |"
        )
    print("\n| | transformers, peak MB | tokamake, peak MB |\n| --- | --- | --- |")
    for precision in PRECISIONS:
        peaks = [
            median(one["peak_bytes"] for one in found[precision, name]) / 1e6
            for name in CONTESTANTS
        ]
        print(f"| {precision} | {peaks[0]:,.0f} | {peaks[1]:,.0f} |")


def in_a_process(only: str, options: argparse.Namespace) -> dict[str, float]:
    """What a process of one contestant prints."""
    command = [sys.executable, __file__, "--only", only]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, precision: str, options: argparse.Namespace) -> dict[str, float]:
    """Take steps over the same random tokens."""
    rows = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (ROWS, LENGTH + 1))
    with tempfile.TemporaryDirectory() as folder:
        make = {"transformers": transformers_step, "tokamake": tokamake_step}[name]
        step, besides = make(precision, Path(folder))
        seconds = []
        for number in range(4 + options.steps):
            if number == 4:
                besides(True)
            begin = time.perf_counter()
            step(rows)
            seconds.append(time.perf_counter() - begin)
    return {
        "tokens_per_second": ROWS * LENGTH / median(seconds[4:]),
        "besides": besides(False) / sum(seconds[4:]),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def transformers_step(precision: str, _: Path) -> tuple[Step, Callable[[bool], float]]:
    """Transformers' Llama and torch's fused AdamW; bf16 by autocast, as its own trainer has it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(rows: np.ndarray) -> None:
        tokens = torch.from_numpy(rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens[:, :-1]).logits
        labels = tokens[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda _: 0.0


def tokamake_step(precision: str, folder: Path) -> tuple[Step, Callable[[bool], float]]:
    """The trainer's engine, whose passes and optimizer are timed apart."""
    from tokamake.checkpoint import megatron_deepspeed, tensors
    from tokamake.config import Architecture, Run
    from tokamake.runtime import Ranks, process_group
    from tokamake.train.backends.native import Engine

    architecture = Architecture.model_validate(SHAPE)
    megatron_deepspeed.write(folder / "start", architecture, tensors.random(architecture, 0))
    train = {"sequence_length": LENGTH, "micro_batch_size": ROWS, "global_batch_size": ROWS}
    run = Run(
        run="benchmark",
        seed=0,
        checkpoint=folder / "start",
        index=folder,
        data_root=folder,
        output=folder / "output",
        architecture=architecture,
        train={**train, "train_steps": 1000, "precision": precision},
    )
    ranks = Ranks(0, 1, 0, 1)
    _HELD.enter_context(process_group(ranks))
    import torch

    engine: Any = Engine(run, ranks, torch.device("cpu"))
    spent = [0.0, 0.0]
    timed(engine._stages, "forward_backward", spent)
    timed(engine._optimizer, "step", spent)

    def step(rows: np.ndarray) -> None:
        begin = time.perf_counter()
        engine.train_step([rows], learning_rate=1e-4, weight_decay=0.01)
        spent[1] += time.perf_counter() - begin

    def besides(begins: bool) -> float:
        if begins:
            spent[:] = 0.0, 0.0
        return spent[1] - spent[0]

    return step, besides


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Add the seconds of each call of a method to the first of `spent`."""
    method = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            spent[0] += time.perf_counter() - begin

    setattr(owner, name, call)


if __name__ == "__main__":
    main()
