"""Precision in the native engine: close to fp32, repeatable, fp16 overflows; packed documents."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import RATES, assert_equal, build, coming, go, states, weights
from tests.support.forked import train
from tests.support.layouts import laid_out, parallel
from tests.support.layouts import train as train_layout
from tests.support.layouts import train_all as train_layouts
from tests.support.ranks import spawn
from tests.support.runs import make_run, prepare
from tokamake.checkpoint.convert import convert
from tokamake.config.resolved_run import read_run, write_run

pytestmark = pytest.mark.ranks

STEPS = 60
BANDS = {"bf16": 0.02, "fp16": 0.01}
"""Largest relative difference of a step's loss from fp32, over a run of `STEPS`."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = prepare(tmp_path_factory.mktemp("precision"), train_samples=600)
    return make_run(root, "run", backend="native", train_steps=70)


def train_twice(config: Path, precisions: list[str], number: int) -> dict[str, list[float]]:
    """Losses in each precision; a second engine must compute the same bits."""
    losses = {}
    for precision in precisions:
        run = laid_out(read_run(config), {"precision": precision})
        first, second = build(run), build(run)
        losses[precision] = go(first, coming(first, run), number)
        assert go(second, coming(second, run), number) == losses[precision], precision
        assert_equal(weights(first), weights(second))
        assert_equal(states(first), states(second))
        assert {tensor.dtype for tensor in weights(first).values()} == {torch.float32}
    return losses


@pytest.mark.grid
def test_low_precision_stays_close_to_fp32(config: Path) -> None:
    (losses,) = spawn(train_twice, 1, config, ["fp32", *BANDS], STEPS, timeout=500)
    exact = np.array(losses["fp32"])
    assert exact[-5:].mean() < exact[:5].mean() - 0.5
    for precision, band in BANDS.items():
        distance = np.abs(np.array(losses[precision]) / exact - 1).max()
        assert 1e-7 < distance < band, precision


def wide_sums(config: Path, all_changes: list[dict[str, Any]]) -> None:
    """Gradients of bf16 passes add up in fp32: few of these sums can be represented in bf16."""
    for changes in all_changes:
        run = laid_out(read_run(config), {"precision": "bf16", "micro_batch_size": 1, **changes})
        (first,) = train_layout(run, num_steps=1)["gradients"]
        values = torch.cat([tensor.flatten() for _, _, _, tensor in first])
        values = values[values != 0]
        assert values.dtype == torch.float32
        # Without clipping, whose factor would change the bits of all of them.
        exact = (values.bfloat16().float() == values).float().mean()
        assert exact < 0.5, (changes, exact)


def test_gradients_add_up_in_fp32(config: Path) -> None:
    apart = {"gradient_clipping": 0.0}
    spawn(wide_sums, 1, config, [apart])
    others = ({"zero_stage": 2}, {"zero_stage": 3}, parallel(tp=2), parallel(cp=2), parallel(pp=2))
    spawn(wide_sums, 2, config, [{**apart, **changes} for changes in others])


def on_two_ranks(config: Path, folder: Path) -> None:
    """Repeat training on two ranks, and let fp16 overflow."""
    train_twice(config, ["fp32", "bf16", "fp16"], 10)
    for changes in ({"zero_stage": 2}, parallel(tp=2, sp=True), parallel(pp=2)):
        name = "-".join(map(str, changes)) + str(len(str(changes)))
        overflow(config, {"precision": "fp16", **changes}, folder / name)


def overflow(config: Path, changes: dict[str, Any], folder: Path) -> None:
    """Steps whose gradients overflow are skipped; each halves the scale."""
    run = laid_out(read_run(config), changes)
    engine = build(run)
    remaining = coming(engine, run)
    before = weights(engine)
    engine._loss_scale.state = (2.0**32, 5)
    skipped = 0
    while (result := engine.train_step(next(remaining).micro_batches, **RATES)).skipped:
        skipped += 1
        assert engine._loss_scale.state == (2.0 ** (32 - skipped), 0)
        assert_equal(weights(engine), before)
        assert not states(engine)
        assert 4 < result.loss < 6  # it does not depend on the scale
    assert 1 <= skipped < 31
    assert engine._loss_scale.state == (2.0 ** (32 - skipped), 1)
    assert np.isfinite(result.grad_norm)
    assert not all(torch.equal(part, before[name]) for name, part in weights(engine).items())
    progress = {"iteration": 1, "consumed_samples": 8, "consumed_tokens": 128}
    engine.save(folder, progress).wait()
    loaded = build(run)
    loaded.load(folder)
    assert loaded._loss_scale.state == engine._loss_scale.state
    done = skipped + 1
    assert go(loaded, coming(loaded, run, done=done), 4) == go(engine, remaining, 4)
    assert_equal(weights(loaded), weights(engine))


@pytest.mark.grid
def test_two_ranks_are_repeatable_and_skip_overflows(config: Path, tmp_path: Path) -> None:
    spawn(on_two_ranks, 2, config, tmp_path, timeout=500)


APART = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@pytest.mark.grid
def test_documents_are_kept_apart_at_every_layout(config: Path, tmp_path: Path) -> None:
    run = read_run(config)
    tokens = np.concatenate([np.fromfile(config.parents[1] / "corpus.bin", np.uint16)])
    # The most frequent token ends documents, so that many samples hold several.
    eod = int(np.bincount(tokens).argmax())
    with_ends = tmp_path / "run.yaml"
    write_run(with_ends, run.model_copy(update={"eod": eod}))
    layouts: list[dict[str, Any]] = [
        {"zero_stage": 2},
        parallel(tp=2),
        parallel(tp=2, sp=True),
        parallel(cp=2),
        parallel(cp=2, method="ulysses"),
        parallel(pp=2),
    ]
    together: dict[str, bool] = dict.fromkeys(APART, False)
    (alone,) = spawn(train_layouts, 1, [(with_ends, APART), (with_ends, together)])
    assert np.abs(np.array(alone[0]["losses"]) / alone[1]["losses"] - 1).max() > 1e-4
    for of_rank in spawn(train_layouts, 2, [(with_ends, APART | changes) for changes in layouts]):
        for changes, result in zip(layouts, of_rank, strict=True):
            for key in ("losses", "norms", "validation"):
                assert result[key] == pytest.approx(alone[0][key], rel=1e-5), (key, changes)


@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_a_converted_bf16_run_has_fp32_weights_by_default(backend: str, tmp_path: Path) -> None:
    settings = {"backend": backend, "train_steps": 2, "save_interval": 2, "precision": "bf16"}
    train(make_run(prepare(tmp_path), "run", **settings))
    for dtype, name in ((None, "float32"), ("bf16", "bfloat16")):
        folder = tmp_path / name
        convert(source=tmp_path / "run/training", target=folder, format="hf", dtype=dtype)  # type: ignore
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == name
