"""Compressed files give all their members; what is damaged or cut off never passes."""

import random
from pathlib import Path

import orjson
import pytest

from tests.support.readings import LINES, PACK, TEXTS, read
from tokamake.data.readers import _compression, open_input
from tokamake.errors import UserError


def test_members_without_number(tmp_path: Path) -> None:
    lines = [b'{"text": "%d"}\n' % number for number in range(3000)]
    for name, pack in PACK.items():
        path = tmp_path / f"many.{name}"
        path.write_bytes(b"".join(map(pack, lines)))
        assert read(path) == [str(number) for number in range(3000)]


@pytest.mark.parametrize("name", PACK)
def test_cut_compressed_files_never_pass(tmp_path: Path, name: str) -> None:
    seeded = random.Random(1)
    lines = [orjson.dumps({"text": seeded.randbytes(20).hex()}) + b"\n" for _ in range(40)]
    parts = [PACK[name](b"".join(lines[:20])), PACK[name](b"".join(lines[20:]))]
    whole = b"".join(parts)
    path = tmp_path / f"a.{name}"
    ends = [len(parts[0]) + near for near in range(-12, 13)]
    for cut in sorted(
        {*range(1, 40), *range(40, len(whole) - 12, 7), *ends, *range(len(whole) - 12, len(whole))}
    ):
        path.write_bytes(whole[:cut])
        if cut == len(parts[0]):  # nobody can see that a whole member is gone
            assert len(read(path)) == 20
            continue
        if cut < 6 and _compression.compression(whole[:cut]) == "":
            with pytest.raises(UserError):  # not even its kind can be told
                open_input(path)
            continue
        with pytest.raises(UserError, match=rf"a\.{name}: {name} data is .* fetch it again"):
            read(path)


@pytest.mark.parametrize("name", PACK)
def test_changed_bytes_never_pass(tmp_path: Path, name: str) -> None:
    seeded = random.Random(2)
    texts = [seeded.randbytes(20).hex() for _ in range(40)]
    whole = PACK[name](b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    path = tmp_path / f"a.{name}"
    caught = 0
    positions = range(12, len(whole), 3)
    for position in positions:
        changed = bytearray(whole)
        changed[position] ^= 1 << seeded.randrange(8)
        path.write_bytes(changed)
        try:
            assert read(path) == texts  # a bit without a meaning
        except UserError:
            caught += 1
    assert caught > 0.95 * len(positions)


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize(
    "garbage", [b"x", b"garbage after the end", b"\0\0\0", bytes(5) + b"x", b"\n", LINES]
)
def test_trailing_garbage_never_passes(tmp_path: Path, name: str, garbage: bytes) -> None:
    path = tmp_path / f"a.{name}"
    path.write_bytes(PACK[name](LINES) + garbage)
    if name == "gz" and not garbage.strip(b"\0"):
        assert read(path) == TEXTS
        return
    with pytest.raises(UserError, match=rf"a\.{name}: {name} data .*"):
        read(path)


@pytest.mark.parametrize("name", PACK)
def test_memory_stays_bounded(tmp_path: Path, name: str) -> None:
    packed = PACK[name](b"x" * 10_000_000) * 10
    largest = 0
    for block in _compression.unpack([packed], name, tmp_path, block_bytes=1 << 20):
        largest = max(largest, len(block))
    assert largest <= 2 << 20
