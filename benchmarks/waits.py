"""Count what a training step costs on an accelerator, for each objective and layout, without one.

    python benchmarks/waits.py

A stand-in counts how often the host waits for the device, kernels, and copies to the device. Of two
ranks, a row has the first one, and of waits and kernels the larger number.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.ranks import spawn
from tests.support.standin_costs import Costs
from tests.support.standin_training import (
    train_by_deepspeed,
    train_layouts,
    train_on_both,
    train_with_passes,
)

COLUMNS = ("step", "waits", "kernels", "pinned copies", "other copies", "allocations")


def steps() -> Iterator[tuple[str, list[Costs]]]:
    """Costs of the last step of each run, of each rank."""
    for train in (train_on_both, train_with_passes):
        (of_rank,) = spawn(train, 1)
        for name, (_, of_device) in of_rank.items():
            yield name, [of_device.costs]
    ranks = spawn(train_layouts, 2)
    for name in ranks[0]:
        yield f"2 ranks: {name}", [rank[name][1].costs for rank in ranks]
    for stage in range(4):
        (of_device,) = spawn(train_by_deepspeed, 1, stage)
        yield f"DeepSpeed, ZeRO {stage}", [of_device.costs]


def main() -> None:
    """Measure and print a table."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name, (costs, *others) in steps():
        waits = max(len(each.waits) for each in (costs, *others))
        kernels = max(each.launches.total() for each in (costs, *others))
        kinds = [costs.copies[kind] for kind in ("pinned", "unpinned")]
        numbers = [waits, kernels, *kinds, costs.allocations]
        print(f"| {name} | {' | '.join(map(str, numbers))} |", flush=True)


if __name__ == "__main__":
    main()
