"""Detection finds the format from the content, and refuses files that no reader can read."""

import lzma
from pathlib import Path

import pytest

from tests.support.readings import LINES, read
from tokamake.data.readers import open_input, sniff
from tokamake.data.readers._detect import content_suffix
from tokamake.errors import UserError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 9\n" % 0
REFUSED = {
    "mark.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "le.jsonl": ('{"text": "a"}\n'.encode("utf-16-le"), "iconv -f UTF-16LE"),
    "be.jsonl": ('{"text": "a"}\n'.encode("utf-16-be"), "iconv -f UTF-16BE"),
    "mark32.jsonl": ('{"text": "a"}\n'.encode("utf-32"), "iconv -f UTF-32 "),
    "be32.jsonl": ('{"text": "a"}\n'.encode("utf-32-be"), "iconv -f UTF-32BE"),
    "wide.txt.xz": (lzma.compress("text".encode("utf-16")), "iconv -f UTF-16 "),
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0", "has no known format"),
    "binary.jsonl": (b"\x80\0\0\1\2\3", "has no known format"),
    "wide.csv": ("id,text\n1,one\n".encode("utf-16"), "is UTF-16, not UTF-8; convert it: iconv"),
    "7z.csv": (b"7z\xbc\xaf\x27\x1c and more", "is a 7z archive; unpack it"),
    "a.7z": (b"7z\xbc\xaf\x27\x1c...", "a 7z archive; unpack it"),
    "words": (b"Once upon a time\n", "has no known format .*name its format"),
    "random.jsonl.gz": (b"\x80\0\0\1\2\3", r"is not a \.gz file, although .* fetch it again"),
    "text.txt.gz": (b"Once upon a time\n", r"is not a \.gz file, although .* fetch it again"),
    "page.jsonl.zst": (b"<!DOCTYPE html><title>404</title>", r"is not a \.zst file, although"),
    "page.txt": (b"\n<html lang=en>", "is an HTML page or an error page, not data; fetch it again"),
    "page.jsonl": (
        b"<!doctype html>",
        "is an HTML page or an error page, not data; fetch it again",
    ),
    "store.md": (b'<?xml version="1.0"?>\n<Error><Code>', "is an HTML page or an error page"),
    **{
        f"pointer{end}": (POINTER, "a Git LFS pointer, not the data: git lfs pull")
        for end in (".jsonl.zst", ".json.gz", ".txt", ".md", ".csv", ".jsonl", ".parquet", ".zip")
    },
    "annex.jsonl": (b"/annex/objects/SHA256E-s9--0.jsonl", "a git-annex pointer.*git annex get"),
    "empty.gz": (b"", r"is empty, but a valid \.gz file never is"),
    "empty.parquet": (b"", r"is empty, but a valid \.parquet file never is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_files_are_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_missing_files_folders_and_link_cycles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read \(No such file"):
        open_input(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a folder; name files"):
        open_input(tmp_path)
    with pytest.raises(UserError, match=r"loop: cannot be read"):
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        open_input(tmp_path / "loop")


def test_a_given_format_overrides_detection(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes(b"Once upon a time\n")
    assert read(path, format="text") == ["Once upon a time\n"]
    path.write_bytes(LINES)
    assert read(path, format="text") == [LINES.decode()]
    assert sniff(path) == ("jsonl", "")
    path.write_bytes(b"<html>")
    assert read(path, format="text") == ["<html>"]
    (tmp_path / "pointer").write_bytes(POINTER)
    with pytest.raises(UserError, match="git lfs pull"):
        read(tmp_path / "pointer", format="text")
    with pytest.raises(UserError, match="no data/readers plug-in is called 'xml'"):
        open_input(path, format="xml")


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("a.jsonl", ".jsonl"),
        ("A.JSONL.GZ", ".jsonl"),
        ("a.b.txt", ".txt"),
        ("a.zst", ""),
        ("a", ""),
    ],
)
def test_content_suffix_ignores_case_and_compression(name: str, suffix: str) -> None:
    assert content_suffix(Path("x.tar") / name) == suffix
