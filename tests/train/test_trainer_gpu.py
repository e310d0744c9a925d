"""Training on an accelerator: losses of a CPU, by back end, precision, optimizer; exact resume."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support.accelerators import MARKS
from tests.support.forked import train
from tests.support.programs import HIDDEN
from tests.support.runs import losses, make_run, train_here, weights
from tokamake import plugins
from tokamake.config.resolved_run import read_run, write_run

pytestmark = [
    *MARKS,
    pytest.mark.usefixtures("lone_rank"),
]

TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
"""Largest relative difference of a loss from the loss of the same run in fp32 on a CPU."""
APART = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


def resolved(root: Path, name: str, *, apart: bool = False, **settings: Any) -> Path:
    """A run, with or without its documents apart; the most frequent token ends documents."""
    config = make_run(root, name, **settings)
    run = read_run(config)
    if apart:
        tokens = np.fromfile(root / "corpus.bin", np.uint16)
        train = run.train.model_copy(update=APART)
        run = run.model_copy(update={"eod": int(np.bincount(tokens).argmax()), "train": train})
    write_run(config, run)
    return config


def on_cpu(root: Path, name: str, **settings: Any) -> list[float]:
    """Losses of training and validation of a run in fp32 on the CPU."""
    config = resolved(root, name, precision="fp32", **settings)
    with patch.dict(os.environ, HIDDEN):
        assert " on cpu, fp32" in train(config)
    return [*losses(config), *losses(config, "validation_loss")]


def on_gpu(root: Path, name: str, **settings: Any) -> list[float]:
    """The same on the GPU, in this process."""
    config = resolved(root, name, **settings)
    assert train_here(config) == 0
    return [*losses(config), *losses(config, "validation_loss")]


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[bool, list[float]]:
    """Losses on the CPU, by whether documents are kept apart."""
    return {False: on_cpu(root, "cpu"), True: on_cpu(root, "cpu-apart", apart=True)}


@pytest.mark.parametrize(
    ("precision", "apart"), [("fp32", False), ("fp32", True), ("bf16", True), ("fp16", False)]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compile": True},
        {"recompute_granularity": "selective"},
        {"backend": "deepspeed", "zero_stage": 1},
        {"backend": "deepspeed", "zero_stage": 3},
        {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": "cpu"},
    ],
    ids=str,
)
def test_losses_are_those_of_a_cpu(
    root: Path,
    tmp_path: Path,
    expected: dict[bool, list[float]],
    settings: dict[str, Any],
    apart: bool,
    precision: str,
) -> None:
    if precision == "fp16":
        settings = {**settings, "loss_scaling": {"initial_scale": 2.0**8}}
    ours = on_gpu(root, tmp_path.name, precision=precision, apart=apart, **settings)
    assert ours == pytest.approx(expected[apart], rel=TOLERANCES[precision])


@pytest.mark.parametrize("name", sorted(plugins.names("optim")))
def test_optimizers_update_as_on_a_cpu(root: Path, name: str) -> None:
    settings: dict[str, Any] = {"optimizer": {"name": name}, "train_steps": 4}
    if name.startswith("schedule_free"):
        settings["schedule"] = {"name": "constant", "warmup_steps": 2}
    expected = on_cpu(root, f"{name}-cpu", **settings)
    ours = on_gpu(root, f"{name}-gpu", precision="fp32", **settings)
    assert ours == pytest.approx(expected, rel=1e-3)


def test_a_resumed_run_has_the_same_weights(root: Path) -> None:
    whole = resolved(root, "whole", precision="bf16", deterministic=True)
    parts = resolved(root, "parts", precision="bf16", deterministic=True)
    assert train_here(whole) == 0
    assert train_here(parts, until_step=2) == 0
    assert train_here(parts) == 0
    assert losses(parts) == losses(whole)
    expected = weights(whole)
    for name, tensor in weights(parts).items():
        assert torch.equal(tensor, expected[name]), name
