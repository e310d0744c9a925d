"""`benchmark-train` and `find-learning-rate` train without writing to the run's folder."""

import itertools
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.berts import bert
from tests.support.layouts import laid_out
from tests.support.programs import torch_python, torchrun
from tests.support.runs import make_run, prepare
from tests.support.t5s import t5
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import read_run, write_run
from tokamake.errors import UserError
from tokamake.train.trials import speed
from tokamake.train.trials.benchmark_train import benchmark_train
from tokamake.train.trials.find_learning_rate import curve, find_learning_rate


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("trial"), train_samples=480)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check(report: dict[str, Any], *, ranks: int) -> None:
    """Check that the numbers of a benchmark fit together."""
    assert report["world_size"] == ranks
    assert report["tokens_per_step"] == 8 * 16
    times, parts = report["step_seconds"], report["split_seconds"]
    assert 0 < times["p10"] <= times["median"] <= times["p90"]
    # Half of the steps take the median time or longer; a single step may take any time.
    assert 0 < report["tokens_per_second"] <= 2.0001 * 128 / times["median"]
    assert report["tokens_per_second_per_rank"] * ranks == pytest.approx(
        report["tokens_per_second"]
    )
    assert set(parts) == {"forward_backward", "optimizer", "rest"}
    assert all(seconds > 0 for seconds in parts.values())
    flops = report["tokens_per_second_per_rank"] * report["flops_per_token"] / 1e12
    assert report["model_tflops_per_rank"] == pytest.approx(flops)
    assert report["mfu"] == pytest.approx(flops / report["peak_tflops"])
    assert report["peak_memory_bytes"] > 1e7


def test_a_benchmark_measures_and_writes_nothing_else(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that advances by half a second at each call.
    clock = itertools.count(0, 0.5).__next__
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=clock))
    config, output = make_run(root, "measured"), tmp_path / "speed.json"
    before = files_in(root)
    benchmark_train(config=config, steps=6, warmup_steps=1, output=output)
    assert files_in(root) == before
    report = json.loads(output.read_text())
    check(report, ranks=1)
    assert (report["steps"], report["peak_source"]) == (6, "matrix product")
    assert report["step_seconds"] == {"median": 0.5, "p10": 0.5, "p90": 0.5}
    assert report["tokens_per_second"] == pytest.approx(6 * 128 / 3.5)
    assert report["split_seconds"] == {"forward_backward": 0.5, "optimizer": 0.5, "rest": 1.5}
    printed = capsys.readouterr().out
    assert f"{report['tokens_per_second']:,.0f} tokens/s" in printed
    assert "forward and backward" in printed


def test_random_tokens_need_no_index(root: Path, tmp_path: Path) -> None:
    config, output = make_run(root, "synthetic"), tmp_path / "speed.json"
    config.write_text(config.read_text().replace(f"{root}/index", f"{tmp_path}/none"))
    arguments: dict[str, Any] = {"config": config, "steps": 2, "warmup_steps": 0}
    with pytest.raises(UserError, match="none"):
        benchmark_train(**arguments)
    benchmark_train(**arguments, synthetic=True, peak_tflops=2.0, output=output)
    report = json.loads(output.read_text())
    assert (report["peak_tflops"], report["peak_source"]) == (2.0, "stated")


@pytest.mark.parametrize("encoder", [bert(vocab_size=121), t5(vocab_size=121)], ids=["bert", "t5"])
def test_random_samples_of_encoders_need_no_index(
    root: Path, tmp_path: Path, encoder: Architecture
) -> None:
    run = read_run(make_run(root, f"synthetic-{encoder.family}"))
    run = run.model_copy(update={"architecture": encoder, "checkpoint": None})
    config, output = tmp_path / "run.yaml", tmp_path / "speed.json"
    write_run(config, laid_out(run, {"objective": encoder.objectives[0], "pack_samples": True}))
    benchmark_train(config=config, steps=2, warmup_steps=0, synthetic=True, output=output)
    assert json.loads(output.read_text())["rows_per_sample"] == 1


def test_too_few_samples_are_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"has 480 training samples, 105 steps take 840; lower"):
        benchmark_train(config=make_run(root, "short"), steps=80, warmup_steps=5)
    with pytest.raises(UserError, match="give 1 and 0 or more"):
        benchmark_train(config=make_run(root, "short"), steps=0)


@pytest.mark.ranks
@pytest.mark.grid
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"pipeline_parallel_size": 2}},
        {"backend": "deepspeed"},
    ],
)
def test_a_benchmark_on_several_ranks(root: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_run(root, "several", **changes)
    tool = (torch_python(), "-m", "tokamake", "benchmark-train", "--config", str(config))
    output = tmp_path / "speed.json"
    process = subprocess.run(
        [*torchrun(2), *tool, "--steps", "4", "--synthetic", "--output", str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("tokens/s") == 1
    check(json.loads(output.read_text()), ranks=2)


def test_find_learning_rate_suggests_a_rate(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = make_run(root, "swept"), tmp_path / "rates.json"
    before = files_in(root)
    find_learning_rate(config=config, steps=60, start=1e-5, end=10.0, output=output)
    assert files_in(root) == before
    report = json.loads(output.read_text())
    assert 1e-3 < report["suggestion"] < 1
    assert report["suggestion"] in report["rates"]
    assert len(report["losses"]) == len(report["rates"]) <= 60
    assert f"{report['suggestion']:.2e}" in capsys.readouterr().out


def test_rates_that_do_not_grow_are_refused(root: Path) -> None:
    with pytest.raises(UserError, match="give 0 < from < to"):
        find_learning_rate(config=make_run(root, "still"), start=1.0, end=0.1)
    with pytest.raises(UserError, match="--steps 9: give 10 or more"):
        find_learning_rate(config=make_run(root, "still"), steps=9)


def test_the_printed_curve_is_short() -> None:
    lines = curve([10.0**-n for n in range(100)], [1.0] * 70).splitlines()
    assert len(lines) <= 21
    assert lines[1].split() == ["1.00e+00", "1.0000"]
