"""`kernel_copy` copies all bytes with the first method that works."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.megatron_datasets import assert_same_dataset, megatron_merge
from tokamake.data.indexed import kernel_copy
from tokamake.data.indexed.merge import merge


@pytest.mark.parametrize("num_unsupported", range(3))
@pytest.mark.parametrize(
    "error_number", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, 0]
)
def test_falls_back_to_the_next_method(
    tmp_path: Path,
    others: list[Path],
    num_unsupported: int,
    error_number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> int:
        if error_number:
            raise OSError(error_number, os.strerror(error_number))
        return 0  # some file systems report an unsupported call this way

    methods = (*[refuse] * num_unsupported, *kernel_copy.METHODS[num_unsupported:])
    monkeypatch.setattr(kernel_copy, "METHODS", methods)
    merge(others, output=tmp_path / "merged")
    assert_same_dataset(
        tmp_path / "merged", megatron_merge(others, tmp_path / "megatron", np.uint16)
    )


def test_each_method_copies_in_blocks_and_reports_a_short_file(tmp_path: Path) -> None:
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
            descriptors = source.fileno(), target.fileno()
            assert sum(kernel_copy.copy(*descriptors, 100_000, block=4096)) == 100_000
            with pytest.raises(EOFError):
                list(kernel_copy.copy(*descriptors, 2))
        assert (tmp_path / "target").read_bytes() == b"head" + content
