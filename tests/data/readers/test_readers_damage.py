"""Random damage to raw files of each format: one error, or bad documents, but no silent loss."""

import gzip
import io
import json
import random
import resource
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import csv, feather, parquet

from tests.support.readings import PACK, records
from tokamake.data.readers import BadRecord, open_input
from tokamake.errors import UserError

TEXTS = [f"document {number}: {'ab, c' * (number % 7)}" for number in range(40)]
LINES = "".join(json.dumps({"text": text, "id": 5}) + "\n" for text in TEXTS).encode()
TABLE = pyarrow.table({"text": TEXTS, "id": range(40)})
CHANGES, MEMORY_BYTES = 30, 500_000_000


def written(write, **options: object) -> bytes:  # type: ignore[no-untyped-def]
    """Content of a file that pyarrow writes."""
    stream = io.BytesIO()
    write(TABLE, stream, **options)
    return stream.getvalue()


def tarred() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(LINES)
        archive.addfile(member, io.BytesIO(LINES))
    return stream.getvalue()


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", LINES)
    return stream.getvalue()


HASHED = {
    **{f"a.jsonl.{name}": pack(LINES) for name, pack in PACK.items()},
    "a.tar.gz": gzip.compress(tarred()),
    "a.zip": zipped(),
    "a.parquet": written(parquet.write_table, write_page_checksum=True),
}
"""Files whose formats have checksums."""
PLAIN = {
    "a.jsonl": LINES,
    "a.jsons": LINES.replace(b"{", b"\x1e{"),
    "a.json": b"[" + b",".join(LINES.splitlines()) + b"]",
    "a.csv": written(csv.write_csv),
    "a.arrow": written(feather.write_feather, compression="uncompressed"),
    "a.tar": tarred(),
}


def texts(path: Path) -> list[str | None]:
    """Text of each document; None: the document is bad."""
    return [
        None
        if isinstance(record, BadRecord) or not isinstance(record.get("text"), str)
        else record["text"]
        for record in records(open_input(path))
    ]


def damaged(rng: random.Random, content: bytes, *, is_cut: bool) -> bytes:
    """Flip a bit, overwrite some bytes or, if `is_cut`, cut the file or leave a part out."""
    start, changed = rng.randrange(len(content)), bytearray(content)
    kind = rng.randrange(4 if is_cut else 2)
    if kind == 0:
        changed[start] ^= 1 << rng.randrange(8)
    else:
        size = rng.randrange(1, 9)
        changed[start : [0, start + size, len(content), start + size][kind]] = (
            rng.randbytes(len(content[start : start + size])) if kind == 1 else b""
        )
    return bytes(changed)


@pytest.mark.parametrize("name", [*HASHED, *PLAIN])
def test_damage_loses_no_document_silently(tmp_path: Path, name: str) -> None:
    rng, path, outcomes = random.Random(name), tmp_path / name, Counter[str]()
    content = {**HASHED, **PLAIN}[name]
    path.write_bytes(content)
    assert texts(path) == TEXTS
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(CHANGES):
        path.write_bytes(damaged(rng, content, is_cut=name in HASHED))
        try:
            found = texts(path)
        except UserError as error:
            outcomes["refused" if str(path) in str(error).splitlines()[-1] else str(error)] += 1
            continue
        good = [text for text in found if text is not None]
        lost = Counter(TEXTS) - Counter(good)
        outcomes["harmless" if not lost else "bad" if len(good) < len(found) else "changed"] += 1
        # A bit of a file without checksums may be a letter.
        assert lost.total() <= (0 if name in HASHED else 2), (number, outcomes)
        assert name not in HASHED or len(good) == len(TEXTS)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    assert grown * 1024 < MEMORY_BYTES, outcomes
    assert outcomes.keys() <= {"refused", "harmless", "bad", "changed"}
    assert outcomes["refused"] or name not in HASHED
