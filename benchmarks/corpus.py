"""Make a corpus of real text from folders of source code and documentation; a file is a document.

    python benchmarks/corpus.py /usr/src /usr/share/doc --bytes 1GB --output corpus.jsonl

The same folders give the same bytes. The order depends only on hashes of paths, which mixes code
and prose. Copies, binaries and generated tables are skipped.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

_SMALLEST, _LARGEST = 200, 1_000_000
_REPETITIVE = 8.0
"""Compression ratio of zlib from which a file counts as generated; code and prose reach 3 to 5."""


def main() -> None:
    """Write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders to read, recursively")
    parser.add_argument("--bytes", type=in_bytes, default=in_bytes("1GB"), help="size to reach")
    parser.add_argument("--output", type=Path, required=True, help="jsonl file to write")
    options = parser.parse_args()
    size = documents = 0
    with options.output.open("wb") as target:
        for text in texts(options.folders):
            line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            size, documents = size + target.write(line), documents + 1
            if size >= options.bytes:
                break
    print(f"{options.output}: {documents:,} documents, {size:,} bytes")
    if size < options.bytes:
        raise SystemExit(f"the folders hold no more than {size:,} bytes of text; name more folders")


def in_bytes(text: str) -> int:
    """Read a size such as 100MB, in powers of 1,000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text}: give a size such as 100MB")
    return int(float(match[1]) * {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3}[match[2]])


def texts(folders: list[Path]) -> Iterator[str]:
    """Yield the texts of the folders without copies."""
    paths = [
        (hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest(), path)
        for folder in folders
        for path in _files(folder)
    ]
    seen = set()
    for _, path in sorted(paths):
        content = _read(path)
        digest = hashlib.sha256(content).digest()
        if digest in seen or not _readable(content):
            continue
        seen.add(digest)
        try:
            yield content.decode()
        except UnicodeDecodeError:
            continue


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size >= _SMALLEST:
                yield path


def _read(path: Path) -> bytes:
    """Read a file, compressed or not (manual pages often are); too large ones count as empty."""
    if path.stat().st_size > _LARGEST:
        return b""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            return stream.read(_LARGEST + 1)
    except (OSError, EOFError, zlib.error):
        return b""


def _readable(content: bytes) -> bool:
    if not _SMALLEST <= len(content) <= _LARGEST or b"\0" in content:
        return False
    return len(content) < _REPETITIVE * len(zlib.compress(content, 1))


if __name__ == "__main__":
    main()
