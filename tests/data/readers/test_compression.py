"""Readers return all members of compressed files, and refuse damaged and truncated files."""

import lzma
import random
import zlib
from pathlib import Path

import orjson
import pytest

from tests.support.readings import LINES, PACK, TEXTS, read
from tokamake.data.readers import _compression, open_input
from tokamake.errors import UserError


def test_a_file_of_thousands_of_members_is_read(tmp_path: Path) -> None:
    lines = [b'{"text": "%d"}\n' % number for number in range(3000)]
    for name, pack in PACK.items():
        path = tmp_path / f"many.{name}"
        path.write_bytes(b"".join(map(pack, lines)))
        assert read(path) == [str(number) for number in range(3000)]


@pytest.mark.parametrize("name", PACK)
def test_truncated_files_are_refused(tmp_path: Path, name: str) -> None:
    rng = random.Random(1)
    lines = [orjson.dumps({"text": rng.randbytes(20).hex()}) + b"\n" for _ in range(40)]
    members = [PACK[name](b"".join(lines[:20])), PACK[name](b"".join(lines[20:]))]
    content = b"".join(members)
    size = len(content)
    path = tmp_path / f"a.{name}"
    member_end = [len(members[0]) + offset for offset in range(-12, 13)]
    for cut in sorted(
        {*range(1, 40), *range(40, size - 12, 7), *member_end, *range(size - 12, size)}
    ):
        path.write_bytes(content[:cut])
        if cut == len(members[0]):  # the loss of a complete member cannot be detected
            assert len(read(path)) == 20
            continue
        if cut < 6 and _compression.compression(content[:cut]) == "":
            with pytest.raises(UserError):  # too short to detect the compression
                open_input(path)
            continue
        with pytest.raises(UserError, match=rf"a\.{name}: {name} data is .* fetch it again"):
            read(path)


@pytest.mark.parametrize("name", PACK)
def test_changed_bits_never_change_the_documents(tmp_path: Path, name: str) -> None:
    rng = random.Random(2)
    texts = [rng.randbytes(20).hex() for _ in range(40)]
    content = PACK[name](b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    path = tmp_path / f"a.{name}"
    num_errors = 0
    positions = range(12, len(content), 3)
    for position in positions:
        changed = bytearray(content)
        changed[position] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            assert read(path) == texts  # some bits of headers have no effect
        except UserError:
            num_errors += 1
    assert num_errors > 0.95 * len(positions)


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize(
    "garbage", [b"x", b"garbage after the end", b"\0\0\0", bytes(5) + b"x", b"\n", LINES]
)
def test_trailing_garbage_is_refused(tmp_path: Path, name: str, garbage: bytes) -> None:
    path = tmp_path / f"a.{name}"
    path.write_bytes(PACK[name](LINES) + garbage)
    if name == "gz" and not garbage.strip(b"\0"):
        assert read(path) == TEXTS
        return
    with pytest.raises(UserError, match=rf"a\.{name}: {name} data .*"):
        read(path)


@pytest.mark.parametrize("name", PACK)
def test_blocks_stay_small_at_any_compression_ratio(tmp_path: Path, name: str) -> None:
    packed = PACK[name](b"x" * 10_000_000) * 10
    largest = 0
    for block in _compression.unpack([packed], name, path=tmp_path, block_bytes=1 << 20):
        largest = max(largest, len(block))
    assert largest <= 2 << 20


def test_lzma_files_are_read(tmp_path: Path) -> None:
    content = lzma.compress(LINES, format=lzma.FORMAT_ALONE)
    (tmp_path / "a.jsonl.lzma").write_bytes(content)
    assert read(tmp_path / "a.jsonl.lzma") == TEXTS
    for other in (content[:-1], content + b"rest"):
        (tmp_path / "a.jsonl.lzma").write_bytes(other)
        with pytest.raises(UserError, match=r"a\.jsonl\.lzma: lzma data .* fetch it again"):
            read(tmp_path / "a.jsonl.lzma")


@pytest.mark.parametrize("format", [lzma.FORMAT_XZ, lzma.FORMAT_ALONE])
def test_a_dictionary_of_gigabytes_is_refused(tmp_path: Path, format: int) -> None:
    kind = lzma.FILTER_LZMA2 if format == lzma.FORMAT_XZ else lzma.FILTER_LZMA1
    filters = [{"id": kind, "preset": 0, "dict_size": 1 << 20}]
    content = bytearray(lzma.compress(LINES, format=format, filters=filters))
    if format == lzma.FORMAT_ALONE:
        content[1:5] = (3 << 29).to_bytes(4, "little")
    else:  # the properties of LZMA2 and the checksum of the header
        start = content.index(b"\x21\x01") + 2
        content[start] = 39  # 3 GB
        end = 12 + 4 * (content[12] + 1) - 4
        content[end : end + 4] = zlib.crc32(content[12:end]).to_bytes(4, "little")
    (tmp_path / "a.jsonl.xz").write_bytes(content)
    with pytest.raises(UserError, match=r"need too much memory for a dictionary or window"):
        read(tmp_path / "a.jsonl.xz")
