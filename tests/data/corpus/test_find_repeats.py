"""The first of equal lines, paragraphs and sequences of words stays, for any jobs and parts."""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.grids import params
from tokamake.config.data import PlanSettings, TokenizeSettings
from tokamake.data.corpus import find_repeats as module
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.document_rows import RowsWriter, read_table
from tokamake.data.corpus.find_duplicates import find_duplicates
from tokamake.data.corpus.find_repeats import find_repeats
from tokamake.data.corpus.hash_documents import hash_documents
from tokamake.data.corpus.hash_passages import hash_passages
from tokamake.data.corpus.passages import CUT, PASSAGE, read_cuts
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import Plan, write_plan
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.manifest_counts import count_faults
from tokamake.data.tokenize.tokenize_batch import tokenize_batch
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

BAD = ['{"text": 1}', "not JSON", '{"text": ""}']
SETTINGS: dict[str, dict[str, Any]] = {
    "lines": {"unit": "lines", "min_characters": 8},
    "paragraphs": {"unit": "paragraphs", "min_characters": 8},
    "words": {"unit": "words", "min_words": 6, "edge_words": 0},
}


def write_corpora(folder: Path) -> None:
    """Raw files of two corpora: texts of few lines and words, many of which repeat."""
    numbers = random.Random(11)
    lines = [" ".join(f"w{numbers.randrange(30)}" for _ in range(6)) for _ in range(80)]
    (folder / "texts").mkdir()
    for name in ("a0", "a1", "b0"):
        rows = []
        for _ in range(50):
            parts = [numbers.choice([*lines, "short", ""]) for _ in range(numbers.randrange(1, 8))]
            text = "".join(part + numbers.choice(["\n", "  \n", "\n\n"]) for part in parts)
            rows.append(numbers.choice([json.dumps({"text": text})] * 9 + BAD + [""]))
        (folder / f"texts/{name}.jsonl").write_text("\n".join(rows) + "\n")


def texts_of(folder: Path, *names: str) -> list[str]:
    """Texts of the good documents, without tokamake."""
    rows = [row for name in names for row in (folder / f"texts/{name}").read_text().split("\n")]
    return [json.loads(row)["text"] for row in rows if row and row not in BAD]


def left_of(texts: list[str], unit: str) -> list[list[str]]:
    """The passages or words of each text that stay, by a set of all earlier ones."""
    seen: set[Any] = set()
    left = []
    for text in texts:
        if unit == "words":
            words = text.split()
            repeated = set[int]()
            for first in range(len(words) - 5):
                if (window := tuple(words[first : first + 6])) in seen:
                    repeated |= {*range(first, first + 6)}
                seen.add(window)
            left.append([word for i, word in enumerate(words) if i not in repeated])
            continue
        kept = []
        for passage in passages_of(text, unit):
            if len(passage) < 8 or passage not in seen:
                kept.append(passage)
            seen.add(passage)
        left.append(kept)
    return left


def passages_of(text: str, unit: str) -> list[str]:
    """Lines, paragraphs or words that are not empty."""
    if unit == "words":
        return text.split()
    lines = [line.strip() for line in text.split("\n")]
    if unit == "lines":
        return [line for line in lines if line]
    paragraphs: list[list[str]] = [[]]
    for line, stripped in zip(text.split("\n"), lines, strict=True):
        if stripped:
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return ["\n".join(lines).strip() for lines in paragraphs if lines]


def planned(folder: Path, *, shard_bytes: int, corpora: str = "ab", max_jobs: int = 500) -> Plan:
    table = [Corpus(corpus=c, files=f"{folder}/texts/{c}*.jsonl", weight=1) for c in corpora]
    settings = PlanSettings(shard_bytes=shard_bytes, merged_bytes=10**9, max_jobs=max_jobs)
    plan = make_plan(
        table,
        settings,
        declared={},
        tokenize=TokenizeSettings(deduplicate=True, on_bad_document="quarantine"),
    )
    write_plan(folder / "plan.json", plan)
    return plan


