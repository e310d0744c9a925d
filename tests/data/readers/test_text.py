"""Reader of plain text."""

import bz2
import hashlib
from pathlib import Path

import pytest
from backports import zstd

from tests.support.readings import checked, records, small_steps
from tokamake.data.readers import open_input, sniff
from tokamake.errors import UserError

TEXT_FILES = {
    "a.txt": b"Once upon\n\na time\r\n",
    "b.MD": b"[link](there)\n",
    "c.tex": b"{\\bf bold}\n",
    "d.rst.bz2": bz2.compress("üç\0".encode()),
    "e.txt": b"",
    "f.text": b"\xef\xbb\xbf{\n}",
    "g.txt.zst": checked(b"PAR"),
    "h.txt": b"x",
    "i.txt": b"{x}",
}


@pytest.mark.parametrize("name", TEXT_FILES)
@pytest.mark.parametrize("size", [1 << 23, 3])
def test_a_text_file_is_one_document(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / name
    path.write_bytes(TEXT_FILES[name])
    plain = {"d.rst.bz2": bz2.decompress, "g.txt.zst": zstd.decompress}.get(name, bytes)
    content = plain(TEXT_FILES[name])
    assert sniff(path)[0] == "text"
    with small_steps(size):
        raw = open_input(path)
        (block,) = raw.blocks(("body",))
    assert block.records == [{"body": content.decode("utf-8-sig")}]
    assert block.raw == [content]
    assert list(block.numbers) == [1]
    assert raw.sha256 == hashlib.sha256(TEXT_FILES[name]).hexdigest()


def test_a_text_file_that_is_not_utf8_is_a_bad_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    raw = open_input(path)
    (block,) = raw.blocks(("text",))
    assert "0xe9 at byte 3" in block.records[0].reason
    assert block.raw == [b"caf\xe9"]
    with pytest.raises(UserError, match="one text, not title, text"):
        records(raw, "title", "text")
