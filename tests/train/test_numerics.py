"""Precision of the device, deterministic algorithms, compiled layers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.layouts import Layout, parallel, train_all
from tests.support.ranks import spawn
from tests.support.runs import make_run, prepare
from tokamake.config.resolved_run import read_run
from tokamake.config.training import INDEX_SETTINGS
from tokamake.errors import UserError
from tokamake.preflight.run import check_deterministic
from tokamake.preflight.run_record import run_digest
from tokamake.train.numerics import choose_precision, deterministic_algorithms, with_precision


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("numerics"), train_samples=72)


def test_the_default_precision_depends_on_the_device(root: Path) -> None:
    run = read_run(make_run(root, "undecided"))
    assert run.train.precision is None
    assert choose_precision(run.train, torch.device("cpu")) == "fp32"
    for device in ("cuda", "xpu"):
        assert choose_precision(run.train, torch.device(device)) == "bf16"
    run = read_run(make_run(root, "asked", precision="fp16"))
    assert choose_precision(run.train, torch.device("cpu")) == "fp16"


def test_the_digest_contains_the_chosen_precision(root: Path) -> None:
    run, with_setting = (
        read_run(make_run(root, name, **changes))
        for name, changes in (("left", {}), ("given", {"precision": "bf16"}))
    )
    index: dict[str, Any] = {
        "splits": {"train": {"files": []}},
        "version": 1,
        "seed": 1,
        "pairs": {},
        **dict.fromkeys(INDEX_SETTINGS),
    }
    digests = [
        run_digest(with_precision(run, torch.device(device)), index=index, weights="")
        for run, device in ((run, "cpu"), (run, "cuda"), (with_setting, "cpu"))
    ]
    assert digests[0] != digests[1] == digests[2]


def test_deterministic_mode_ends_with_the_run() -> None:
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.nn.functional.max_unpool1d(torch.ones(1, 1, 2), torch.tensor([[[0, 2]]]), 2)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "deepspeed"},
        {"recompute_granularity": "selective"},
        parallel(pp=2, vpp=2, schedule="interleaved_zero_bubble"),
        parallel(pp=2, vpp=2, schedule="zbv"),
    ],
)
def test_settings_that_cannot_be_compiled_are_refused(root: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="compile: "):
        make_run(root, "misfit", compile=True, **changes)


def test_sophia_is_not_deterministic_on_gpus(root: Path) -> None:
    config = make_run(root, "drawn", deterministic=True, optimizer={"name": "sophia_g"})
    run = read_run(config)
    check_deterministic(run, torch.device("cpu"))
    with pytest.raises(UserError, match=r"deterministic: true: optimizer sophia_g .* on cuda"):
        check_deterministic(run, torch.device("cuda"))


SHARED = parallel(tp=2, sp=True)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero_stage": 3, "recompute_granularity": "full"},
        SHARED,
    ],
    ids=["alone", "sharded", "sequence"],
)
def test_compiled_layers_change_nothing(root: Path, changes: dict[str, Any]) -> None:
    config = make_run(root, "compiled")
    ranks = 2 if changes else 1
    layouts = [Layout(config, {**changes, "compile": on}) for on in (False, True)]
    for plain, compiled in spawn(train_all, ranks, layouts):
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert compiled["norms"] == pytest.approx(plain["norms"], rel=1e-4)
        assert plain["gradients"][0]
        for (*_, compiled_gradient), (*_, gradient) in zip(
            compiled["gradients"][0], plain["gradients"][0], strict=True
        ):
            torch.testing.assert_close(compiled_gradient, gradient, rtol=1e-4, atol=1e-6)
