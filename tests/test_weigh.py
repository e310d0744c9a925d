"""Metadata counts what Megatron reads; weights share a corpus out by tokens and sum to one."""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

from tokamake.data.describe import describe
from tokamake.data.merge import merge
from tokamake.data.tokenize import tokenize
from tokamake.data.weigh import weigh
from tokamake.errors import UserError


@pytest.fixture
def merged(workspace: Path) -> list[Path]:
    prefixes = []
    for corpus in ("code", "docs"):
        for number, raw in enumerate(sorted((workspace / "raw" / corpus).iterdir())):
            shard = workspace / f"shards/{corpus}{number}"
            tokenize([raw], output=shard, tokenizer=workspace / "tokenizer")
            prefixes.append(workspace / f"merged/{corpus}-{number:04d}_text_document")
            merge([shard], output=prefixes[-1], corpus=corpus)
    return prefixes


def test_metadata_and_weights(workspace: Path, merged: list[Path]) -> None:
    describe(list(reversed(merged)), output=workspace / "metadata.json")
    pairs = json.loads((workspace / "metadata.json").read_text())
    assert [pair["data_prefix"] for pair in pairs] == [f"merged/{prefix.name}" for prefix in merged]
    for pair, prefix in zip(pairs, merged, strict=True):
        oracle = MegatronDataset(str(prefix))
        assert pair["total_num_tokens"] == oracle.sequence_lengths.sum()
        assert pair["total_num_docs"] == len(oracle.document_indices) - 1
        assert json.loads((workspace / f"metadata/{prefix.name}.json").read_text()) == pair

    weigh(
        corpora=workspace / "corpora.tsv",
        metadata=workspace / "metadata.json",
        output=workspace / "weights.txt",
    )
    lines = [line.split(" ") for line in (workspace / "weights.txt").read_text().splitlines()]
    assert [(prefix, corpus) for _, prefix, corpus in lines] == [
        (pair["data_prefix"], pair["corpus"]) for pair in pairs
    ]
    assert math.isclose(math.fsum(float(weight) for weight, _, _ in lines), 1, rel_tol=1e-15)
    code = [pair["total_num_tokens"] for pair in pairs if pair["corpus"] == "code"]
    assert math.isclose(float(lines[0][0]), Fraction(7, 10) * code[0] / sum(code), rel_tol=1e-15)


def test_mistakes(workspace: Path, merged: list[Path]) -> None:
    with pytest.raises(UserError, match="no pair given"):
        describe([], output=workspace / "metadata.json")
    describe(merged[:2], output=workspace / "metadata.json")
    arguments = {"metadata": workspace / "metadata.json", "output": workspace / "weights.txt"}
    with pytest.raises(UserError, match='corpus "docs" has no token'):
        weigh(corpora=workspace / "corpora.tsv", **arguments)
    table = workspace / "corpora.tsv"
    table.write_text("corpus\tfiles\tweight\ndocs\tx\t1\n")
    with pytest.raises(UserError, match='corpus "code" is not in'):
        weigh(corpora=table, **arguments)
    merged[0].with_name(merged[0].name + ".bin").write_bytes(b"")
    with pytest.raises(UserError, match="0 bytes, but its index counts"):
        describe(merged, output=workspace / "metadata.json")
