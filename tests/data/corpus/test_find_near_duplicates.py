"""The first document of each cluster stays, regardless of shards, parts, threads and jobs."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tokamake.config.data import PlanSettings, TokenizeSettings
from tokamake.config.near_duplicates import MinHashSettings
from tokamake.data.corpus import find_near_duplicates as module
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.document_rows import HASH, RowsWriter, read_duplicates, read_table
from tokamake.data.corpus.find_duplicates import find_duplicates
from tokamake.data.corpus.find_near_duplicates import find_near_duplicates
from tokamake.data.corpus.hash_documents import hash_documents
from tokamake.data.corpus.minhash import make_minhash
from tokamake.data.corpus.near_duplicate_keys import KeyFile
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import Plan, read_plan, write_plan
from tokamake.data.corpus.sign_documents import pack_places, sign_documents, unpack_places
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.tokenize.tokenize_batch import tokenize_batch
from tokamake.errors import UserError
from tokamake.runtime import console

BANDS = 5
OPTIONS: dict[str, Any] = {"bands": BANDS, "rows": 2, "shingle": 2}
BAD = ['{"text": 1}', "not JSON", '{"text": ""}', '{"text": "?!"}']


def write_corpora(folder: Path) -> dict[str, list[str]]:
    """Raw files of two corpora with near-duplicates in and across them; lines by file."""
    numbers = random.Random(5)
    bases = [[f"w{numbers.randrange(400)}" for _ in range(12)] for _ in range(30)]
    lines: dict[str, list[str]] = {}
    folder.mkdir(exist_ok=True)
    for name in ("a0", "a1", "b0"):
        rows = []
        for _ in range(60):
            words = [*numbers.choice(bases)]
            for _ in range(numbers.randrange(4)):
                words[numbers.randrange(12)] = f"w{numbers.randrange(400)}"
            rows.append(numbers.choice([json.dumps({"text": " ".join(words)})] * 12 + BAD))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        lines[str(folder / f"{name}.jsonl")] = rows
    return lines


def plan_of(folder: Path, *, shard_bytes: int, corpora: Sequence[str] = ("a", "b")) -> Plan:
    table = [Corpus(corpus=c, files=f"{folder}/raw/{c}*.jsonl", weight=1) for c in corpora]
    plan = make_plan(
        table,
        PlanSettings(shard_bytes=shard_bytes),
        declared={},
        tokenize=TokenizeSettings(deduplicate=True, on_bad_document="quarantine"),
    )
    write_plan(folder / "plan.json", plan)
    return plan


def signed(folder: Path, plan: Plan, **options: Any) -> list[Path]:
    files = []
    for batch in plan.tokenize_batches:
        files.append(folder / f"signed/{batch.name}.rows")
        files[-1].parent.mkdir(exist_ok=True)
        given = {"on_bad_document": "quarantine", **OPTIONS, **options}
        sign_documents(plan=folder / "plan.json", batch=batch.name, output=files[-1], **given)
    return files


def find(folder: Path, files: list[Path], *, name: str = "all", **options: Any) -> list[dict]:
    """Rows of the table of duplicates."""
    find_near_duplicates(
        files,
        plan=folder / "plan.json",
        output=folder / f"{name}.rows",
        table=folder / f"{name}.parquet",
        keys=folder / f"{name}.keys",
        **options,
    )
    rows: list[dict[str, Any]] = pq.read_table(folder / f"{name}.parquet").to_pylist()
    return rows


def expected_twins(lines: dict[str, list[str]]) -> dict[tuple[str, int], tuple[str, int]]:
    """Place of each duplicate and of the first document of its cluster, by comparing all pairs."""
    places = [(path, number) for path, rows in lines.items() for number in range(len(rows))]
    texts = [text_of(lines[path][number]) for path, number in places]
    keys = make_minhash(MinHashSettings(**OPTIONS)).sign(texts)
    first = list(range(len(places)))
    for _ in range(20):  # labels travel along chains of near-duplicates
        for i in range(len(places)):
            for j in np.flatnonzero(((keys == keys[i]) & (keys != 0)).any(axis=1)).tolist():
                first[i] = first[j] = min(first[i], first[j])
    return {places[i]: places[root] for i, root in enumerate(first) if root != i}


def text_of(line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


def by_line(
    rows: list[dict[str, Any]], lines: dict[str, list[str]]
) -> dict[tuple[str, int], tuple[str, int]]:
    """The table of duplicates, with the number of each line in its file, from 0."""

    def place(row: dict[str, Any], prefix: str) -> tuple[str, int]:
        file, byte = row[f"{prefix}file"], row[f"{prefix}byte"]
        return file, Path(file).read_bytes()[:byte].count(b"\n")

    return {place(row, ""): place(row, "kept_") for row in rows}


@pytest.mark.parametrize(
    ("shard_bytes", "part_rows", "workers"), [(10**9, 1 << 24, 1), (2000, 7, 3), (700, 1 << 24, 2)]
)
def test_the_first_document_of_each_cluster_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, part_rows: int, workers: int
) -> None:
    monkeypatch.setattr(module, "_PART_ROWS", part_rows)
    monkeypatch.setattr(module, "_CHUNK_ROWS", 11)
    lines = write_corpora(tmp_path / "raw")
    plan = plan_of(tmp_path, shard_bytes=shard_bytes)
    rows = find(tmp_path, signed(tmp_path, plan), workers=workers)
    expected = expected_twins(lines)
    assert by_line(rows, lines) == expected
    assert len(expected) > 60
    # `tokenize` reads the same documents, shard by shard.
    shards = [name for name, _ in read_table(tmp_path / "all.rows")]
    assert shards == [shard.name for shard in plan.shards]
    dropped = [
        (shard, number)
        for shard in shards
        for number in read_duplicates([tmp_path / "all.rows"], shard).tolist()
    ]
    assert dropped == [(row["shard"], row["document"]) for row in rows]


def test_filters_run_before_keys_are_computed(tmp_path: Path) -> None:
    write_corpora(tmp_path / "raw")
    plan = plan_of(tmp_path, shard_bytes=10**9)
    filters = 'regex: {replace: "w[0-9]+", replacement: same}, regex: {drop: "same same"}'
    assert find(tmp_path, signed(tmp_path, plan, filters=filters)) == []
    filters = "regex: {replace: '[^ ]+', replacement: x}"
    whole = find(tmp_path, signed(tmp_path, plan, filters=filters))
    # Two texts are left: twelve words, and the one of "?!".
    assert len({row["kept_document"] for row in whole}) == 2


def test_later_documents_are_compared_with_kept_keys(tmp_path: Path) -> None:
    lines = write_corpora(tmp_path / "raw")
    everything = by_line(
        find(tmp_path, signed(tmp_path, plan_of(tmp_path, shard_bytes=2000))), lines
    )
    old = plan_of(tmp_path, shard_bytes=2000, corpora="a")
    find(tmp_path, signed(tmp_path, old), name="old")
    for path in (tmp_path / "raw").glob("a*"):
        path.rename(path.with_suffix(".moved"))  # is not read again
    new = plan_of(tmp_path, shard_bytes=2000, corpora="b")
    rows = find(tmp_path, signed(tmp_path, new), name="new", against=(tmp_path / "old.keys",))
    for path in (tmp_path / "raw").glob("a*.moved"):
        path.rename(path.with_suffix(".jsonl"))
    b = str(tmp_path / "raw/b0.jsonl")
    assert by_line(rows, lines) == {p: kept for p, kept in everything.items() if p[0] == b}
    assert {row["kept_file"] for row in rows} == {*lines}
    # The keys of new documents serve the next ones, beside the old keys.
    again = find(tmp_path, signed(tmp_path, new), name="again", against=(tmp_path / "new.keys",))
    assert len(again) == sum(map(bool, map(str.strip, map(text_of, lines[b])))) - sum(
        text_of(line) == "?!" for line in lines[b]
    )


def test_several_keys_are_one_text(tmp_path: Path) -> None:
    raw = tmp_path / "some.jsonl"
    records = [("one two", "three"), ("one", "two three"), ("one", "four")]
    raw.write_text("".join(json.dumps({"t": t, "b": b}) + "\n" for t, b in records))
    corpus = Corpus(corpus="two", files=str(raw), text_key="t,b", weight=1)
    write_plan(tmp_path / "plan.json", make_plan([corpus], PlanSettings(), declared={}))
    rows = tmp_path / "signed.rows"
    sign_documents(
        plan=tmp_path / "plan.json", batch="two-00000", output=rows, text_key=("t,b",), **OPTIONS
    )
    assert [(row["document"], row["kept_document"]) for row in find(tmp_path, [rows])] == [(1, 0)]


def test_a_log_shows_the_documents_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_LOG_SECONDS", 0)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    corpus = Corpus(corpus="two", files=f"{tmp_path}/*.txt", weight=1)
    write_plan(tmp_path / "plan.json", make_plan([corpus], PlanSettings(), declared={}))
    rows = tmp_path / "signed.rows"
    filters = "length: {min_words: 9}"
    sign_documents(
        plan=tmp_path / "plan.json", batch="two-00000", output=rows, filters=filters, **OPTIONS
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["read two/00000: 1 documents", "read two/00000: 2 documents"]


def test_a_document_that_equals_an_earlier_one_is_not_kept_in_place_of_another(
    tmp_path: Path, workspace: Path
) -> None:
    """The filter drops the first of two equal documents: none of them stays for a near copy."""
    raw = tmp_path / "a.jsonl"
    text = "one two three four five six"
    records = [("x", text), ("y", text), ("y", f"{text} seven"), ("y", f"{text} seven eight")]
    raw.write_text("".join(json.dumps({"url": u, "text": t}) + "\n" for u, t in records))
    corpus = Corpus(corpus="a", files=str(raw), weight=1)
    write_plan(tmp_path / "plan.json", make_plan([corpus], PlanSettings(), declared={}))
    equal, hashes, options = (
        tmp_path / "equal.rows",
        tmp_path / "hashes.rows",
        "regex: {drop: x, field: url}",
    )
    hash_documents(plan=tmp_path / "plan.json", batch="a-00000", output=hashes)
    find_duplicates([hashes], output=equal)
    plan = read_plan(tmp_path / "plan.json")
    files = signed(tmp_path, plan, filters=options, duplicates=(equal,))
    assert [(row["document"], row["kept_document"]) for row in find(tmp_path, files)] == [(3, 2)]
    tokenize_batch(
        plan=tmp_path / "plan.json",
        batch="a-00000",
        tokenizer=workspace / "tokenizer",
        output=tmp_path / "shards",
        summary=tmp_path / "summary.json",
        duplicates=(equal, tmp_path / "all.rows"),
        filters=options,
    )
    manifest = read_manifest(tmp_path / "shards/a/00000")
    assert (manifest["documents_in"], manifest["documents"]) == (4, 1)
    assert (manifest["duplicate_documents"], manifest["near_duplicate_documents"]) == (2, 1)
    assert manifest["filtered_documents"] == 1


# ---- Mistakes and damage ----


def test_a_bad_document_or_a_failing_filter_stops_the_job(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, stop = read_plan(planned / "plan.json"), {"on_bad_document": "stop"}
    lines = (planned / "raw/a0.jsonl").read_text().splitlines()
    first = 1 + next(number for number, line in enumerate(lines) if line in BAD[:2])
    with pytest.raises(UserError, match=rf"a0\.jsonl:{first}: .*, or set on_bad_document to quar"):
        signed(planned, plan, **stop)
    for path in (planned / "raw").iterdir():
        path.write_text(json.dumps({"text": "a" * 40 + "!"}) + '\n{"text": "one two three"}\n' * 9)
    plan = plan_of(planned, shard_bytes=10**9)
    endless = {"filters": 'regex: {drop: "(a+)+$"}', "filter_seconds": 0.1}
    with pytest.raises(
        UserError, match=r"a0\.jsonl:1: filter regex ran longer than filter_seconds"
    ):
        signed(planned, plan, **stop, **endless)
    assert not list((planned / "signed").iterdir())
    assert find(planned, signed(planned, plan, **endless)) != []


def test_a_filter_that_cannot_be_set_up_is_one_line(planned: Path) -> None:
    (planned / "set.jsonl").write_text('{"question": "a"}\n')
    filters = f"decontaminate: {{files: {{set: {planned}/set.jsonl}}}}"
    with pytest.raises(UserError, match=r"^filter decontaminate: .*set\.jsonl:1: no field text"):
        signed(planned, read_plan(planned / "plan.json"), filters=filters)
    assert not list((planned / "signed").iterdir())


def rows_of(path: Path, keys: list[list[int]], shard: str = "a/0") -> Path:
    with RowsWriter(path) as writer:
        writer.add(shard, np.array(keys, HASH))
    return path


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    write_corpora(tmp_path / "raw")
    plan_of(tmp_path, shard_bytes=10**9)
    return tmp_path


def test_keys_of_several_settings_are_refused(planned: Path) -> None:
    files = [rows_of(planned / "x", [[1, 2, 0]]), rows_of(planned / "y", [[1, 2, 3, 0]])]
    with pytest.raises(UserError, match="keys of several settings; remove the folder and rerun"):
        find(planned, files)
    assert not (planned / "all.rows").exists()


def test_too_many_documents_are_refused(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_DOCUMENTS", 1)
    with pytest.raises(UserError, match=r"2 documents are too many .* near_duplicates\.scope"):
        find(planned, [rows_of(planned / "x", [[1, 0], [2, 0]])])


@pytest.mark.fault("damaged file")
def test_any_changed_byte_of_a_file_of_keys_is_noticed(planned: Path) -> None:
    path = planned / "old.keys"
    with pytest.raises(UserError, match=r"old\.keys: no such file"):
        KeyFile.open(path, num_bands=2)
    find(planned, [rows_of(planned / "x", [[1, 2, 3], [1, 4, 5]], "a/00000")], name="old")
    opened = KeyFile.open(path, num_bands=2)
    assert [keys.tolist() for keys in opened.keys] == [[1], [2, 4]]
    assert [kept.tolist() for kept in opened.kept] == [[0], [0, 0]]
    content = path.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UserError, match=r"old\.keys: not a file of rows, or damaged"):
            KeyFile.open(path, num_bands=2)


def test_keys_of_other_settings_are_no_earlier_data(planned: Path) -> None:
    find(planned, [rows_of(planned / "x", [[1, 2, 0]], "a/00000")], name="old")
    with pytest.raises(UserError, match=r"old\.keys: has keys of 2 bands, not 1; use the same"):
        find(planned, [rows_of(planned / "y", [[1, 0]])], against=(planned / "old.keys",))


def test_places_keep_file_and_byte_or_line() -> None:
    numbers, offsets = np.array([7, 2**40]), np.array([-1, 2**42])
    places = unpack_places(pack_places(2**19, numbers, offsets=offsets))
    assert places.file.tolist() == [2**19] * 2
    assert places.number.tolist() == [7, 2**42]
    assert places.is_byte.tolist() == [False, True]
