"""Arrays of many datasets in one file."""

from pathlib import Path

import numpy as np
import pytest

from tokamake.data.samples.array_file import NAME, ArrayFile, write_arrays
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.errors import UserError

INDEXES = [
    DatasetIndex(
        np.arange(5, dtype=np.int32),
        np.arange(8, dtype=dtype).reshape(4, 2) + 2**16,
        np.array([2, 0, 1], np.uint32),
    )
    for dtype in (np.int32, np.int64)
] + [DatasetIndex(np.zeros(0, np.int32), np.zeros((0, 2), np.int32), np.zeros(0, np.uint32))]


def write(folder: Path) -> list[dict[str, list[object]]]:
    with (folder / NAME).open("wb") as stream:
        return [write_arrays(stream, index) for index in INDEXES]


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    locations = write(tmp_path)
    arrays = ArrayFile(tmp_path)
    for index, places in zip(INDEXES, locations, strict=True):
        for name, array in arrays.index(places, DatasetIndex)._asdict().items():
            expected = getattr(index, name)
            assert (array == expected).all()
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)


def test_arrays_begin_at_cache_lines_and_are_little_endian(tmp_path: Path) -> None:
    big = DatasetIndex(*(array.astype(array.dtype.newbyteorder(">")) for array in INDEXES[0]))
    with (tmp_path / NAME).open("wb") as stream:
        stream.write(b"x")
        places = write_arrays(stream, big)
    assert [place[0] for place in places.values()] == [64, 128, 192]
    assert [place[1] for place in places.values()] == ["<i4", "<i4", "<u4"]
    content = (tmp_path / NAME).read_bytes()
    assert content[64:84] == INDEXES[0].document.astype("<i4").tobytes()


def test_a_missing_or_truncated_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"arrays\.bin: no such file; run `tokamake index` again"):
        ArrayFile(tmp_path)
    locations = write(tmp_path)[:2]
    size = (tmp_path / NAME).stat().st_size
    with (tmp_path / NAME).open("r+b") as stream:
        stream.truncate(size - 100)
    arrays = ArrayFile(tmp_path)
    assert arrays.index(locations[0], DatasetIndex)
    with pytest.raises(UserError, match=r"damaged \(ends before byte \d+\); run `tokamake index`"):
        arrays.index(locations[1], DatasetIndex)
