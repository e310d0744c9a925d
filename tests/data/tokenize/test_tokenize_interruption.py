"""If `tokenize` is killed at any instant, no incomplete dataset looks complete.

A rerun gives the bytes of an uninterrupted run.
"""

import errno
import json
import os
import random
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.faults import Inject
from tests.support.paths import SUPPORT
from tests.support.programs import torch_python
from tests.support.tokenized import QUARANTINE, tokenized
from tokamake.data.indexed.manifest import find_fault
from tokamake.data.indexed.paths import manifest_path

FAULTY = SUPPORT / "faulty.py"


@pytest.fixture
def expected(workspace: Path) -> dict[str, bytes]:
    """Content of a dataset and its quarantine from an uninterrupted run."""
    with (workspace / "raw/docs/docs-00.jsonl").open("a") as stream:
        stream.write("not JSON\n")
    make(workspace, workspace / "expected")
    return content(workspace / "expected")


def make(workspace: Path, output: Path) -> None:
    tokenized(workspace, "raw/docs/docs-00.jsonl", name=output, **QUARANTINE, workers=1)


def command(workspace: Path, when: str) -> list[str]:
    return [
        torch_python(), str(FAULTY), when, "tokenize", str(workspace / "raw/docs/docs-00.jsonl"),
        "--output", str(workspace / "out/pair"), "--tokenizer", str(workspace / "tokenizer"),
        "--on-bad-document", "quarantine", "--max-bad-fraction", "1", "--workers", "1",
    ]  # fmt: skip


def content(prefix: Path) -> dict[str, bytes]:
    """Return the files of a dataset, without what may differ from run to run."""
    files = {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in prefix.parent.iterdir()
        if path.name.startswith(f"{prefix.name}.")
    }
    manifest = json.loads(files[".json"])
    for key in ("seconds", "digest"):
        del manifest[key]
    return {**files, ".json": json.dumps(manifest).encode()}


def assert_manifest_is_true(prefix: Path, expected: dict[str, bytes]) -> None:
    """Check that a dataset with a manifest is complete."""
    if manifest_path(prefix).exists():
        assert find_fault(prefix) is None
        assert content(prefix) == expected
    else:
        assert find_fault(prefix) is not None


def assert_rerun_completes(workspace: Path, expected: dict[str, bytes]) -> None:
    make(workspace, workspace / "out/pair")
    assert content(workspace / "out/pair") == expected
    assert len(list((workspace / "out").iterdir())) == len(expected)  # no temporary file is left


@pytest.mark.fault("kill of a stage")
@pytest.mark.parametrize("existing", ["nothing", "an older dataset"])
@pytest.mark.grid
@pytest.mark.slow
def test_a_kill_at_any_file_operation_leaves_no_false_manifest(
    workspace: Path, expected: dict[str, bytes], existing: str, inject: Inject
) -> None:
    older = workspace / "raw/code/code-00.jsonl"
    return_codes = []
    for step in range(1, 40):
        if existing == "an older dataset":  # its manifest must not vouch for the new files
            tokenized(workspace, older, name="out/pair")
            old = content(workspace / "out/pair")
        inject()
        process = subprocess.run(command(workspace, str(step)), capture_output=True, check=False)
        return_codes.append(process.returncode)
        if manifest_path(workspace / "out/pair").exists():
            assert find_fault(workspace / "out/pair") is None
            allowed = [expected] if existing == "nothing" else [expected, old]
            assert content(workspace / "out/pair") in allowed
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, process.stderr
    assert return_codes[-1] == 0
    assert len(return_codes) > 10
    assert_rerun_completes(workspace, expected)


@pytest.mark.fault("kill of a stage")
@pytest.mark.grid
@pytest.mark.slow
def test_each_manifest_of_several_keys_is_true_after_a_kill(
    workspace: Path, inject: Inject
) -> None:
    keys = ["--text-key", "text", "--text-key", "src"]
    for append_eod in ("--append-eod", "--no-append-eod"):
        for step in range(1, 40):
            arguments = [*command(workspace, str(step))[:5], *keys, append_eod]
            paths = ["--output", str(workspace / "out/pair"), "--tokenizer"]
            arguments += [*paths, str(workspace / "tokenizer"), "--workers", "1"]
            inject()
            process = subprocess.run(arguments, capture_output=True, check=False)
            for key in ("text", "src"):
                prefix = workspace / f"out/pair_{key}"
                if manifest_path(prefix).exists():
                    assert find_fault(prefix) is None
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, process.stderr
        assert process.returncode == 0
        assert step > 10


@pytest.mark.fault("kill of a stage")
@pytest.mark.slow
def test_a_kill_at_a_random_instant_leaves_no_false_manifest(
    workspace: Path, expected: dict[str, bytes], inject: Inject
) -> None:
    random_numbers, codes = random.Random(7), []
    for _ in range(12):
        when = f"{random_numbers.uniform(0.01, 0.4):.3f}"
        inject()
        process = subprocess.run(command(workspace, when), capture_output=True, check=False)
        codes.append(process.returncode)
        assert codes[-1] in (0, -signal.SIGALRM), process.stderr
        assert_manifest_is_true(workspace / "out/pair", expected)
    assert -signal.SIGALRM in codes
    assert_rerun_completes(workspace, expected)


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_error_leaves_no_false_manifest(
    workspace: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    inject: Inject,
) -> None:
    real = getattr(os, call)
    for step in range(1, 20):
        num_left = [step]

        def failing(
            *arguments: object, num_left: list[int] = num_left, **options: object
        ) -> object:
            num_left[0] -= 1
            if not num_left[0]:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        monkeypatch.setattr(os, call, failing)
        raised = None
        inject()
        try:
            make(workspace, workspace / "out/pair")
        except OSError as error:
            raised = error.errno
        monkeypatch.setattr(os, call, real)
        assert raised == (None if num_left[0] > 0 else code)
        if raised is None:
            break
        assert_manifest_is_true(workspace / "out/pair", expected)
    assert step > 2
    assert_rerun_completes(workspace, expected)


@pytest.mark.fault("full disk")
def test_a_full_disk_leaves_no_file(workspace: Path, expected: dict[str, bytes]) -> None:
    """The system refuses to write files beyond a size, as on a full disk."""
    largest = max(map(len, expected.values()))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (1, 100, 300, 1000, largest // 2, largest - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with pytest.raises(OSError, match="File too large"):
                make(workspace, workspace / "out/pair")
            assert not list((workspace / "out").iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert_rerun_completes(workspace, expected)
