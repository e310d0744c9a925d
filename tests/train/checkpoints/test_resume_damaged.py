"""A damaged checkpoint is noticed while it is loaded; training continues from the one before."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.forked import train
from tests.support.grids import params
from tests.support.runs import make_run
from tokamake import files
from tokamake.config.resolved_run import read_run

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"zero_stage": 3},
    "tensor": {"parallel": {"tensor_parallel_size": 2}},
    "pipeline": {"parallel": {"pipeline_parallel_size": 2}},
    "deepspeed-2": {"backend": "deepspeed", "zero_stage": 2},
    "deepspeed-3": {"backend": "deepspeed", "zero_stage": 3},
}


def zeroed(folder: Path) -> None:
    """Zero some bytes of the largest tensor; size and time of the file stay."""
    largest = max(records(folder), key=lambda each: each.length)
    file = folder / largest.relative_path
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.seek(largest.offset + largest.length // 2)
        stream.write(bytes(64))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def records(folder: Path) -> list[Any]:
    """DCP's own records of where tensors are."""
    return [*dcp.FileSystemReader(folder).read_metadata().storage_data.values()]


def truncated(folder: Path) -> None:
    file = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def without_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def without_description(folder: Path) -> None:
    (folder / "tokamake.json").write_text("{")


def hashes(folder: Path) -> dict[str, str]:
    digests = {path.name: files.sha256(path) for path in folder.glob("*.distcp")}
    assert digests
    return digests


@pytest.fixture(scope="module")
def finished(root: Path) -> tuple[Path, Path]:
    """A finished run of 6 steps, and a copy of its output folder."""
    config = make_run(root, "finished")
    train(config)
    return config, Path(shutil.copytree(read_run(config).output, root / "copy"))


@pytest.fixture
def config(finished: tuple[Path, Path]) -> Path:
    """The finished run, as if no test had damaged it."""
    config, copy = finished
    shutil.rmtree(output := read_run(config).output)
    shutil.copytree(copy, output)
    return config


def interrupted(config: Path) -> tuple[Path, dict[str, str]]:
    """Turn a finished run of 6 steps into one that was stopped at step 4.

    Returns:
        Its output folder, and the hashes of its last checkpoint.
    """
    output = read_run(config).output
    expected = hashes(output / "global_step6")
    shutil.rmtree(output / "global_step6")
    (output / "train.json").unlink(missing_ok=True)
    (output / "latest").write_text("global_step4")
    return output, expected


@pytest.mark.fault("damaged checkpoint")
@pytest.mark.parametrize("damage", [zeroed, truncated, without_metadata, without_description])
def test_training_goes_on_from_the_checkpoint_before(
    damage: Callable[[Path], None], config: Path
) -> None:
    output, expected = interrupted(config)
    damage(output / "global_step4")
    printed = train(config)
    (line,) = (line for line in printed.splitlines() if "going back to" in line)
    assert f"{output / 'global_step4'}" in line
    assert line.endswith(f"going back to {output / 'global_step2'}")
    assert "continuing at step 2" in printed
    assert hashes(output / "global_step6") == expected
    assert not (output / "global_step4.old").exists()


@pytest.mark.fault("damaged checkpoint")
@pytest.mark.ranks
@pytest.mark.parametrize("layout", params(LAYOUTS, ["tensor"]))
def test_all_ranks_go_back_together(layout: str, root: Path) -> None:
    config = make_run(root, layout, **LAYOUTS[layout])
    train(config, ranks=2)
    output, expected = interrupted(config)
    zeroed(output / "global_step4")  # in a file that not all ranks read
    printed = train(config, ranks=2)
    assert printed.count(f"going back to {output / 'global_step2'}") == 1
    assert "the checksum of" in printed
    assert hashes(output / "global_step6") == expected


@pytest.mark.fault("damaged checkpoint")
def test_a_run_without_a_whole_checkpoint_is_refused(config: Path) -> None:
    output, _ = interrupted(config)
    zeroed(output / "global_step4")
    zeroed(output / "global_step2")
    printed = train(config, code=2)
    assert f"{output / 'global_step4'}: damaged" in printed.splitlines()[-1]
    assert f"{output} has no whole checkpoint before it: restore one" in printed
    assert "Traceback" not in printed
    assert (output / "latest").read_text() == "global_step4"


@pytest.mark.fault("damaged checkpoint")
def test_a_damaged_start_is_refused(root: Path) -> None:
    start = Path(shutil.copytree(root / "start", root / "damaged"))
    zeroed(start / "global_step0")
    config = make_run(root, "from damaged", start=start)
    assert "the checksum of" in train(config, code=2)
