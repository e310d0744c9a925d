"""`kernel_copy` copies all bytes with the first method that works."""

import ctypes
import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.megatron_datasets import assert_same_dataset, megatron_merge
from tokamake.data.indexed import kernel_copy, merged_dataset
from tokamake.data.indexed.merge import merge


@pytest.mark.parametrize(
    ("num_unsupported", "error_number"),
    [
        *((1, number) for number in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, 0)),
        *((0, 0), (2, errno.EXDEV), (2, 0)),
    ],
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
            patch.setattr(kernel_copy, "BLOCK", 4096)
            target.write(b"head")
            descriptors = source.fileno(), target.fileno()
            assert sum(kernel_copy.copy(*descriptors, 100_000)) == 100_000
            with pytest.raises(EOFError):
                list(kernel_copy.copy(*descriptors, 2))
        assert (tmp_path / "target").read_bytes() == b"head" + content


class Extent(ctypes.Structure):
    """struct fiemap_extent of linux/fiemap.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("logical", "physical", "length")),
        *(("reserved64", ctypes.c_uint64 * 2), ("flags", ctypes.c_uint32)),
        ("reserved", ctypes.c_uint32 * 3),
    )


class Request(ctypes.Structure):
    """struct fiemap of linux/fiemap.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start", "length")),
        *((name, ctypes.c_uint32) for name in ("flags", "found", "room", "reserved")),
    )


def test_shared_blocks_of_many_extents_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists some extents at once; each third is shared."""
    shared, last, size, number = 0x2000, 0x1, 8192, 2000

    def list_extents(_: int, code: int, buffer: bytearray) -> int:
        # _IOWR('f', 11, struct fiemap)
        assert code == 3 << 30 | ctypes.sizeof(Request) << 16 | ord("f") << 8 | 11
        request = Request.from_buffer(buffer)
        first = request.start // size
        request.found = min(request.room, number - first)
        room = (Extent * request.room).from_buffer(buffer, ctypes.sizeof(Request))
        for place, index in enumerate(range(first, first + request.found)):
            room[place].logical, room[place].length = index * size, size
            room[place].flags = (shared if index % 3 == 0 else 0) | (last * (index == number - 1))
        return 0

    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(fcntl, "ioctl", list_extents)
    assert kernel_copy.shared_bytes(tmp_path / "file") == len(range(0, number, 3)) * size


def test_merge_says_how_much_of_the_disk_is_shared(
    tmp_path: Path,
    others: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(merged_dataset, "shared_bytes", lambda _: 2_000_000)
    merge(others, output=tmp_path / "merged")
    assert "; 2.0 MB share the disk blocks of the inputs\n" in capsys.readouterr().out


def test_a_file_system_without_shared_blocks_has_none(
    tmp_path: Path, others: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernel_copy.shared_bytes(Path("/proc/self/status")) == 0
    merge(others, output=tmp_path / "merged")
    printed = capsys.readouterr().out
    assert ("share the disk blocks" in printed) == bool(
        kernel_copy.shared_bytes(tmp_path / "merged.bin")
    )
