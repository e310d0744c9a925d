"""DeepSpeed's launcher starts the same command as torchrun and mpiexec (`test_train.py`) do."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import launch, losses, make_run, prepare, summary, weights

from tokamake import cli, files
from tokamake.config import read_run

MODULE = ("--module", "tokamake")
ROOT = Path(__file__).parent.parent


@pytest.mark.ranks
def test_deepspeed_starts_the_same_run_as_torchrun(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    found, expected = (
        make_run(root, name, backend="deepspeed", zero_stage=2)
        for name in ("deepspeed", "torchrun")
    )
    printed = launch(found, ranks=2, launcher="deepspeed", program=MODULE)
    assert printed.count("layout    2 ranks = data 2 on cpu, fp32, deepspeed, ZeRO stage 2") == 1
    launch(expected, ranks=2)
    assert summary(found)["world_size"] == 2
    for key in ("loss", "grad_norm", "validation_loss"):
        assert losses(found, key) == losses(expected, key)
    assert hashes(found) == hashes(expected)
    assert weights(found)


def hashes(config: Path) -> dict[str, str]:
    folder = read_run(config).output / "global_step6"
    return {path.name: files.sha256(path) for path in folder.glob("*.distcp")}


@pytest.mark.parametrize("given", ["--local_rank=1", "--local-rank=0"])
def test_a_launchers_number_is_no_option(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tokamake", given, "train", "--config", "none.yaml"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == cli.EXIT_USER_ERROR
    assert "tokamake train: none.yaml: no such file" in capsys.readouterr().err


RANK = """
import os, signal, sys
# Waited for, not handled: a signal between `ready` and the waiting would never wake it.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.write(1, b"ready\\n")  # in one piece, unlike print's where nothing is buffered
signal.sigwait({signal.SIGTERM})
os.write(1, b"saved\\n")
sys.exit(75)
"""


@pytest.mark.ranks
def test_the_local_launcher_passes_sigterm_on_without_a_trace() -> None:
    launcher = [sys.executable, str(ROOT / "profiles/local/ranks.py"), "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", "--no-python", sys.executable, "-c", RANK]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert out == "saved\n" * 2
    assert "Traceback" not in err
    assert process.returncode == 128 + signal.SIGTERM
