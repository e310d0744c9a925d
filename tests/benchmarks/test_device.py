"""The script for whoever has an accelerator: its cases run here on a CPU, with tiny sizes."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device
from benchmarks.device import (
    CASES,
    check_memory,
    exit_status,
    outcome,
    resumed,
    table,
    two_processes,
)
from benchmarks.device_bench import LARGE, TINY, Bench, Failure, LeftOut
from tests.support import standin_kernels, standin_use
from tests.support.paths import ROOT
from tests.support.ranks import spawn

H200 = {"kind": "cuda", "name": "NVIDIA H200", "count": 1, "memory_bytes": 141e9, "torch": "torch"}


def script(*options: str, work: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "benchmarks/device.sh", "--work", work, *options],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.ranks
def test_each_case_runs_on_a_cpu(tmp_path: Path) -> None:
    done = script("--device", "cpu", "--seconds", "1500", work=tmp_path)
    found = json.loads((tmp_path / "device.json").read_text())
    verdicts = {name: each["verdict"] for name, each in found["cases"].items()}
    # Tests of the marker `gpu` need an accelerator.
    assert verdicts == {**dict.fromkeys(CASES, "passed"), "marked tests": "left out"}, done.stdout
    assert "test_batch.py: needs an accelerator" in found["cases"]["marked tests"]["shows"]
    (missing,) = found["left_out"]
    assert missing.startswith("marked tests: all tests skipped: ")
    assert missing in done.stdout
    for name in [name for name in CASES if name.startswith(("dense", "experts", "windows"))]:
        assert found["cases"][name]["tokens_per_second"] > 0
        assert found["cases"][name]["mfu"] > 0
        assert found["cases"][name]["estimated_bytes"] > 0
    assert done.returncode == 3
    assert done.stdout.endswith((tmp_path / "device.md").read_text())


def test_without_an_accelerator_one_line_says_what_is_missing(tmp_path: Path) -> None:
    done = script(work=tmp_path / "work")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("device.sh: torch ")
    assert "finds no device of CUDA or XPU; install a torch for it" in done.stderr
    assert not (tmp_path / "work").exists()


def bench(work: Path, **facts: Any) -> Bench:
    return Bench(work, {**H200, **facts}, LARGE, time.monotonic() + 60)


@pytest.mark.parametrize(("memory", "size"), [(141e9, 4), (48e9, 2), (40e9, 1)])
def test_the_largest_micro_batch_that_fits_is_measured(
    tmp_path: Path, memory: float, size: int
) -> None:
    assert device._micro_batch_size(bench(tmp_path, memory_bytes=memory), None) == size


def test_a_device_that_is_too_small_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(LeftOut, match="it needs 29 GB, the device has 24 GB"):
        device._micro_batch_size(bench(tmp_path, memory_bytes=24e9), None)


def test_memory_may_differ_from_the_estimate_by_a_tenth() -> None:
    check_memory(51.4e9, 50.6e9)
    for peak in (56e9, 45e9):
        with pytest.raises(Failure, match=r"of the estimated 50\.60 GB"):
            check_memory(peak, 50.6e9)


class Played(Bench):
    """Processes that end at once, and leave what `leaves` writes."""

    leaves: Any = None

    def call(self, *arguments: str, log: str) -> str:
        return str(type(self).leaves(self, arguments, log))


def test_a_checkpoint_with_other_bytes_fails(tmp_path: Path) -> None:
    def trained(played: Bench, arguments: tuple[str, ...], log: str) -> str:
        folder = Path(arguments[4]).parent / "training/global_step6"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__0_0.distcp").write_text(log.partition("-")[2] if other else "same")
        return ""

    class Trains(Played):
        leaves = trained

    played = Trains(tmp_path, H200, TINY, time.monotonic() + 60)
    other = False
    assert resumed(played, "resume")
    other = True
    with pytest.raises(Failure, match=r"differ: \[\'__0_0.distcp\'\]"):
        resumed(played, "resume")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ranks 0 and 1 have the same device of here", LeftOut),
        ("RuntimeError: NCCL error", Failure),
    ],
)
def test_two_processes_need_two_devices_of_cuda(
    tmp_path: Path, text: str, expected: type[Exception]
) -> None:
    def fails(played: Bench, _: tuple[str, ...], log: str) -> str:
        (played.work / f"{log}.log").write_text(text)
        raise Failure(text)

    class Fails(Played):
        leaves = fails

    with pytest.raises(expected):
        two_processes(Fails(tmp_path, H200, TINY, time.monotonic() + 60), "two")


def test_each_verdict_is_a_row_of_the_table(tmp_path: Path) -> None:
    def fails(*_: Any) -> Any:
        raise Failure("a | b")

    played = bench(tmp_path)
    results = {
        "good": outcome(played, "good", case=lambda *_: {"shows": "1 token/s", "n": 1}),
        "bad": outcome(played, "bad", case=fails),
        "late": outcome(played._replace(deadline=0.0), "late", case=fails),
    }
    assert results["good"]["n"] == 1
    head, _, *rows = table(H200, results, seconds=61.2).splitlines()
    assert head.endswith(" UTC, NVIDIA H200 (cuda), torch, 61 s")
    assert rows == [
        "| case | verdict | | s |",
        "|---|---|---|---|",
        "| good | passed | 1 token/s | 0 |",
        "| bad | failed | a   b | 0 |",
        "| late | left out | the time was over | 0 |",
        "",
        "Left out:",
        "",
        "- late: the time was over",
    ]
    assert exit_status(results) == 1
    assert exit_status({"good": results["good"], "late": results["late"]}) == 3
    assert exit_status({"good": results["good"]}) == 0
    assert table(H200, {"good": results["good"]}, seconds=1).endswith("\nNothing was left out.\n")


@pytest.mark.parametrize(
    ("summary", "left"),
    [
        ("12 passed in 3.00s\n", []),
        (
            "SKIPPED [4] tests/parallel/test_attention.py: torch has no flash attention on xpu\n"
            "SKIPPED [1] tests/parallel/test_loss.py:84: no compiler: triton\n"
            "7 passed, 5 skipped in 3.00s\n",
            [
                "4 of tests/parallel/test_attention.py: torch has no flash attention on xpu",
                "1 of tests/parallel/test_loss.py: no compiler: triton",
            ],
        ),
        ("SKIPPED [9] tests/a.py: needs it\n9 skipped in 1.00s\n", None),
    ],
)
def test_tests_that_skip_are_named(tmp_path: Path, summary: str, left: list[str] | None) -> None:
    asked = []

    def tested(_: Bench, arguments: tuple[str, ...], __: str) -> str:
        asked.append(arguments)
        return summary

    class Tests(Played):
        leaves = tested

    played = Tests(tmp_path, {**H200, "kind": "xpu"}, TINY, time.monotonic() + 60)
    found = outcome(played, "marked tests", case=device.marked_tests)
    assert {Path(each).name for each in asked[0] if each.endswith(".py")} == {
        *("test_attention.py", "test_batch.py", "test_context.py", "test_device_types.py"),
        *("test_loss.py", "test_trainer_gpu.py"),
    }
    results = {"marked tests": found}
    if left is None:
        assert found["verdict"] == "left out"
        assert device.left_out(results) == [
            "marked tests: all tests skipped: 9 of tests/a.py: needs it"
        ]
        return
    assert found["verdict"] == "passed"
    assert device.left_out(results) == [f"marked tests: {each}" for each in left]
    assert exit_status(results) == (3 if left else 0)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("dense")])
@pytest.mark.parametrize(("share", "verdict"), [(1.05, "passed"), (1.2, "failed"), (0.8, "failed")])
def test_memory_of_each_case_is_held_against_its_estimate(
    tmp_path: Path, name: str, share: float, verdict: str
) -> None:
    """Also of compiled layers, on any accelerator."""

    def measured(played: Bench, arguments: tuple[str, ...], _: str) -> str:
        peak = share * device.estimated_bytes(Path(arguments[4]), played.kind)
        speeds = {"tokens_per_second": 1.0, "model_tflops_per_rank": 1.0, "mfu": 0.5}
        output = Path(arguments[arguments.index("--output") + 1])
        output.write_text(json.dumps({**speeds, "peak_memory_bytes": peak}))
        return ""

    class Measures(Played):
        leaves = measured

    played = Measures(tmp_path, {**H200, "kind": "xpu"}, TINY, time.monotonic() + 60)
    assert outcome(played, "case", case=CASES[name])["verdict"] == verdict


def found_standin() -> Any:
    standin_use.use()
    return device.find_device(None)


def test_an_accelerator_of_any_type_is_found() -> None:
    (found,) = spawn(found_standin, 1)
    assert found["kind"] == found["name"] == standin_kernels.NAME
    assert found["memory_bytes"] == 2**34
