"""Passages that hold most of an item, against plain Python with sets of words."""

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.decontamination import ITEM, sentences, write_items
from tests.support.grids import params
from tokamake.config_files import validate
from tokamake.data.filters import Document, Drop, _idf_index
from tokamake.data.filters.decontaminate import Filter
from tokamake.errors import UserError

SIZE = 5
REASON = "overlap with set at least 0.8 (items below 50 words: up to 1)"


def ready(**options: Any) -> Filter:
    filter = validate(Filter, {"rule": "idf", **options}, "decontaminate")
    filter.setup()
    return filter


def ngrams(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + SIZE]) for i in range(len(words) - SIZE + 1)]


def expected_score(document: list[str], items: list[list[str]], *, score: float) -> float:
    """Highest score of a passage of the document for any item; 0 below the needed one."""
    frequencies = Counter(gram for item in items for gram in {*ngrams(item)})
    idf = {gram: math.log((len(items) + 1) / count) for gram, count in frequencies.items()}
    best = 0.0
    for item in items:
        of_item = {*ngrams(item)}
        total = sum(idf[gram] for gram in of_item)
        needed = 1 - (1 - score) * min(1, max(0, (len(item) - 20) / 30))
        passage: set[tuple[str, ...]] = set()
        misses = 0
        for gram in [*ngrams(document), *[("",)] * 99]:
            misses = 0 if gram in of_item else misses + 1
            passage = passage | {gram} if gram in of_item else passage if misses < 12 else set()
            found = sum(idf[each] for each in passage) / total
            if found >= needed - 1e-9:
                best = max(best, found)
    return best


@pytest.mark.parametrize("seed", params(range(12), range(3)))
@pytest.mark.parametrize("most_items", [1000, 2])
def test_scores_are_the_ones_of_plain_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, most_items: int
) -> None:
    """Also where n-grams of more than two items start no search: none of the planted ones does."""
    monkeypatch.setattr(_idf_index, "_MAX_ITEMS", most_items)
    numbers = random.Random(seed)
    common = [f"c{i}" for i in range(8)]
    items = []
    for number in range(15):
        words = [f"w{number}x{i}" for i in range(numbers.choice([8, 19, 25, 40, 60, 90]))]
        items.append([*words[:4], *common, *words[4:]] if numbers.random() < 0.5 else words)
    path = write_items(tmp_path / "set.jsonl", [{"text": " ".join(item)} for item in items])
    filter = ready(files={"set": path}, score=0.8)
    found = 0
    for _ in range(60):
        words = [f"d{i}" for i in range(numbers.randrange(30))]
        for item in numbers.sample(items, 2):
            changed = [word if numbers.random() > 0.03 else "other" for word in item]
            cut = numbers.choice([0, 0, 2, 6])
            gap = [f"g{i}" for i in range(numbers.choice([0, 3, 7, 8, 30]))]
            middle = numbers.randrange(len(changed))
            words += [*changed[cut:middle], *gap, *changed[middle:], *words[:5]]
        document = Document(" ".join(words), {})
        verdict = filter.apply(document)
        score = expected_score(words, items, score=0.8)
        if score:
            assert verdict == (REASON, pytest.approx(score, abs=1e-5))
            assert document.metrics == {"overlap with set": pytest.approx(score, abs=1e-5)}
            found += 1
        else:
            assert verdict is None
    assert 10 < found < 60


def test_an_item_with_changed_words_is_found(tmp_path: Path) -> None:
    """Each twentieth word is another one: few runs of words are left, but most 5-grams."""
    item = sentences(120)
    changed = [word if i % 20 else "zzz" for i, word in enumerate(item.split())]
    path = write_items(tmp_path / "set.jsonl", [{"text": item}])
    text = f"{sentences(200, seed=2)} {' '.join(changed)} {sentences(200, seed=3)}"
    assert isinstance(ready(files={"set": path}, score=0.7).apply(Document(text, {})), Drop)
    assert ready(files={"set": path}, score=0.9).apply(Document(text, {})) is None


def test_fields_of_an_item_count_as_one_item_for_idf(tmp_path: Path) -> None:
    """All n-grams are in one item each, so that the score is the share of n-grams."""
    question, answer = sentences(40, seed=5), "five words are too few"
    path = write_items(tmp_path / "set.jsonl", [{"q": question, "a": answer}, {"q": ITEM, "a": ""}])
    filter = ready(files={"set": {"path": path, "fields": ["q", "a"]}})
    words = f"{question} {answer}".split()
    assert filter.apply(Document(" ".join(words[3:]), {})) == (
        REASON,
        round(38 / 41, 6),
    )
    assert filter.apply(Document(question, {})) == (REASON, 1)


def test_phrases_of_many_items_alone_do_not_contaminate(tmp_path: Path) -> None:
    phrase = "which of the following statements about this is true"
    items = [f"{phrase} {sentences(30, seed=seed)}" for seed in range(40)]
    path = write_items(tmp_path / "set.jsonl", [{"text": item} for item in items])
    filter = ready(files={"set": path})
    assert filter.apply(Document(f"{phrase} {sentences(100, seed=99)}", {})) is None
    assert filter.apply(Document(f"so: {items[7]}", {})) == (REASON, 1)


def test_a_passage_is_cut_and_each_set_has_its_score(tmp_path: Path) -> None:
    other = sentences(40, seed=9)
    files = {
        "arc": write_items(tmp_path / "arc.jsonl", [{"text": ITEM}]),
        "other": write_items(tmp_path / "other.jsonl", [{"text": other}, {"text": ITEM}]),
    }
    before, after = sentences(300), sentences(300, seed=2)
    document = Document(f"{before} {ITEM} {after}", {})
    filter = ready(files=files, action="cut", cut_characters=0, max_piece_characters=0)
    assert filter.apply(document) is None
    assert document.metrics == {"overlap with arc": 1, "overlap with other": 1}
    assert ITEM not in document.text
    start, end = document.text.split("\n\n")
    assert before.startswith(start)
    assert after.endswith(end.strip())
    assert filter.apply(Document(sentences(50, seed=77), {})) is None
    assert filter.apply(Document("", {})) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_words": 4}, "min_words: 4: below ngram_words 5"),
        ({"rule": "ngrams", "score": 0.5}, "score: 0.5: no effect on rule ngrams; remove it"),
        ({"ngram_words": 9}, "min_words: 8: below ngram_words 9"),
    ],
)
def test_a_mistake_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(Filter, {"rule": "idf", "files": {"a": "a.jsonl"}, **options}, "decontaminate")


def test_a_set_without_long_texts_is_refused(tmp_path: Path) -> None:
    path = write_items(tmp_path / "set.jsonl", [{"text": "only six words are in this"}])
    with pytest.raises(UserError, match=r"set has no text of at least 8 words; fix fields, or"):
        ready(files={"set": path})
