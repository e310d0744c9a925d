"""Tokens are what the tokenizer's own package gives, in Megatron's format, whatever the workers."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from conftest import documents
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

from tokamake.data import pairs
from tokamake.data.tokenize import tokenize
from tokamake.errors import UserError


def test_megatron_reads_every_document_with_its_end(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenize([raw], output=workspace / "pair", tokenizer=workspace / "tokenizer")
    oracle = tokenizers.Tokenizer.from_file(str(workspace / "tokenizer/tokenizer.json"))
    eod = oracle.token_to_id("<|endoftext|>")
    expected = [[*oracle.encode(text).ids, eod] for text in documents(raw)]
    found = MegatronDataset(str(workspace / "pair"))
    assert len(found) == len(expected)
    assert all(list(a) == b for a, b in zip(found, expected, strict=True))
    assert found[0].dtype == np.uint16
    manifest = pairs.read_manifest(workspace / "pair")
    assert manifest["documents"] == len(expected)
    assert manifest["tokens"] == sum(map(len, expected))
    assert manifest["vocab_size"] == 400


def test_the_same_bytes_whatever_the_workers_and_the_packing(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    (workspace / "docs.gz").write_bytes(gzip.compress(raw.read_bytes()))
    written = set()
    for number, (path, workers) in enumerate([(raw, 1), (raw, 2), (workspace / "docs.gz", 1)]):
        prefix = workspace / f"pair{number}"
        tokenize([path], output=prefix, tokenizer=workspace / "tokenizer", workers=workers)
        written.add((pairs.bin_path(prefix).read_bytes(), pairs.idx_path(prefix).read_bytes()))
    assert len(written) == 1


def test_byte_ranges_join_to_the_whole(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenize([raw], output=workspace / "whole", tokenizer=workspace / "tokenizer")
    for name, byte_range in (("a", "0:9000"), ("b", "9000:9001"), ("c", "9001:")):
        tokenize(
            [raw], output=workspace / name, tokenizer=workspace / "tokenizer", byte_range=byte_range
        )
    joined = b"".join((workspace / f"{name}.bin").read_bytes() for name in "abc")
    assert joined == (workspace / "whole.bin").read_bytes()


def test_empty_documents_are_counted_and_left_out(workspace: Path) -> None:
    raw = workspace / "some.jsonl"
    raw.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one", "", "three")))
    tokenize([raw], output=workspace / "pair", tokenizer=workspace / "tokenizer", append_eod=False)
    manifest = pairs.read_manifest(workspace / "pair")
    assert (manifest["documents"], manifest["empty_documents"]) == (2, 1)
    raw.write_text("")
    tokenize([raw], output=workspace / "pair", tokenizer=workspace / "tokenizer")
    assert pairs.read_manifest(workspace / "pair")["documents"] == 0
    assert len(MegatronDataset(str(workspace / "pair"), mmap=False)) == 0


def test_a_bad_document_leaves_nothing(workspace: Path) -> None:
    raw = workspace / "some.jsonl"
    raw.write_text('{"text": "a"}\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"some\.jsonl:2"):
        tokenize([raw], output=workspace / "out/pair", tokenizer=workspace / "tokenizer")
    assert not list((workspace / "out").iterdir())


@pytest.mark.parametrize("byte_range", ["x", "5", "1:b", "-1:4"])
def test_bad_byte_ranges(workspace: Path, byte_range: str) -> None:
    with pytest.raises(UserError, match="START:END"):
        tokenize(
            [workspace / "raw/docs/docs-00.jsonl"],
            output=workspace / "p",
            tokenizer=workspace / "tokenizer",
            byte_range=byte_range,
        )


def test_large_vocabularies_take_four_bytes_a_token(workspace: Path) -> None:
    folder = workspace / "large"
    shutil.copytree(workspace / "tokenizer", folder)
    large = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    large.add_tokens([f"<extra{n}>" for n in range(65_500 - 400)])
    large.save(str(folder / "tokenizer.json"))
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenize([raw], output=workspace / "pair", tokenizer=folder)
    assert pairs.read_manifest(workspace / "pair")["dtype"] == "int32"
    assert MegatronDataset(str(workspace / "pair"))[0].dtype == np.int32
