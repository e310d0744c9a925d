"""`try-filters` shows the counts that tokenization would have, and examples with their places."""

import json
import re
from pathlib import Path

import pytest

from tests.support.filtered import documents, run, write
from tests.support.html_page import Page
from tokamake.errors import UserError
from tokamake.report.filter_samples import changes
from tokamake.report.try_filters import try_filters

FILTERS = "length: {min_characters: 50}, regex: {drop: lorem}, regex: {replace: é}"
CONFIG = f"corpora: corpora.tsv\ntokenize:\n  filters: [{FILTERS}]\n"
TABLE = "corpus\tfiles\tweight\tfilters\nweb\traw.jsonl\t1\t\nplain\traw.jsonl\t1\t[]\n"


@pytest.fixture
def trial(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, a table of corpora and a raw file."""
    monkeypatch.chdir(workspace)
    write(Path("raw.jsonl"), documents(600))
    Path("config.yaml").write_text(CONFIG)
    Path("corpora.tsv").write_text(TABLE)
    return workspace


def shown(capsys: pytest.CaptureFixture[str], **options: object) -> str:
    capsys.readouterr()
    try_filters(Path("config.yaml"), **options)  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_counts_are_those_of_tokenize(trial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, documents=1000)
    manifest = run(trial, [Path("raw.jsonl")], "out", filters=FILTERS)
    assert text.startswith(
        f"web: 600 documents of 1 file; all filters keep {manifest['documents']:,} "
    )
    assert "plain" not in text
    tables = text.partition("examples of")[0]
    seen = re.findall(r"^  seen +(\d+)$", tables, re.MULTILINE)
    assert seen == [str(entry["documents"]) for entry in manifest["filters"]]
    length, regex, replaced = manifest["filters"]
    sums = length["dropped"]["number of characters below 50"]
    mean, characters = f"{sums['value'] / sums['documents']:.4g}", f"-{sums['characters']:,}"
    cells = [str(sums["documents"]), f"{sums['documents'] / 600:.1%}", mean, characters]
    assert re.search(r"dropped: number of characters below 50 +" + " +".join(cells), tables)
    matches = regex["dropped"]["number of matches in text above 0"]["documents"]
    assert re.search(rf"dropped: number of matches in text above 0 +{matches} ", tables)
    removed = replaced["changed"]["characters"]
    assert re.search(rf"changed .* -{removed:,}$", tables, re.MULTILINE)
    assert "s/MB" in tables


def test_examples_name_the_line(trial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (trial / "raw.jsonl").read_text().splitlines()]
    text = shown(capsys, examples=2)
    dropped = re.findall(
        r"dropped: number of characters below 50, (\d+) · raw.jsonl:(\d+)\n    (.*)", text
    )
    assert len(dropped) == 2
    for number, line, example in dropped:
        assert rows[int(line) - 1]["text"] == example
        assert len(example) == int(number)
    changed = re.findall(r"changed · raw.jsonl:(\d+)\n    (.*)", text)
    assert len(changed) == 2
    for line, example in changed:
        assert "[-é-]" in example
        assert rows[int(line) - 1]["text"].startswith(example.replace("[-é-]", "é").rstrip("…"))
    assert "examples" not in shown(capsys, examples=0)


def test_the_sample_and_the_page_repeat(trial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages, texts = [], []
    for name in ("a.html", "b.html"):
        texts.append(shown(capsys, documents=100, page=Path(name)).replace(name, "page"))
        pages.append((trial / name).read_text())
    first, second = (re.sub(r"[\d.e-]+ s/MB", "", text) for text in texts)
    assert first == second
    first, second = (re.sub(r"[\d.e-]+ s/MB", "", text) for text in pages)
    assert first == second
    assert "web: 100 documents" in texts[0]
    assert "http" not in pages[0]
    page = Page(trial / "a.html")
    assert page.texts[:2] == ["Filters on a sample of documents"] * 2
    assert "web" in page.texts
    assert pages[0].count("<details>") == 3


def test_removed_paragraphs_are_marked_as_a_whole(
    trial: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prose = [f"Sentence {number} of this page ends with a mark." for number in range(8)]
    menu = [f"entry {number} of a long menu that has no mark at its end" for number in range(9)]
    write(Path("raw.jsonl"), [{"text": "\n".join([*prose[:2], *menu, *prose[2:], menu[0]])}])
    Path("config.yaml").write_text("corpora: corpora.tsv\ntokenize:\n  filters: [c4]\n")
    text = shown(capsys, page=trial / "page.html")
    assert f"⏎{prose[1]}⏎[-{menu[0]}⏎{menu[1]}⏎" in text
    assert f"{menu[8]}⏎-]{prose[2]}⏎" in text
    assert "[…" in text
    assert text.count("[-") == 1
    assert "{+" not in text
    page = (trial / "page.html").read_text()
    assert page.count("<del>") == 1
    assert "<ins>" not in page


def test_added_characters_have_a_plus(trial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("raw.jsonl"), [{"text": "write to a@b.com"}])
    Path("config.yaml").write_text("corpora: corpora.tsv\ntokenize:\n  filters: [pii]\n")
    text = shown(capsys)
    assert re.search(r"change in characters\n", text)
    assert re.search(r"changed +1 +100.0% +\+12\n", text)


def test_settings_that_are_not_tried_are_named(
    trial: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not tried" not in shown(capsys)
    settings = "  deduplicate: true\n  near_duplicates: fineweb\n  repeats: lines\n"
    Path("config.yaml").write_text(CONFIG + settings)
    text = shown(capsys, page=trial / "page.html")
    note = (
        "not tried: tokenize.deduplicate, tokenize.near_duplicates, tokenize.repeats: they compare"
    )
    assert f"\n{note} all documents\n" in text
    assert f"{note} all documents" in Page(trial / "page.html").texts
    Path("config.yaml").write_text(CONFIG + "  deduplicate: data\n")
    assert "not tried: tokenize.deduplicate: it compares all documents\n" in shown(capsys)


ENDLESS = """
import time
from tokamake.data.filters import DocumentFilter

class Filter(DocumentFilter):
    def apply(self, document):
        while True:
            time.sleep(0.01)
"""
BROKEN = """
from tokamake.data.filters import DocumentFilter

class Filter(DocumentFilter):
    def apply(self, document):
        if document.text.startswith("lorem"):
            raise ValueError("<lorem>")
"""


@pytest.mark.parametrize(
    ("policy", "action"),
    [("stop", "stop: a job stops at the first one"), ("quarantine", "quarantine: set aside")],
)
def test_bad_documents_are_listed(
    trial: Path, capsys: pytest.CaptureFixture[str], policy: str, action: str
) -> None:
    Path("broken.py").write_text(BROKEN)
    lines = ["bad", '{"text": "lorem \\u001b[2J"}', '{"text": "dolor \\u001b[2J\\nsit"}'] * 4
    Path("raw.jsonl").write_text("\n".join(lines))
    Path("config.yaml").write_text(
        f"corpora: corpora.tsv\ntokenize:\n  on_bad_document: {policy}\n"
        '  filters: [broken.py, regex: {drop: "dolor"}]\n'
    )
    text = shown(capsys, documents=11, page=trial / "page.html")
    assert text.startswith("web: 11 documents of 1 file; all filters keep 0 (0.0%), 8 bad docu")
    assert "raw.jsonl:2: filter broken.py failed (ValueError: <lorem>); fix the filter" in text
    assert "raw.jsonl:1: not valid JSON" in text
    assert f"bad documents (tokenize.on_bad_document: {action})\n" in text
    assert "\n  and 3 more\n" in text
    assert re.search("quarantined: ValueError +4 +57.1%", text)
    assert "    dolor \N{REPLACEMENT CHARACTER}[2J⏎sit\n" in text
    assert "\x1b" not in text
    assert "and 3 more" in Page(trial / "page.html").texts


def test_the_time_of_a_filter_includes_documents_on_which_it_fails(
    trial: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("endless.py").write_text(ENDLESS)
    write(Path("raw.jsonl"), [{"text": "x" * 1000}] * 2)
    Path("config.yaml").write_text(
        "corpora: corpora.tsv\ntokenize:\n  filter_seconds: 0.2\n  filters: [endless.py]\n"
    )
    text = shown(capsys)
    assert re.search("quarantined: time limit +2 +100.0%", text)
    (speed,) = re.findall(r"endless\.py, ([\d.]+) s/MB", text)
    assert float(speed) >= 200  # at least 0.4 s for 2,000 bytes


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            CONFIG,
            {"corpus": ("none",)},
            "--corpus none: not in corpora.tsv; name one of web, plain",
        ),
        (CONFIG, {"corpus": ("plain",)}, "corpora.tsv:3: plain has no filters; set tokenize.filt"),
        (CONFIG, {"documents": 0}, "--documents 0: give at least 1"),
        (CONFIG, {"examples": -1}, "--examples -1: give 0 or more"),
        ("corpora: corpora.tsv\n", {}, "config.yaml: no corpus has filters; set tokenize.filters"),
        ("corpora: null\n", {}, "config.yaml: corpora: names no table; give one with raw files"),
        ("[]", {}, "config.yaml: not a config; name the config file of a workflow"),
        (CONFIG.replace("min_char", "min_chr"), {}, "config.yaml: tokenize: filters.0: length: "),
    ],
)
def test_a_mistake_is_one_line(
    trial: Path, config: str, options: dict[str, object], message: str
) -> None:
    (trial / "config.yaml").write_text(config)
    with pytest.raises(UserError) as error:
        try_filters(Path("config.yaml"), **options)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_other_files_of_a_corpus_are_mistakes(trial: Path) -> None:
    for files, message in (
        ("hf://datasets/a/b", "hf://datasets/a/b: an address, which only the workflow"),
        ("gone.jsonl", "gone.jsonl: no such file"),
    ):
        (trial / "corpora.tsv").write_text(TABLE.replace("raw.jsonl", files))
        with pytest.raises(UserError, match=message):
            try_filters(Path("config.yaml"))


def test_changes_leave_out_the_end_of_cut_texts() -> None:
    assert changes("one two", "one 2") == [("", "one "), ("-", "two"), ("+", "2")]
    assert changes("a-b c d…", "a c d e…") == [("", "a"), ("-", "-b"), ("", " c d"), ("", "…")]
    assert changes("a b…", "a c…") == [("", "a "), ("-", "b"), ("+", "c"), ("", "…")]
