"""Stages of filtered and deduplicated data that are killed at random instants.

A file is whole or absent after a kill, a rerun gives the bytes of a run without kills and removes
what the kill left, and no process of an extractor outlives its stage.
"""

import gzip
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.faults import Inject
from tests.support.forked import contents, run_stage, timed
from tests.support.warc_files import record, response
from tests.support.wikipedia_dumps import multistream, page
from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import read_plan, write_plan

NUM_KILLS = 8
"""Kills of each stage."""
FILTERS = (
    "fix_text, language: en, gopher_quality: {min_words: 5}, gopher_repetition, "
    "c4: {end_marks: false, min_sentences: 1}, fineweb, pii"
)
WORDS = "the of and to that have river house tree walks over under near green old with a small"
OPTIONS = [f"--filters={FILTERS}", "--format="]
SKIP = "--on-bad-document=quarantine"
TOKENIZE = ["--tokenizer={sampled}/tokenizer", "--summary={output}/summary.json"]
QUARANTINE = [SKIP, "--max-bad-fraction=0.5", "--workers=2"]

STAGES = {
    "hash_documents, WARC": ["hash-documents", "--batch=crawl-00000", "--output={output}/rows"],
    "sign_documents, WARC": [
        "sign-documents", "--batch=crawl-00000", *OPTIONS, SKIP, "--output={output}/rows",
    ],
    "sign_documents, Wikipedia": [
        "sign-documents", "--batch=wiki-00000", *OPTIONS, "--output={output}/rows",
    ],
    "hash_passages": [
        "hash-passages", "--batch=wiki-00000", *OPTIONS, "--unit=words", "--output={output}/rows",
    ],
    "find_repeats": ["find-repeats", "{root}/hashed/rows", "--output={output}/rows"],
    "find_near_duplicates": [
        "find-near-duplicates", "{root}/crawl-00000/rows", "{root}/wiki-00000/rows",
        "--output={output}/rows", "--table={output}/table.parquet", "--keys={output}/keys",
        "--workers=2",
    ],
    "tokenize, WARC": [
        "tokenize-batch", "--batch=crawl-00000", "--output={output}", *OPTIONS, *TOKENIZE,
        *QUARANTINE,
    ],
    "tokenize, Wikipedia": [
        "tokenize-batch", "--batch=wiki-00000", "--output={output}", *OPTIONS, *TOKENIZE,
        *QUARANTINE,
    ],
}  # fmt: skip


def texts(number: int) -> list[str]:
    numbers, found = random.Random(number), [""]
    for _ in range(number):
        sentences = [" ".join(numbers.choices(WORDS.split(), k=11)) + "." for _ in range(30)]
        text = " ".join(sentence.capitalize() for sentence in sentences)
        found.append(numbers.choice([text, text, f"{found[-1]} Write to x@example.org."]))
    return found[1:]


def write_raw(folder: Path) -> None:
    pages = [page(number, f"Page {number}", text) for number, text in enumerate(texts(700), 1)]
    (folder / "dump.xml.bz2").write_bytes(multistream(pages, pages_a_stream=20))
    bad = [record("conversion", b"\xff"), response("x", status=404)]
    for name in ("0", "1"):
        html = (f"<html><body><main><p>{text}</p></main></body></html>" for text in texts(400))
        records = [*map(response, html), *bad]
        (folder / f"{name}.warc.gz").write_bytes(b"".join(map(gzip.compress, records)))
    table = [
        Corpus(corpus="crawl", files=f"{folder}/*.warc.gz", weight=1),
        Corpus(corpus="wiki", files=f"{folder}/dump.xml.bz2", weight=1),
    ]
    settings = PlanSettings(shard_bytes=(folder / "dump.xml.bz2").stat().st_size // 2, max_jobs=2)
    write_plan(folder / "plan.json", make_plan(table, settings, declared={}))
    names = [batch.name for batch in read_plan(folder / "plan.json").tokenize_batches]
    assert names == ["crawl-00000", "wiki-00000"]


def comparable(folder: Path) -> dict[str, bytes]:
    """Files of a folder, hidden ones too, without the times in manifests."""
    files = contents(folder)
    for name in files:
        if name.endswith(".json"):
            manifest = json.loads(files[name])
            kept = {key: manifest[key] for key in manifest if key not in ("seconds", "digest")}
            files[name] = json.dumps(kept, sort_keys=True).encode()
    return files


def mark(name: str, value: str) -> None:
    """Name the processes of a stage: its children inherit the variable."""
    os.environ[name] = value


def processes_of(marker: str) -> list[int]:
    """Running processes whose first environment has a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            pass
    return found


@pytest.fixture
def arguments(tmp_path: Path, sampled: Path) -> Callable[[str, str], list[str]]:
    """Arguments of a stage that writes in the folder of a name."""
    write_raw(tmp_path)
    (tmp_path / "log").touch()

    def of(stage: str, name: str) -> list[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        paths = {"root": tmp_path, "output": tmp_path / name, "sampled": sampled}
        plan = f"--plan={tmp_path}/plan.json"
        command, *options = STAGES[stage]
        fill = (option if FILTERS in option else option.format(**paths) for option in options)
        return [command, *fill, *([plan] if command != "find-repeats" else [])]

    return of


@pytest.mark.grid
@pytest.mark.fault("kill of a stage")
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_is_whole_or_absent(
    stage: str, tmp_path: Path, arguments: Callable[[str, str], list[str]], inject: Inject
) -> None:
    log, chance, killed, number = tmp_path / "log", random.Random(55), 0, 0
    if stage == "find_near_duplicates":
        for corpus in ("WARC", "Wikipedia"):
            name = {"WARC": "crawl-00000", "Wikipedia": "wiki-00000"}[corpus]
            timed(arguments(f"sign_documents, {corpus}", name), log)
    if stage == "find_repeats":
        timed(arguments("hash_passages", "hashed"), log)
    timed(arguments(stage, "first"), log)  # the server of the forks starts
    seconds = timed(arguments(stage, "calm"), log)
    expected = comparable(tmp_path / "calm")
    assert expected
    while killed < NUM_KILLS:
        number += 1
        folder, marker = tmp_path / f"{number}", f"{tmp_path}/{number}"
        instant, fault = chance.uniform(0, seconds), partial(mark, "TOKAMAKE_TEST_STAGE", marker)
        code = run_stage(arguments(stage, f"{number}"), log, seconds=instant, fault=fault)
        assert code in (0, -9), log.read_text()
        if code:
            inject()
            killed += 1
            for _ in range(100):
                if not processes_of(f"TOKAMAKE_TEST_STAGE={marker}\0"):
                    break
                time.sleep(0.1)
            assert not processes_of(f"TOKAMAKE_TEST_STAGE={marker}\0")
            for name, content in comparable(folder).items():
                assert name.startswith(".") or "/." in name or content == expected[name], name
            timed(arguments(stage, f"{number}"), log)
        assert comparable(folder) == expected
