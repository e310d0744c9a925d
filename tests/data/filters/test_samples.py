"""The manifest has samples of each verdict, the same for any parts of the data."""

import random
from itertools import pairwise, product
from pathlib import Path

from tests.support.filtered import FILTERS, documents, run, write
from tokamake.data.filters._samples import _excerpts, smallest


def test_samples_show_what_each_filter_did(workspace: Path) -> None:
    rows = list(documents(600))
    raw = write(workspace / "raw.jsonl", rows)
    filters = run(workspace, [raw], "out", filters=FILTERS)["filters"]
    for entry in filters:
        numbers = {"kept": 0, "changed": 0, "dropped": 0}
        for sample in entry["samples"]:
            path, line = sample["place"].rsplit(":", 1)
            assert path == str(raw)
            text = rows[int(line) - 1]["text"]
            numbers[sample["verdict"]] += 1
            if sample["verdict"] == "changed":
                assert sample["after"].strip("…") in text.replace("é", "")
                assert "é" in sample["text"]
                assert "é" not in sample["after"]
            if sample["verdict"] == "kept" and entry["filter"] == "length":
                assert len(text) >= 50
            if sample.get("reason") == "number of characters below 50":
                assert sample["value"] == len(text) < 50
            assert sample["text"].rstrip("…") in text.replace("é", "") or "é" in text
        dropped = sum(min(3, sums["documents"]) for sums in entry["dropped"].values())
        changed = entry["changed"].get("documents", 0)
        kept = entry["documents"] - changed - sum(s["documents"] for s in entry["dropped"].values())
        expected = {"kept": min(3, kept), "changed": min(3, changed), "dropped": dropped}
        assert numbers == expected


def test_any_short_texts_have_excerpts() -> None:
    texts = ["".join(each) for size in range(5) for each in product("ab\n", repeat=size)]
    for before, after in product(texts, repeat=2):
        assert _excerpts(before, after).keys() <= {"text", "after"}


def test_samples_of_parts_are_those_of_the_whole() -> None:
    numbers = random.Random(1)
    samples = [
        {
            **{"hash": f"{numbers.getrandbits(64):016x}", "place": str(number), "text": "a"},
            **numbers.choice([{"verdict": "kept"}, {"verdict": "dropped", "reason": "x"}]),
        }
        for number in range(300)
    ]
    whole = smallest(samples)
    assert len(whole) == 6
    cuts = (0, 1, 100, 101, 300)
    parts = [smallest(samples[slice(*cut)]) for cut in pairwise(cuts)]
    assert smallest(sample for part in reversed(parts) for sample in part) == whole
    reasons = [sample | {"verdict": "dropped", "reason": sample["place"]} for sample in samples]
    assert len(smallest(reasons)) == 18
