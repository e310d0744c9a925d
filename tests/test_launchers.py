"""DeepSpeed's launcher starts the same command as torchrun and mpiexec (`test_train.py`) do."""

from pathlib import Path

import pytest
from runs import launch, losses, make_run, prepare, summary, weights

from tokamake import cli, files
from tokamake.config import read_run

MODULE = ("--module", "tokamake")


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