def repeats(folder: Path, plan: Plan, **options: Any) -> Path:
    files = []
    for batch in plan.tokenize_batches:
        files.append(folder / f"hashed/{batch.name}.rows")
        files[-1].parent.mkdir(exist_ok=True)
        given = {"on_bad_document": "quarantine", **options}
        hash_passages(plan=folder / "plan.json", batch=batch.name, output=files[-1], **given)
    find_repeats(files, output=folder / "repeats.rows")
    return folder / "repeats.rows"


def tokenized(folder: Path, plan: Plan, **options: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Texts of all shards in order, and their manifests, which add up."""
    tokenizer = open_tokenizer(folder / "tokenizer")
    texts, manifests = [], []
    for batch in plan.tokenize_batches:
        tokenize_batch(
            output=folder / "shards",
            tokenizer=folder / "tokenizer",
            plan=folder / "plan.json",
            batch=batch.name,
            summary=folder / "summary.json",
            on_bad_document="quarantine",
            max_bad_fraction=1,
            append_eod=False,
            **options,
        )
        for shard in batch.members:
            manifests.append(read_manifest(folder / "shards" / shard))
            assert [*count_faults(manifests[-1])] == []
            dataset = IndexedDataset(folder / "shards" / shard)
            texts += [tokenizer.decode(dataset[i]) for i in range(manifests[-1]["documents"])]
    return texts, manifests


SIZES = [
    (10**9, 500, 1 << 24, 1 << 20, 1),
    (3000, 500, 7, 11, 2),
    (900, 3, 64, 5, 3),
    (1500, 2, 1, 1 << 20, 7),
]
"""Bytes of shards, jobs, rows of parts and of chunks, and workers."""
UNITS_AND_SIZES = [*product(SETTINGS, SIZES)]


@pytest.mark.parametrize(
    "case", params(UNITS_AND_SIZES, UNITS_AND_SIZES[::5] + UNITS_AND_SIZES[3::5])
)
def test_the_first_of_each_passage_stays(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, tuple[int, int, int, int, int]],
) -> None:
    unit, (shard_bytes, max_jobs, part_rows, chunk_rows, workers) = case
    monkeypatch.setattr(module, "_PART_ROWS", part_rows)
    monkeypatch.setattr(module, "_CHUNK_ROWS", chunk_rows)
    write_corpora(workspace)
    plan = planned(workspace, shard_bytes=shard_bytes, max_jobs=max_jobs)
    assert max_jobs == 500 or len(plan.tokenize_batches) < len(plan.shards)
    path = repeats(workspace, plan, **SETTINGS[unit])
    assert [name for name, _ in read_table(path)] == [shard.name for shard in plan.shards]
    assert not [*workspace.glob(".repeats*")]
    texts, manifests = tokenized(workspace, plan, repeats=path, workers=workers)

    before = texts_of(workspace, "a0.jsonl", "a1.jsonl", "b0.jsonl")
    left = left_of(before, unit)
    assert [passages_of(text, unit) for text in texts] == [kept for kept in left if kept]
    if shard_bytes == 10**9:
        assert len(plan.shards) < 4
    entries = [manifest["filters"][-1] for manifest in manifests]
    num_changed = sum(
        bool(kept) and kept != passages_of(text, unit)
        for kept, text in zip(left, before, strict=True)
    )
    num_dropped = sum(
        not kept and bool(text.strip()) for kept, text in zip(left, before, strict=True)
    )
    assert num_changed > 20
    assert num_dropped > 5
    assert sum(each["changed"].get("documents", 0) for each in entries) == num_changed
    dropped = [each["dropped"].get("nothing else is left", {}) for each in entries]
    assert sum(each.get("documents", 0) for each in dropped) == num_dropped
    assert sum(manifest["filtered_documents"] for manifest in manifests) == num_dropped
    if unit != "words":
        num_cut = sum(len(passages_of(t, unit)) for t in before) - sum(map(len, left))
        sums = [each["metrics"].get("passages cut", {}) for each in entries]
        assert sum(each.get("value", 0) for each in sums) == num_cut


def test_edges_of_sequences_stay_and_nothing_else(workspace: Path) -> None:
    """With edge words, fewer words are cut than without, but all inside of long repeats."""
    numbers = random.Random(4)
    (workspace / "texts").mkdir()
    run = [f"r{i}" for i in range(40)]
    texts = []
    for number in range(12):
        start, end = numbers.randrange(10), numbers.randrange(25, 40)
        around = [f"d{number}x{i}" for i in range(20)]
        texts.append(" ".join([*around[:10], *run[start:end], *around[10:]]))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in [" ".join(run), *texts])
    (workspace / "texts/a.jsonl").write_text(rows)
    plan = planned(workspace, shard_bytes=10**9, corpora="a")
    path = repeats(workspace, plan, unit="words", min_words=12, edge_words=5)
    left, _ = tokenized(workspace, plan, repeats=path)
    assert left[0] == " ".join(run)
    for text, whole in zip(left[1:], texts, strict=True):
        words = text.split()
        assert [word for word in words if word[0] == "d"] == [
            word for word in whole.split() if word[0] == "d"
        ]
        assert len([word for word in words if word[0] == "r"]) <= 10


def test_only_documents_that_are_written_count_as_first(workspace: Path) -> None:
    """Neither a document that a filter drops nor a duplicate keeps a line from another one."""
    (workspace / "texts").mkdir()
    common = "this is the line that repeats"
    first = [("bad", common), ("x", "one"), ("x", "one")]
    second = [("x", common), ("x", f"{common}\ntwo")]  # the first one equals the one of "bad"
    for name, rows in (("a0", first), ("a1", second)):
        lines = [json.dumps({"url": url, "text": text}) for url, text in rows]
        (workspace / f"texts/{name}.jsonl").write_text("\n".join(lines) + "\n")
    plan = planned(workspace, shard_bytes=10**9, corpora="a")
    assert len(plan.shards) == 1
    hash_documents(plan=workspace / "plan.json", batch="a-00000", output=workspace / "h")
    find_duplicates([workspace / "h"], output=workspace / "d")
    options: dict[str, Any] = {"filters": "regex: {drop: bad, field: url}"}
    duplicates = (workspace / "d",)
    path = repeats(workspace, plan, min_characters=3, duplicates=duplicates, **options)
    texts, (manifest,) = tokenized(workspace, plan, repeats=path, duplicates=duplicates, **options)
    assert texts == ["one", f"{common}\ntwo"]
    assert [manifest[f"{kind}_documents"] for kind in ("filtered", "duplicate")] == [1, 2]
    path = repeats(workspace, plan, min_characters=3, **options)
    texts, (manifest,) = tokenized(workspace, plan, repeats=path, **options)
    assert texts == ["one", common, "two"]
    assert [manifest[f"{kind}_documents"] for kind in ("filtered", "duplicate")] == [2, 0]
    samples = {each["verdict"]: each for each in manifest["filters"][-1]["samples"]}
    assert [samples["dropped"]["text"], samples["changed"]["after"]] == ["one", "two"]
    assert samples["dropped"]["place"] == f"{workspace}/texts/a0.jsonl:3"


def test_sequences_of_words_that_touch_are_one_cut(workspace: Path) -> None:
    (workspace / "texts").mkdir()
    run = " ".join(f"r{i}" for i in range(30))
    lines = [json.dumps({"text": text}) for text in (run, f"one {run} two {run[:60]} three")]
    (workspace / "texts/a.jsonl").write_text("\n".join(lines) + "\n")
    plan = planned(workspace, shard_bytes=10**9, corpora="a")
    path = repeats(workspace, plan, unit="words", min_words=10, edge_words=3)
    cuts = read_cuts(path, plan.shards[0].name)
    assert len(cuts) == 2
    assert cuts["document"].tolist() == [1, 1]
    whole, part = (cuts["end"] - cuts["begin"]).tolist()
    assert len(run) - 24 <= whole <= len(run)
    assert 60 - 24 <= part <= 60


def test_a_document_stays_while_any_of_its_texts_is_left(workspace: Path) -> None:
    (workspace / "texts").mkdir()
    rows = [("a title", "first body"), ("a title", "other body"), ("a title", "first body")]
    lines = [json.dumps({"title": title, "text": text}) for title, text in rows]
    (workspace / "texts/a.jsonl").write_text("\n".join(lines) + "\n")
    raw = f"{workspace}/texts/a.jsonl"
    plan = make_plan(
        [Corpus(corpus="a", files=raw, text_key="title,text", weight=1)],
        PlanSettings(),
        declared={},
    )
    write_plan(workspace / "plan.json", plan)
    path = repeats(workspace, plan, text_key=("title,text",), min_characters=3)
    assert read_cuts(path, plan.shards[0].name).tolist() == [
        *[(1, 0, 0, 7), (2, 0, 0, 7), (2, 1, 0, 10)]
    ]
    tokenize_batch(
        output=workspace / "shards",
        tokenizer=workspace / "tokenizer",
        plan=workspace / "plan.json",
        batch="a-00000",
        summary=workspace / "summary.json",
        text_key=("title,text",),
        repeats=path,
    )
    titles, bodies = (
        read_manifest(workspace / f"shards/{plan.shards[0].name}_{key}")
        for key in ("title", "text")
    )
    assert [titles["documents"], titles["empty_documents"]] == [1, 1]
    assert [bodies["documents"], bodies["empty_documents"]] == [2, 0]
    assert titles["filtered_documents"] == bodies["filtered_documents"] == 1


def test_other_repeats_write_a_shard_again(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpora(workspace)
    plan = planned(workspace, shard_bytes=10**9)
    lines = repeats(workspace, plan, **SETTINGS["lines"])
    tokenized(workspace, plan, repeats=lines)
    capsys.readouterr()
    tokenized(workspace, plan, repeats=lines, workers=2)
    assert capsys.readouterr().out.count("already complete") == len(plan.shards)
    tokenized(workspace, plan, repeats=repeats(workspace, plan, **SETTINGS["words"]))
    assert "already complete" not in capsys.readouterr().out


def test_a_frequent_passage_fills_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ROWS", 100)
    monkeypatch.setattr(module, "_PART_ROWS", 250)
    rows = np.zeros(1000, PASSAGE)
    rows["hash"] = np.where(np.arange(1000) % 10, np.uint64(7), np.arange(1000) << 54)
    rows["begin"], rows["document"] = 1, np.arange(1000)
    with RowsWriter(tmp_path / "rows") as writer:
        writer.add("a/0", rows)
    sizes = []
    load = np.fromfile
    monkeypatch.setattr(
        np, "fromfile", lambda *args: sizes.append(len(entries := load(*args))) or entries
    )
    find_repeats([tmp_path / "rows"], output=tmp_path / "cuts")
    assert max(sizes) < 100
    cuts = read_cuts(tmp_path / "cuts", "a/0")
    assert cuts.dtype == CUT
    assert cuts["document"].tolist() == [i for i in range(1000) if i % 10 and i > 1]


# ---- Mistakes and damage ----


def test_files_left_by_a_killed_stage_do_not_count(workspace: Path) -> None:
    write_corpora(workspace)
    plan = planned(workspace, shard_bytes=3000)
    path = repeats(workspace, plan, **SETTINGS["lines"])
    expected = path.read_bytes()
    (workspace / ".repeats.rows.parts").mkdir()
    for part in range(3):
        (workspace / f".repeats.rows.parts/{part}").write_bytes(b"\1" * 16 * 5)
    find_repeats(sorted((workspace / "hashed").iterdir()), output=path)
    assert path.read_bytes() == expected
    assert not [*workspace.glob(".repeats*")]


@pytest.mark.fault("damaged file")
def test_damaged_and_missing_files_are_user_errors(workspace: Path) -> None:
    write_corpora(workspace)
    plan = planned(workspace, shard_bytes=10**9)
    path = repeats(workspace, plan, **SETTINGS["lines"])
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a file of rows, or damaged; remove it and rerun"):
        tokenized(workspace, plan, repeats=path)
    with pytest.raises(UserError, match="no such file"):
        find_repeats([workspace / "none"], output=workspace / "x")
    with pytest.raises(UserError, match="no file given"):
        find_repeats([], output=workspace / "x")
    with pytest.raises(UserError, match="edge_words: 9: not below half of min_words 9"):
        repeats(workspace, plan, unit="words", min_words=9, edge_words=9)
