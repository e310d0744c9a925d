"""The script for whoever has an accelerator: its cases run here on a CPU, with tiny sizes."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device
from benchmarks.device import CASES, check_memory, outcome, resumed, table, two_processes
from benchmarks.device_bench import LARGE, TINY, Bench, Failure, LeftOut
from tests.support.paths import ROOT

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
    # Tests of the marker `gpu` need a GPU.
    assert verdicts == {**dict.fromkeys(CASES, "passed"), "marked tests": "left out"}, done.stdout
    assert "skipped: they need CUDA" in found["cases"]["marked tests"]["shows"]
    for name in [name for name in CASES if name.startswith(("dense", "experts", "windows"))]:
        assert found["cases"][name]["tokens_per_second"] > 0
        assert found["cases"][name]["mfu"] > 0
        assert found["cases"][name]["estimated_bytes"] > 0
    assert done.returncode == 0
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
    ]
