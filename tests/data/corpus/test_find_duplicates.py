"""The first document of each text stays, regardless of shards and parts."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tokamake.config.data import PlanSettings
from tokamake.data.corpus import find_duplicates as module
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.document_rows import HASH, RowsWriter, read_duplicates, read_table
from tokamake.data.corpus.find_duplicates import find_duplicates
from tokamake.data.corpus.hash_documents import hash_documents
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import Plan, write_plan
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.trace import trace
from tokamake.data.tokenize.tokenize_batch import tokenize_batch
from tokamake.errors import UserError

BAD = ['{"text": 1}', "not JSON", '{"text": ""}', '{"text": ""}']


@pytest.fixture
def planned(workspace: Path) -> Plan:
    """A plan whose shards are cut within files; many lines are equal, bad, blank or empty."""
    numbers = random.Random(5)
    (workspace / "dup").mkdir()
    for file in range(3):
        lines = [
            numbers.choice([json.dumps({"text": f"text {numbers.randrange(40)}"})] * 4 + BAD + [""])
            for _ in range(60)
        ]
        (workspace / f"dup/{file}.jsonl").write_text("\n".join(lines))
    corpus = Corpus(corpus="dup", files=f"{workspace}/dup/*.jsonl", weight=1)
    new_plan = make_plan([corpus], PlanSettings(shard_bytes=400, merged_bytes=10**9), declared={})
    write_plan(workspace / "plan.json", new_plan)
    return new_plan


def duplicates(workspace: Path, planned: Plan) -> Path:
    hashes = []
    for batch in planned.tokenize_batches:
        hashes.append(workspace / f"hashes/{batch.name}")
        hash_documents(plan=workspace / "plan.json", batch=batch.name, output=hashes[-1])
    find_duplicates(hashes, output=workspace / "duplicates")
    return workspace / "duplicates"


def test_a_raw_file_that_changed_since_it_was_planned_is_not_hashed(
    workspace: Path, planned: Plan
) -> None:
    raw = workspace / "dup/1.jsonl"
    raw.write_text("\n".join(reversed(raw.read_text().split("\n"))))
    with pytest.raises(UserError, match=r"dup/1\.jsonl: changed since it was planned"):
        duplicates(workspace, planned)
    assert list((workspace / "hashes").iterdir())  # the job of the file before it


def expected_texts(workspace: Path) -> list[str]:
    """Return each text of the corpus once, without using tokamake."""
    texts: dict[str, None] = {}
    for path in sorted((workspace / "dup").iterdir()):
        for line in path.read_text().split("\n"):
            if line and line not in BAD:
                texts[json.loads(line)["text"]] = None
    return list(texts)


@pytest.mark.parametrize("part_rows", [1 << 24, 7])
def test_the_first_of_each_text_stays(
    workspace: Path,
    planned: Plan,
    part_rows: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "_PART_ROWS", part_rows)
    path = duplicates(workspace, planned)
    table = dict(read_table(path))
    assert list(table) == [shard.name for shard in planned.shards]
    texts, total = [], 0
    for batch in planned.tokenize_batches:
        tokenize_batch(
            output=workspace / "shards",
            tokenizer=workspace / "tokenizer",
            plan=workspace / "plan.json",
            batch=batch.name,
            summary=workspace / "summary.json",
            duplicates=(path,),
            on_bad_document="quarantine",
            max_bad_fraction=1,
        )
        for shard in batch.members:
            manifest = read_manifest(workspace / "shards" / shard)
            assert manifest["duplicate_documents"] == table[shard]
            assert manifest["documents_in"] == sum(
                manifest[f"{kind}documents"]
                for kind in ("", "duplicate_", "quarantined_", "empty_")
            )
            total += manifest["duplicate_documents"]
            for document in range(manifest["documents"]):
                capsys.readouterr()
                trace(workspace / "shards" / shard, document)
                line = capsys.readouterr().out.partition("\n")[2]
                texts.append(json.loads(line)["text"])
    assert texts == expected_texts(workspace)
    assert total > 25


def test_several_keys_are_compared_together(workspace: Path, tmp_path: Path) -> None:
    records = [("a", "bc"), ("ab", "c"), ("a", "bc"), ("a", "x"), ("", ""), ("", ""), ("", "y")]
    records.append(("", "y"))
    raw = tmp_path / "some.jsonl"
    raw.write_text("".join(json.dumps({"t": t, "b": b}) + "\n" for t, b in records))
    corpus = Corpus(corpus="two", files=str(raw), text_key="t,b", weight=1)
    write_plan(tmp_path / "plan.json", new_plan := make_plan([corpus], PlanSettings(), declared={}))
    hash_documents(
        plan=tmp_path / "plan.json", batch="two-00000", output=tmp_path / "h", text_key=("t,b",)
    )
    find_duplicates([tmp_path / "h"], output=tmp_path / "d")
    assert read_duplicates([tmp_path / "d"], new_plan.shards[0].name).tolist() == [2, 7]


def test_the_first_copy_that_passes_its_filters_stays(workspace: Path, tmp_path: Path) -> None:
    """Equal texts with other fields, and in corpora with other filters."""
    by_field = "regex: {replace: much}, regex: {field: url, drop: bad}"
    filters = {"a": by_field, "b": "length: {min_words: 3}, regex: {replace: word}", "c": ""}
    records = {
        "a": [("bad", "of much use"), ("good", "of much use"), ("good", "of much use")],
        "b": [("", "a word"), ("", "of much use"), ("", "a word in time"), ("", "a word in time")],
        "c": [("", "a word"), ("", "a word in time"), ("", "a word"), ("", "of use"), ("", "")],
    }
    corpora = []
    for name, rows in records.items():
        lines = [json.dumps({"url": url, "text": text}) for url, text in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        corpora.append(Corpus(corpus=name, files=f"{tmp_path}/{name}.jsonl", weight=1))
    write_plan(tmp_path / "plan.json", make_plan(corpora, PlanSettings(), declared={}))
    for name in filters:
        hash_documents(
            plan=tmp_path / "plan.json",
            batch=f"{name}-00000",
            output=tmp_path / f"{name}.rows",
            filters=filters[name],
        )
    find_duplicates([tmp_path / f"{name}.rows" for name in filters], output=tmp_path / "d")
    left_out = {
        name: read_duplicates([tmp_path / "d"], f"{name}/00000").tolist() for name in filters
    }
    assert left_out == {"a": [2], "b": [1, 3], "c": [1, 2]}
    manifests = {}
    for name in filters:
        tokenize_batch(
            output=tmp_path / "shards",
            tokenizer=workspace / "tokenizer",
            plan=tmp_path / "plan.json",
            batch=f"{name}-00000",
            summary=tmp_path / "summary.json",
            duplicates=(tmp_path / "d",),
            filters=filters[name],
        )
        manifests[name] = read_manifest(tmp_path / f"shards/{name}/00000")
    counts = ("documents", "duplicate_documents", "filtered_documents", "empty_documents")
    assert {name: [each.get(key, 0) for key in counts] for name, each in manifests.items()} == {
        "a": [1, 1, 1, 0],
        "b": [1, 2, 1, 0],
        "c": [2, 2, 0, 1],
    }


def test_all_bits_of_a_hash_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ROWS", 4)
    with RowsWriter(tmp_path / "h") as writer:
        writer.add("a/0", np.array([[1, 2], [1, 3], [4, 3]], HASH))
        writer.add("a/1", np.array([[4, 2], [1, 2], [4, 3]], HASH))
    find_duplicates([tmp_path / "h"], output=tmp_path / "d")
    assert [read_duplicates([tmp_path / "d"], f"a/{n}").tolist() for n in (0, 1)] == [[], [1, 2]]


@pytest.mark.fault("damaged file")
def test_any_changed_bit_of_a_file_of_rows_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "h"
    with RowsWriter(path) as writer:
        writer.add("a/0", np.array([[1, 2], [1, 3]], HASH))
        writer.add("a/1", np.array([[4, 2]], HASH))
    content = path.read_bytes()
    assert read_table(path, verify=True) == [("a/0", 2), ("a/1", 1)]
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(UserError, match="not a file of rows, or damaged; remove it"):
            find_duplicates([path], output=tmp_path / "d")
    earlier = b'[["a/0",2],["a/1",1]]'
    footer = len(earlier).to_bytes(8, "little") + content[-8:]
    path.write_bytes(content[:48] + earlier + footer)
    assert read_table(path, verify=True) == [("a/0", 2), ("a/1", 1)]


def test_damaged_and_missing_files_are_user_errors(workspace: Path, planned: Plan) -> None:
    path = duplicates(workspace, planned)
    with pytest.raises(UserError, match="has no shard dup/77"):
        read_duplicates([path], "dup/77")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="not a file of rows"):
        read_table(path)
    with pytest.raises(UserError, match="no such file"):
        find_duplicates([workspace / "none"], output=workspace / "x")
    with pytest.raises(UserError, match="no file given"):
        find_duplicates([], output=workspace / "x")
