"""Checkpoints that megatron-core saves."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import dist_cores
from tests.support.dist_cores import Sizes
from tests.support.programs import core_python
from tests.support.shared_folders import made_once

ONE = Sizes(1, 1, 1)


def run(mode: str, folder: Path, sizes: Sizes, *rest: str) -> Path:
    """Run the program on all ranks."""
    # Megatron saves with processes of its own, whose import of the program must find `tests`.
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(root),
    }
    logs = [folder.with_name(f"{folder.name}.{rank}.log") for rank in range(sizes.world)]
    ranks = []
    for rank, log in enumerate(logs):
        numbers = [rank, *sizes]
        command = [core_python(), dist_cores.__file__, mode, str(folder), *map(str, numbers)]
        with log.open("w") as stream:
            ranks.append(
                subprocess.Popen([*command, *rest], env=environment, stdout=stream, stderr=stream)
            )
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * sizes.world, [log.read_text()[-3000:] for log in logs]
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a single rank."""
    cases = ("llama/none", "gpt/plain", "gpt/layers", "llama:bf16/plain", "llama-tied:fp16/plain")
    distributed = ("qwen3:bf16/fully_reshardable", "llama/dp_reshardable")
    experts = ("mixtral-grouped:bf16/fully_reshardable", "qwen3_moe/dp_reshardable")

    def make(folder: Path) -> None:
        run("save", folder / "one", ONE, *cases, *distributed, *experts)

    return made_once(tmp_path_factory, "torch-dist", make) / "one"


def edited(**values: Any) -> Callable[[Path], None]:
    """Change arguments in the common state."""

    def edit(path: Path) -> None:
        state = torch.load(path / "common.pt", weights_only=False)
        vars(state["args"]).update(values)
        torch.save(state, path / "common.pt")

    return edit
