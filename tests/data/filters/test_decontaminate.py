"""Documents that share long sequences of words with evaluation sets are dropped or cut."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.decontamination import ITEM, sentences, write_items
from tokamake.config.filters import complete_filters, parse_filters, source_digest
from tokamake.config.tasks import TaskSettings
from tokamake.config_files import validate
from tokamake.data.filters import Document, Drop
from tokamake.data.filters._run_and_count import load_filters
from tokamake.data.filters.decontaminate import Filter, cut
from tokamake.errors import UserError

WORDS = ITEM.split()


def ready(**options: Any) -> Filter:
    filter = validate(Filter, options, "decontaminate")
    filter.setup()
    return filter


@pytest.fixture
def arc(tmp_path: Path) -> str:
    return write_items(tmp_path / "arc.jsonl", [{"text": ITEM}])


@pytest.mark.parametrize(
    "text",
    [
        ITEM,
        ITEM.upper(),
        ITEM.replace(" ", ",\n-- "),
        f"{sentences(300)} {ITEM} {sentences(300, seed=2)}",
        f"{sentences(50)} {ITEM}",
        f"{ITEM} {sentences(50)}",
        " ".join(WORDS[:13]),
        " ".join(WORDS[-13:]),
        f"Früher 我爱 {ITEM}",
    ],
    ids=["exact", "case", "punctuation", "middle", "end", "start", "first", "last", "unicode"],
)
def test_planted_contamination_is_found(arc: str, text: str) -> None:
    verdict = ready(files={"arc": arc}).apply(Document(text, {}))
    assert verdict is not None
    assert verdict.reason == "overlap with arc above 0"
    assert 0 < (verdict.value or 0) <= 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "...",
        sentences(500),
        " ".join(WORDS[:12]),
        " ".join([*WORDS[:12], "other", *WORDS[12:24]]),
        " ".join([*WORDS[:12], "other", *WORDS[13:24]]),
        " ".join(reversed(WORDS)),
    ],
)
def test_clean_text_and_twelve_words_stay(arc: str, text: str) -> None:
    document = Document(text, {})
    assert ready(files={"arc": arc}).apply(document) is None
    assert document.metrics == {}


def test_short_items_count_as_a_whole(tmp_path: Path) -> None:
    items = [{"text": " ".join(WORDS[:8])}, {"text": "one two three four five six seven"}]
    filter = ready(files={"short": write_items(tmp_path / "short.jsonl", items)})
    assert filter.apply(Document(f"so {items[0]['text']} then", {})) == (
        "overlap with short above 0",
        0.8,
    )
    assert filter.apply(Document(" ".join(WORDS[:7]), {})) is None
    assert filter.apply(Document(items[1]["text"], {})) is None  # below min_words


def test_the_document_names_the_set_with_the_most_words(tmp_path: Path) -> None:
    other = sentences(40, seed=9)
    files = {
        "arc": write_items(tmp_path / "arc.jsonl", [{"text": ITEM}]),
        "other": write_items(tmp_path / "other.jsonl", [{"text": other}]),
    }
    document = Document(f"{' '.join(WORDS[:14])} and {other}", {})
    verdict = ready(files=files).apply(document)
    assert verdict == ("overlap with other above 0", 40 / 55)
    assert document.metrics == {"overlap with arc": 14 / 55, "overlap with other": 40 / 55}


def test_an_item_of_two_sets_counts_for_both(tmp_path: Path) -> None:
    path = write_items(tmp_path / "a.jsonl", [{"text": ITEM}, {"text": ITEM}])
    document = Document(ITEM, {})
    assert ready(files={"a": path, "b": path}).apply(document) == ("overlap with a above 0", 1)
    assert document.metrics == {"overlap with a": 1, "overlap with b": 1}


def test_several_fields_are_searched_alone_and_joined(tmp_path: Path) -> None:
    record = {"q": {"stem": " ".join(WORDS[:9])}, "choices": WORDS[9:14]}
    path = write_items(tmp_path / "qa.jsonl", [record])
    filter = ready(files={"qa": {"path": path, "fields": ["q.stem", "choices"]}})
    assert filter.apply(Document(record["q"]["stem"], {})) == ("overlap with qa above 0", 1)  # type: ignore[index]
    assert filter.apply(Document(" ".join(WORDS[1:14]), {})) == ("overlap with qa above 0", 1)
    assert filter.apply(Document(" ".join(WORDS[1:9]), {})) is None


def reference_ngrams(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    found = list(re.finditer(r"[^\W_]+", text))
    return [match[0].lower() for match in found], [match.span() for match in found]


def reference_pieces(text: str, known: set[tuple[str, ...]]) -> list[str]:
    """The loop of Megatron's filter_ngrams.py: cut at the first n-gram, go on with the rest."""
    pieces, rest = [], text
    while rest:
        words, spans = reference_ngrams(rest)
        found = [
            (i, n)
            for i in range(len(words))
            for n in range(13, 7, -1)
            if i + n <= len(words) and tuple(words[i : i + n]) in known
        ]
        if not found:
            pieces.append(rest)
            break
        first, size = found[0]
        begin, end = spans[first][0], spans[first + size - 1][1]
        position = begin - 200
        while position > 0 and rest[position] not in ".!?":
            position -= 1
        if position > 0 and position + 1 > 200:
            pieces.append(rest[: position + 1])
        position = end + 200
        while position < len(rest) and rest[position] not in ".!?":
            position += 1
        rest = rest[position + 1 :]
    return [piece for piece in pieces if len(piece) > 200]


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_megatrons(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    items = [sentences(int(n), seed=int(n) + seed) for n in random.integers(6, 40, 5)]
    path = write_items(tmp_path / "set.jsonl", [{"text": item} for item in items])
    known = set()
    for item in items:
        words, _ = reference_ngrams(item)
        size = min(13, len(words))
        known |= {tuple(words[i : i + size]) for i in range(len(words) - size + 1) if size >= 8}
    parts = []
    for number in range(8):
        parts.append(sentences(int(random.integers(1, 200)), seed=1000 + seed * 100 + number))
        words = items[int(random.integers(5))].split()
        first = int(random.integers(0, 3))
        parts.append(" ".join(words[first:]) + str(random.choice([".", " "])))
    text = " ".join(parts)
    expected = reference_pieces(text, known)
    document = Document(text, {})
    verdict = ready(files={"set": path}, action="cut").apply(document)
    if not expected:
        assert verdict is not None
    else:
        assert verdict is None
        assert document.text == "\n\n".join(expected)


def test_a_cut_ends_sentences_on_both_sides() -> None:
    text = "First one. Second one. BAD here. Third one. Fourth one."
    begin = text.index("BAD")
    assert cut(text, [(begin, begin + 3)], characters=0) == [
        "First one. Second one.",
        " Third one. Fourth one.",
    ]
    assert cut(text, [(begin, begin + 3)], characters=10) == ["First one.", " Fourth one."]
    assert cut(text, [(begin, begin + 3)], characters=100) == [""]
    assert cut("no end BAD no end", [(7, 10)], characters=0) == [""]
    assert cut(text, [(begin, begin + 3), (begin + 1, begin + 4)], characters=0) == [
        "First one. Second one.",
        " Third one. Fourth one.",
    ]


def test_a_document_of_too_many_pieces_is_dropped(arc: str) -> None:
    text = " ".join([f"{sentences(200)} {ITEM}."] * 5 + [sentences(200)])
    document = Document(text, {})
    assert ready(files={"arc": arc}, action="cut").apply(document) is None
    assert len(document.text.split("\n\n")) == 6
    verdict = ready(files={"arc": arc}, action="cut", max_pieces=5).apply(Document(text, {}))
    assert verdict == ("number of pieces without texts of arc above 5", 6)
    verdict = ready(files={"arc": arc}, action="cut").apply(Document(f"A. {ITEM}. B.", {}))
    assert isinstance(verdict, Drop)
    assert verdict == ("number of pieces without texts of arc below 1", 0)


def test_the_order_of_items_does_not_matter(tmp_path: Path) -> None:
    items = [{"text": sentences(30, seed=seed)} for seed in range(50)]
    texts = [sentences(100, seed=99) + item["text"] for item in items]
    paths = [
        write_items(tmp_path / f"{n}.jsonl", order) for n, order in enumerate((items, items[::-1]))
    ]
    filters = [ready(files={"set": path}, action="cut", cut_characters=9) for path in paths]
    for text in texts:
        documents = [Document(text, {}) for _ in filters]
        verdicts = [f.apply(d) for f, d in zip(filters, documents, strict=True)]
        assert verdicts[0] == verdicts[1]
        assert documents[0] == documents[1]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": "a b c"}\n{"q": 1}\n', {}, "set.jsonl:2: no field text; its fields are q: fix"),
        ('{"text": 3}\n', {}, "set.jsonl:1: field text holds neither a text nor a list of texts"),
        ('{"text": "a"\n', {}, "set.jsonl:1: "),
        ('{"text": "few words"}\n', {}, "set has no text of at least 8 words; fix fields, or"),
        ("", {}, "set has no text of at least 8 words"),
        (None, {}, "set.jsonl: no such file; fix the list of files"),
        ("", {"tasks": ["a"]}, "tasks are known to the workflow only; name evaluation sets in f"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, content: str | None, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "set.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        ready(files={"set": str(path)}, **options)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_contents_of_the_files_are_part_of_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    write_items(path, [{"text": ITEM}])
    ((_, options),) = parse_filters(f"decontaminate: {{files: {{set: {path}}}}}")[0].items()
    assert options == {"files": {"set": {"path": [str(path)]}}}
    before = source_digest("decontaminate", options)
    assert len(before) == 64
    write_items(path, [{"text": ITEM + "!"}])
    assert source_digest("decontaminate", options) != before
    path.unlink()
    with pytest.raises(UserError, match=r"^filter decontaminate: .*set\.jsonl: no such file"):
        load_filters([{"decontaminate": options}])


LAMBADA = TaskSettings(name="lambada", data=("a.jsonl",), text_key="passage")  # type: ignore[call-arg]
WIKITEXT = TaskSettings(name="wikitext", data=("w.txt",))
REMOTE = TaskSettings(name="lambada", data=("hf://datasets/a/b",))
FROM_LAMBADA = {"path": ["a.jsonl"], "fields": ["passage"]}
FROM_WIKITEXT = {"path": ["w.txt"], "fields": ["text"]}
OWN = {"path": ["own.jsonl"]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"files": {"lambada": FROM_LAMBADA, "wiki": FROM_WIKITEXT}}),
        ({"tasks": ["wiki"]}, {"files": {"wiki": FROM_WIKITEXT}}),
        ({"files": {"own": OWN}}, {"files": {"own": OWN}}),
        (
            {"files": {"own": OWN}, "tasks": ["wiki"], "action": "cut"},
            {"files": {"wiki": FROM_WIKITEXT, "own": OWN}, "action": "cut"},
        ),
    ],
)
def test_tasks_of_the_config_become_files(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    tasks = {"lambada": LAMBADA, "wiki": WIKITEXT}
    entries = [{"decontaminate": options}, {"length": {"min_words": 3}}]
    assert complete_filters(entries, tasks) == (
        {"decontaminate": expected},
        {"length": {"min_words": 3}},
    )


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        ({}, {}, "evaluate.tasks is empty; name evaluation sets in files"),
        ({"a": WIKITEXT}, {"tasks": ["b"]}, "tasks: b: evaluate.tasks has a; fix the name"),
        ({"far": REMOTE}, {}, "task far has no local files; list the other tasks in `tasks`, and"),
    ],
)
def test_tasks_without_local_files_are_refused(
    tasks: dict[str, TaskSettings], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        complete_filters([{"decontaminate": options}], tasks)
