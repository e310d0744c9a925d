"""`verify` compares raw files, whole or in byte ranges, with the hashes in the manifests."""

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tokamake.data.tokenize.tokenize import tokenize
from tokamake.data.tokenize.verify import verify
from tokamake.errors import UserError


def tokenized(workspace: Path, raw: Path, name: str, byte_range: str = "") -> Path:
    prefix = workspace / f"made/{name}"
    prefix.parent.mkdir(exist_ok=True)
    tokenizer = workspace / "tokenizer"
    tokenize((str(raw),), output=prefix, tokenizer=tokenizer, byte_range=byte_range)
    return prefix


def test_raw_files_of_shards_and_merged_datasets_are_unchanged(
    ours: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    raw = list((ours[0].parents[1] / "raw/code").iterdir())
    num_bytes = sum(path.stat().st_size for path in raw)
    capsys.readouterr()
    verify(ours)
    assert capsys.readouterr().out == f"2 raw files, {num_bytes / 1e6:,.1f} MB: unchanged\n"


def test_every_changed_or_missing_raw_file_is_named(ours: list[Path]) -> None:
    changed, missing = sorted((ours[0].parents[1] / "raw/code").iterdir())
    status = changed.stat()
    content = bytearray(changed.read_bytes())
    content[-2] ^= 1
    changed.write_bytes(content)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    missing.unlink()
    with pytest.raises(UserError) as raised:
        verify(ours[2:])
    lines = str(raised.value).splitlines()
    assert f"{changed}: bytes 0 to {len(content):,} are not the tokenized ones" in lines[0]
    assert f"{missing}: cannot be read (No such file or directory)" in lines[1]
    assert len(lines) == 2


def test_files_of_a_dataset_with_another_size_are_named(ours: list[Path]) -> None:
    binary = ours[0].with_name(f"{ours[0].name}.bin")
    size = binary.stat().st_size
    with binary.open("ab") as stream:
        stream.write(b"\0")
    message = f"^{binary}: has {size + 1} bytes, its manifest says {size}; remove the dataset and"
    with pytest.raises(UserError, match=message):
        verify(ours)


def test_byte_ranges_are_compared_alone(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    size = raw.stat().st_size
    ranges = [f"0:{size // 3}", f"{size // 3}:{size // 2}", f"{size // 2}:"]
    prefixes = [tokenized(workspace, raw, f"{n}", text) for n, text in enumerate(ranges)]
    verify(prefixes)
    content = raw.read_bytes()
    raw.write_bytes(content + b'{"text": "one more"}\n')
    verify(prefixes[:2])
    with pytest.raises(UserError, match=r"docs-00\.jsonl: bytes .* are not the tokenized ones"):
        verify(prefixes)
    raw.write_bytes(content.replace(b'"text": "', b'"text": "X', 1))
    with pytest.raises(UserError, match=r"bytes 0 to "):
        verify(prefixes[:1])


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet", ".arrow", ".json", ".zip"])
def test_raw_files_of_other_formats_are_compared(workspace: Path, suffix: str) -> None:
    raw = workspace / f"other{suffix}"
    table = arrow.table({"text": ["some text", "more text"]})
    if suffix == ".parquet":
        parquet.write_table(table, raw)
    elif suffix == ".arrow":
        with arrow.ipc.new_stream(raw, table.schema) as stream:
            stream.write_table(table)
    elif suffix == ".json":
        raw.write_text(json.dumps(table.to_pylist()))
    elif suffix == ".zip":
        with zipfile.ZipFile(raw, "w") as archive:
            archive.writestr("a.json", json.dumps(table.to_pylist()))
    else:
        shutil.copy(workspace / "raw/docs/docs-00.jsonl", workspace / "other.jsonl")
        subprocess.run(["gzip", workspace / "other.jsonl"], check=True)
    prefix = tokenized(workspace, raw, "other")
    verify([prefix])
    raw.write_bytes(raw.read_bytes() + b"\0")
    with pytest.raises(UserError, match="are not the tokenized ones"):
        verify([prefix])


def test_a_dataset_of_another_program_states_no_raw_files(others: list[Path]) -> None:
    with pytest.raises(UserError, match=r"p0\.json"):
        verify(others)
