"""A checkpoint that is being written."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from tokamake.errors import UserError
from tokamake.train.step_result import Saving


def test_a_checkpoint_is_done_when_its_files_are_written() -> None:
    written: Future[Any] = Future()
    saving = Saving(Path("global_step1"), written)
    assert not saving.done
    written.set_result(None)
    assert saving.done
    saving.wait()


def test_a_checkpoint_that_could_not_be_written_says_why() -> None:
    written: Future[Any] = Future()
    saving = Saving(Path("global_step1"), written)
    failures = {
        rank: (OSError(28, f"no space on {disk}\nat write"), None)
        for rank, disk in ((0, "b"), (1, "a"), (2, "a"))
    }
    written.set_exception(CheckpointException("save", failures))  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        saving.wait()
    assert str(caught.value) == (
        "global_step1: could not be written ([Errno 28] no space on a; [Errno 28] no space on b); "
        "make room or fix the disk, and rerun: the checkpoint before it is complete"
    )
