"""Memory that torch allocates on a CPU while a run trains."""

import json
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from tokamake.config.resolved_run import Run
from tokamake.runtime.ranks import Ranks
from tokamake.train.backends.native import Engine


def train(run: Run) -> None:
    """Do two steps on random tokens."""
    engine = Engine(run, Ranks(0, 1, 0, 1), device=torch.device("cpu"))
    shape = run.train.micro_batch_size, run.train.sequence_length + 1
    rows = np.random.default_rng(1).integers(run.architecture.vocab_size or 0, size=shape)
    for _ in range(2):
        engine.train_step([rows], learning_rate=1e-3, weight_decay=0.0)


def peak(run: Run, folder: Path) -> float:
    """Most bytes that torch has allocated at one time while it trains."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train(run)
    profiled.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = [e["args"]["Total Allocated"] for e in events if e["name"] == "[memory]"]
    return float(max(sizes))
