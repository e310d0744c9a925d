"""Count what a training step costs on an accelerator, for each objective, without an accelerator.

    python benchmarks/waits.py

A stand-in counts how often the host waits for the device, kernels, and copies to the device.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.standin_training import train_on_both
from tokamake.runtime.process_group import process_group
from tokamake.runtime.ranks import Ranks

COLUMNS = ("run", "waits", "kernels", "pinned copies", "other copies", "allocations")


def main() -> None:
    """Measure and print a table."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with process_group(Ranks(0, 1, 0, 1)):
        trained = train_on_both()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for run, (_, of_device) in trained.items():
        costs = of_device.costs
        kinds = [costs.copies[kind] for kind in ("pinned", "unpinned")]
        numbers = [len(costs.waits), costs.launches.total(), *kinds, costs.allocations]
        print(f"| {run} | {' | '.join(map(str, numbers))} |")


if __name__ == "__main__":
    main()
