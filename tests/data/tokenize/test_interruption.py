"""Whatever ends `tokenize` at whatever instant, nothing looks finished that is not.

Run again, it gives the bytes of a run that nothing disturbed.
"""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import SUPPORT
from tokamake.data.indexed.manifest import find_fault
from tokamake.data.indexed.paths import manifest_path
from tokamake.data.tokenize.tokenize import tokenize

FAULTY = SUPPORT / "faulty.py"


@pytest.fixture
def undisturbed(workspace: Path) -> dict[str, bytes]:
    """Content of a pair, and of its quarantine, that nothing disturbed."""
    with (workspace / "raw/docs/docs-00.jsonl").open("a") as stream:
        stream.write("not JSON\n")
    make(workspace, workspace / "calm")
    return content(workspace / "calm")


def make(workspace: Path, output: Path) -> None:
    tokenize(
        (str(workspace / "raw/docs/docs-00.jsonl"),),
        output=output,
        tokenizer=workspace / "tokenizer",
        on_bad_document="quarantine",
        workers=1,
    )


def command(workspace: Path, when: str) -> list[str]:
    return [
        sys.executable, str(FAULTY), when, "tokenize", str(workspace / "raw/docs/docs-00.jsonl"),
        "--output", str(workspace / "out/pair"), "--tokenizer", str(workspace / "tokenizer"),
        "--on-bad-document", "quarantine", "--workers", "1",
    ]  # fmt: skip


def content(prefix: Path) -> dict[str, bytes]:
    """What a pair consists of, less what may differ from run to run."""
    found = {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in prefix.parent.iterdir()
        if path.name.startswith(f"{prefix.name}.")
    }
    manifest = json.loads(found[".json"])
    for key in ("seconds", "digest"):
        del manifest[key]
    return {**found, ".json": json.dumps(manifest).encode()}


def assert_nothing_false(prefix: Path, whole: dict[str, bytes]) -> None:
    """A pair that says of itself that it is whole, is."""
    if manifest_path(prefix).exists():
        assert find_fault(prefix) is None
        assert content(prefix) == whole
    else:
        assert find_fault(prefix) is not None


def assert_made_again(workspace: Path, whole: dict[str, bytes]) -> None:
    make(workspace, workspace / "out/pair")
    assert content(workspace / "out/pair") == whole
    assert len(list((workspace / "out").iterdir())) == len(whole)  # no temporary file is left


@pytest.mark.parametrize("before", ["nothing", "an older pair"])
@pytest.mark.slow
def test_killed_at_each_step_of_bringing_files_to_disk(
    workspace: Path, undisturbed: dict[str, bytes], before: str
) -> None:
    older = workspace / "raw/code/code-00.jsonl"
    ended = []
    for step in range(1, 40):
        if before == "an older pair":  # of other documents: its manifest must not vouch for these
            tokenize(
                (str(older),), output=workspace / "out/pair", tokenizer=workspace / "tokenizer"
            )
            old = content(workspace / "out/pair")
        done = subprocess.run(command(workspace, str(step)), capture_output=True, check=False)
        ended.append(done.returncode)
        if manifest_path(workspace / "out/pair").exists():
            assert find_fault(workspace / "out/pair") is None
            expected = [undisturbed] if before == "nothing" else [undisturbed, old]
            assert content(workspace / "out/pair") in expected
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert ended[-1] == 0
    assert len(ended) > 10
    assert_made_again(workspace, undisturbed)


@pytest.mark.slow
def test_pairs_of_several_keys_vouch_for_themselves(workspace: Path) -> None:
    keys = ["--text-key", "text", "--text-key", "src"]
    for append_eod in ("--append-eod", "--no-append-eod"):
        for step in range(1, 40):
            arguments = [*command(workspace, str(step))[:5], *keys, append_eod]
            given = ["--output", str(workspace / "out/pair"), "--tokenizer"]
            arguments += [*given, str(workspace / "tokenizer"), "--workers", "1"]
            done = subprocess.run(arguments, capture_output=True, check=False)
            for key in ("text", "src"):
                prefix = workspace / f"out/pair_{key}"
                if manifest_path(prefix).exists():
                    assert find_fault(prefix) is None
            if done.returncode == 0:
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.returncode == 0
        assert step > 10


@pytest.mark.slow
def test_ended_at_random_instants(workspace: Path, undisturbed: dict[str, bytes]) -> None:
    random_numbers = random.Random(7)
    for _ in range(12):
        when = f"{random_numbers.uniform(0.05, 1.2):.3f}"
        done = subprocess.run(command(workspace, when), capture_output=True, check=False)
        assert done.returncode in (0, -signal.SIGALRM), done.stderr
        assert_nothing_false(workspace / "out/pair", undisturbed)
    assert_made_again(workspace, undisturbed)


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_errors_of_the_disk(
    workspace: Path,
    undisturbed: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    real = getattr(os, call)
    for step in range(1, 20):
        left = [step]

        def failing(*arguments: object, left: list[int] = left, **options: object) -> object:
            left[0] -= 1
            if not left[0]:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        monkeypatch.setattr(os, call, failing)
        met = None
        try:
            make(workspace, workspace / "out/pair")
        except OSError as error:
            met = error.errno
        monkeypatch.setattr(os, call, real)
        assert met == (None if left[0] > 0 else code)
        if met is None:
            break
        assert_nothing_false(workspace / "out/pair", undisturbed)
    assert step > 2
    assert_made_again(workspace, undisturbed)


def test_a_full_disk(workspace: Path, undisturbed: dict[str, bytes]) -> None:
    """The system itself refuses to write beyond a size, as it does on a full disk."""
    largest = max(map(len, undisturbed.values()))
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
    assert_made_again(workspace, undisturbed)
