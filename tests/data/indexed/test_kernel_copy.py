"""Bytes are copied by the best way that works, all of them."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.megatron_datasets import assert_same_pair, megatron_merge
from tokamake.data.indexed import kernel_copy
from tokamake.data.indexed.merge import merge


@pytest.mark.parametrize("working", range(3))
@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, 0])
def test_where_the_kernel_cannot_copy_the_next_way_is_taken(
    tmp_path: Path,
    others: list[Path],
    working: int,
    refusal: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> int:
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    methods = (*[refuse] * working, *kernel_copy.METHODS[working:])
    monkeypatch.setattr(kernel_copy, "METHODS", methods)
    merge(others, output=tmp_path / "ours")
    assert_same_pair(tmp_path / "ours", megatron_merge(others, tmp_path / "theirs", np.uint16))


def test_the_kernel_copies_in_blocks_and_tells_of_a_short_file(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(100_001)
    (tmp_path / "source").write_bytes(content)
    for method in kernel_copy.METHODS:
        with (
            open(tmp_path / "source", "rb", 0) as source,
            open(tmp_path / "target", "wb", 0) as target,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(kernel_copy, "METHODS", (method,))
            target.write(b"head")
            files = source.fileno(), target.fileno()
            assert sum(kernel_copy.copy(*files, 100_000, block=4096)) == 100_000
            with pytest.raises(EOFError):
                list(kernel_copy.copy(*files, 2))
        assert (tmp_path / "target").read_bytes() == b"head" + content
