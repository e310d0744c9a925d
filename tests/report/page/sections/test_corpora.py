"""Tables of corpora and mixtures on the page: counts, filters with samples, bad documents."""

import json
from pathlib import Path

from tests.support.report_pages import after, shown
from tokamake.data.indexed.manifest_counts import filter_name


def test_tables_of_corpora_and_mixtures_have_the_numbers(results: Path) -> None:
    page = shown(results)
    corpora = page.sections["corpora"]
    assert after(corpora, "median length", 27) == [
        *("code", "2", "20", "6,000", "24.0 kB", "4.00", "0.2500", "300", "128–255"),
        *("a&b", "1", "10", "2,000", "8.0 kB", "4.00", "0.2500", "200", "64–127"),
        *("all", "3", "30", "8,000", "32.0 kB", "4.00", "0.2500", "267", "64–127"),
    ]
    assert after(corpora, "From raw records to documents", 36)[9:] == [
        *("code", "2,033", "7", "1,940", "60", "4", "0", "2", "20"),
        *("a&b", "1,013", "0", "1,000", "0", "2", "0", "1", "10"),
        *("all", "3,046", "7", "2,940", "60", "6", "0", "3", "30"),
    ]
    assert after(corpora, "kind", 7)[1:] == [
        *("code", "responses with HTTP status 404 (Not Found)", "4", "code", "redirects", "3")
    ]
    # Of 12,800 tokens drawn, code gives a quarter, from 0.8 of its 6,000 tokens.
    mixture = page.sections["mixture"]
    assert after(mixture, "epochs", 12) == [
        *("code", "4,800", "75.0%", "–", "25.0%", "0.67"),
        *("a&b", "1,600", "25.0%", "–", "75.0%", "6.00"),
    ]
    assert "a&b: more than 4 epochs. Repeated text teaches less than new text." in mixture


def test_filters_have_counts_and_folded_samples(results: Path) -> None:
    sample = {"hash": "01", "place": "a.jsonl:7"}
    samples = [
        {**sample, "verdict": "kept", "text": "all"},
        {**sample, "verdict": "changed", "text": "one <two> three", "after": "one three"},
        {**sample, "verdict": "dropped", "reason": "too few", "value": 2, "text": "x & y"},
    ]
    dropped = {"too few words": {"documents": 4, "characters": 1200, "value": 10}}
    counts = {"documents": 40, "changed": {}, "dropped": dropped, "metrics": {}}
    metadata = json.loads((results / "data/metadata.json").read_text())
    metadata[0]["filters"] = [
        {"filter": "length", "options": {"min_words": 3}, **counts, "samples": samples}
    ]
    (results / "data/metadata.json").write_text(json.dumps(metadata))
    page = shown(results)
    texts = page.sections["corpora"]
    name = "length (min_words: 3)"
    assert after(texts, "failed on", 7)[1:] == ["code", name, "40", "4", "0", "36"]
    assert after(texts, "mean", 7) == [
        "code",
        name,
        "too few words",
        "4",
        "10.00%",
        "-1,200",
        "2.5",
    ]
    assert after(texts, "Samples of filters", 9) == [
        *("code", name, "x & y", "dropped: too few, 2 · a.jsonl:7"),
        *("one ", "<two> ", "three", "changed · a.jsonl:7", "all"),
    ]
    assert "one <del>&lt;two&gt; </del>three" in (results / "report.html").read_text()


def test_long_options_of_filters_are_cut() -> None:
    sets = {f"set{n}": {"path": [f"data/{n}.jsonl"], "fields": ["q"]} for n in range(3)}
    entry = {"filter": "decontaminate", "options": {"files": sets}}
    assert filter_name(entry) == "decontaminate (files: [set0, set1, set2])"
    long = {"filter": "regex", "options": {"drop": "x" * 100}}
    assert filter_name(long) == f'regex (drop: "{"x" * 53}…)'


def test_quarantined_documents_have_examples(results: Path) -> None:
    shard = results / "data/shards/code"
    shard.mkdir(parents=True)
    entry = {"file": "raw/a.jsonl", "line": 3, "reason": "not JSON", "raw": "<script>{"}
    (shard / "00000.quarantine.jsonl").write_text(json.dumps(entry) + "\n" + "{broken\n5\n" * 3)
    texts = shown(results).sections["corpora"]
    assert after(texts, "Examples of quarantined documents", 6) == [
        *("<script>{", "file raw/a.jsonl, line 3, reason not JSON"),
        *("{broken\n", "00000.quarantine.jsonl"),
        *("5\n", "00000.quarantine.jsonl"),
    ]
    assert sum("quarantine.jsonl" in text for text in texts) == 4  # five examples are shown
