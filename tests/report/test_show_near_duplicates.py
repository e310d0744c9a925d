"""`show-near-duplicates` shows the kept document of a cluster, and what differs in the others."""

import gzip
import json
from pathlib import Path

import pytest

from tests.support.warc_files import conversion
from tests.support.wikipedia_dumps import multistream, page
from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.find_near_duplicates import find_near_duplicates
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import write_plan
from tokamake.data.corpus.sign_documents import sign_documents
from tokamake.errors import UserError
from tokamake.report.show_near_duplicates import show_near_duplicates

pytestmark = pytest.mark.usefixtures("folder")
WORDS = [f"word{number}" for number in range(60)]
TEXT = " ".join(WORDS)
NEAR = TEXT.replace("word50", "other")
OTHERS = ["nothing like it", *(f"{word} alone" for word in WORDS[:3])]
TEXTS = [OTHERS[0], TEXT, OTHERS[1], NEAR, OTHERS[2], NEAR + " end", OTHERS[3]]
FOUND = (
    "…ord47 word48 word49 [-word50-]{+other+} word51 word52 word53 word54 word55 word56 word57 …"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_raw(kind: str) -> Path:
    """Write the texts in a raw file of some kind."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    pages = [page(number, f"T{number}", text) for number, text in enumerate(TEXTS, 5)]
    content = {
        "jsonl": lines,
        "jsonl.gz": gzip.compress(lines),
        "warc": b"".join(map(conversion, TEXTS)),
        "warc.gz": b"".join(gzip.compress(conversion(text)) for text in TEXTS),
        "xml.bz2": multistream(pages, pages_a_stream=3),
    }[kind]
    path = Path(f"raw.{kind}")
    path.write_bytes(content)
    return path


def table_of(path: Path) -> Path:
    """The table of near-duplicates of a raw file."""
    corpus = Corpus(corpus="a", files=str(path), weight=1)
    plan = make_plan([corpus], PlanSettings(), declared={})
    write_plan(Path("plan.json"), plan)
    sign_documents(plan=Path("plan.json"), batch="a-00000", output=Path("a.rows"), bands=50, rows=2)
    table = Path("all.parquet")
    find_near_duplicates(
        [Path("a.rows")], plan=Path("plan.json"), output=Path("all.rows"), table=table
    )
    return table


PLACES = {
    "jsonl": lambda number: f"byte {sum(len(t) + 13 for t in TEXTS[:number])}",
    "jsonl.gz": lambda number: f"number {number + 1}",
    "warc": lambda number: f"byte {sum(len(conversion(t)) for t in TEXTS[:number])}",
    "warc.gz": lambda number: f"number {number}",
    "xml.bz2": lambda number: f"number {number + 5}",  # the id of the page
}


@pytest.mark.parametrize("kind", PLACES)
def test_the_kept_document_and_the_differences_are_shown(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table, place = table_of(write_raw(kind)), PLACES[kind]
    capsys.readouterr()
    show_near_duplicates(table, documents=1, max_characters=80)
    assert capsys.readouterr().out.splitlines() == [
        "all.parquet: 2 documents near to 1 kept before",
        "",
        f"1. 3 documents, kept: raw.{kind}: {place(1)}",
        f"   {TEXT[:80]}…",
        f"   dropped: raw.{kind}: {place(3)}",
        f"   {FOUND}",
        "   and 1 more",
    ]


def test_texts_that_are_gone_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    raw = write_raw("jsonl")
    table = table_of(raw)
    lines = raw.read_text().splitlines(keepends=True)
    raw.write_text("".join(lines[:2]))  # the kept one is left
    capsys.readouterr()
    show_near_duplicates(table)
    printed = capsys.readouterr().out
    assert TEXT[:100] in printed
    assert printed.count("(not found: the file has moved or changed") == 2
    raw.unlink()
    show_near_duplicates(table)
    assert capsys.readouterr().out.count("(not found: ") == 3


def test_mistakes_are_one_line() -> None:
    table = table_of(write_raw("jsonl"))
    with pytest.raises(UserError, match=r"--clusters 0: give at least 1"):
        show_near_duplicates(table, clusters=0)
    with pytest.raises(UserError, match=r"all\.rows: is no table of near-duplicates \(.*name near"):
        show_near_duplicates(Path("all.rows"))
    with pytest.raises(UserError, match=r"gone\.parquet: is no table of near-duplicates"):
        show_near_duplicates(Path("gone.parquet"))
