"""Recall by answers in passages; files of questions and passages."""

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex

from tokamake import files
from tokamake.errors import UserError
from tokamake.retrieval.evaluate_retrieval import evaluate_retrieval
from tokamake.retrieval.evidence import read_evidence
from tokamake.retrieval.found import Found, write_found
from tokamake.retrieval.questions import read_questions

PASSAGES = [
    (10, "The river Seine flows through Paris.", "Seine"),
    (11, 'He said "Café  Noir" was closed, don\'t worry.', "Cafés"),
    (12, "Born in 1879, he moved to New York-City later.", "A man"),
    (13, "Nothing here.", "Nothing"),
    (14, "PARISIAN life", "Life"),
]
QUESTIONS: list[tuple[str, list[str]]] = [
    ("which city", ["paris"]),
    ("which bar", ["Tabac", "cafe\u0301 noir"]),
    ("where to", ["New York City"]),
    ("what else", ["New York - City"]),
]


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has passages, questions and results of a search."""
    monkeypatch.chdir(tmp_path)
    lines = ["id\ttext\ttitle\n"]
    for number, text, title in PASSAGES:
        quoted = '"{}"'.format(text.replace('"', '""')) if '"' in text else text
        lines.append(f"{number}\t{quoted}\t{title}\n")
    Path("passages.tsv").write_text("".join(lines))
    rows = [f"{text}\t{json.dumps(answers)}\n" for text, answers in QUESTIONS]
    Path("questions.tsv").write_text("".join(rows))
    write([[14, 10, 13], [11, 10, 12], [12, 10, 13], [13, 12, -1]])


def write(ids: list[list[int]], queries: list[int] | None = None, **made_from: str) -> None:
    array = np.array(ids)
    scores = np.where(array < 0, -np.inf, -np.arange(array.shape[1])).astype(np.float32)
    numbers = np.array(queries if queries is not None else range(len(ids)))
    facts = {"request": "r", "searched": {}, "queries": {"made_from": made_from}}
    write_found(Path("found.json"), Found(numbers, array, scores), facts=facts)


def evaluated(**options: Any) -> dict[str, Any]:
    arguments = {
        "questions": Path("questions.tsv"),
        "passages": [Path("passages.tsv")],
        "output": Path("recall.json"),
        **options,
    }
    evaluate_retrieval(Path("found.json"), **arguments)
    return files.read_sealed_json(Path("recall.json"), "")


def ranks() -> list[int | None]:
    return [json.loads(line)["rank"] for line in Path("recall.questions.jsonl").open()]


def test_the_first_passage_with_an_answer_counts() -> None:
    result = evaluated()
    # "Parisian" is another word than "Paris", "York-City" has a symbol between the words.
    assert ranks() == [2, 1, None, 2]
    assert result["recall"] == {"1": 0.25}
    assert result["num_questions"] == 4
    assert result["found"] == {"request": "r", "top_k": 3, "searched": {}}
    first = result["samples"][0]
    assert (first["question"], first["rank"]) == ("which city", 2)
    assert [(each["id"], each["hit"]) for each in first["found"]] == [
        *((14, False), (10, True), (13, False)),
    ]
    assert first["found"][0]["title"] == "Life"
    assert len(result["samples"][3]["found"]) == 2


def test_queries_in_another_order_belong_to_their_questions() -> None:
    write([[13, 12, -1], [14, 10, 13], [11, 10, 12], [12, 10, 13]], [3, 0, 1, 2])
    evaluated()
    assert ranks() == [2, 1, None, 2]


def test_answers_can_be_regular_expressions() -> None:
    rows = [
        "a\t['par\\w+ LIFE$']\n",
        "b\t['^he said', 'x']\n",
        'c\t["New.York"]\n',
        "d\t['18\\d\\d']\n",
    ]
    Path("questions.tsv").write_text("".join(rows))
    evaluated(match="regex")
    assert ranks() == [1, 1, 1, 2]


def has_answer(answers: list[str], text: str) -> bool:
    """DPR's rule, as in dpr/data/qa_validation.py."""

    def tokens(value: str) -> list[str]:
        found = regex.findall(
            r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]", unicodedata.normalize("NFD", value)
        )
        return [each.lower() for each in found]

    words = tokens(text)
    return any(
        tokens(answer) == words[start : start + len(tokens(answer))]
        for answer in answers
        for start in range(len(words))
    )


def test_recall_equals_a_plain_count_with_dprs_rule() -> None:
    draw = np.random.default_rng(3)
    vocabulary = ["a", "B", "é", "e", "10", "-", ".", "New"]
    texts = [" ".join(draw.choice(vocabulary, 12)) for _ in range(300)]
    asked = [(f"q{n}", [" ".join(draw.choice(vocabulary, 2))]) for n in range(80)]
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(texts)]
    Path("p1.jsonl").write_text("\n".join(lines[:100]) + "\n\n")
    Path("p2.jsonl").write_text("\n".join(lines[100:]))
    rows = [json.dumps({"question": text, "answers": answers}) for text, answers in asked]
    Path("questions.jsonl").write_text("\n".join(rows))
    ids = np.stack([draw.permutation(300)[:120] for _ in asked])
    write(ids.tolist())
    passages = [Path("p1.jsonl"), Path("p2.jsonl")]
    result = evaluated(questions=Path("questions.jsonl"), passages=passages)
    hits = np.array(
        [
            [has_answer(answers, texts[n]) for n in row]
            for row, (_, answers) in zip(ids, asked, strict=True)
        ]
    )
    expected = {str(k): hits[:, :k].any(axis=1).mean() for k in (1, 5, 20, 100)}
    assert result["recall"] == pytest.approx(expected)
    assert 0 < expected["1"] < expected["20"]


def test_lists_are_json_or_literals_of_python_and_nothing_else() -> None:
    rows = [
        'a\t["x", "y"]\n',
        "b\t['it''s', \"d'Arc\"]\n",
        '"c ""quoted"""\t"[""Jason\'s Lyric"", \'z\']"\n',
        "\n",
        "d\t['1\\d']\n",
    ]
    Path("questions.tsv").write_text("".join(rows))
    questions = read_questions(Path("questions.tsv"))
    assert [question.answers for question in questions] == [
        *(["x", "y"], ["its", "d'Arc"], ["Jason's Lyric", "z"], ["1\\d"]),
    ]
    assert questions[2].text == 'c "quoted"'
    Path("questions.tsv").write_text("a\t[__import__('os').mkdir('made')]\n")
    with pytest.raises(UserError, match=r"questions.tsv:1: answers are not a list; write a list"):
        read_questions(Path("questions.tsv"))
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b", "questions.tsv:2: 1 fields instead of 2; write question<TAB>"),
        ("b\t['x']\ty", "questions.tsv:2: 3 fields instead of 2"),
        ("\t['x']", "questions.tsv:2: no question; add its text"),
        ("b\t[]", r"questions.tsv:2: answers are \[\]; write a list of texts"),
        ("b\t'x'", "questions.tsv:2: answers are x; write a list"),
        ("b\t[1]", r"questions.tsv:2: answers are \[1\]; write a list of texts"),
        ("b\t[' ']", "questions.tsv:2: the answer ' ' has no letter, digit or symbol; remove it"),
        ("\"b\t['x']", r'questions.tsv:2: a field begins with a " that its line does not close'),
        ("b\t" + "[" * 500, "questions.tsv:2: answers are not a list"),
        (b"b\t['\xff']", "questions.tsv:2: not UTF-8; convert the file"),
    ],
)
def test_broken_questions_are_named_by_line(row: str | bytes, message: str) -> None:
    row = row if isinstance(row, bytes) else row.encode()
    Path("questions.tsv").write_bytes(b"a\t['x']\n" + row + b"\nc\t['x']\n")
    with pytest.raises(UserError, match=message) as error:
        read_questions(Path("questions.tsv"), match="string")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"questions.jsonl:1: not valid JSON \(.*\); fix the line"),
        ("[]", "questions.jsonl:1: not a JSON object"),
        ('{"answers": ["x"]}', "questions.jsonl:1: no question"),
        ('{"question": "a"}', "questions.jsonl:1: answers are not a list"),
        ("", "questions.jsonl: no question; write rows"),
    ],
)
def test_broken_objects_are_named_by_line(line: str, message: str) -> None:
    Path("questions.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        read_questions(Path("questions.jsonl"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", r"'\(' is not a regular expression \(.*\); fix it"), ("x*", "matches every passage")],
)
def test_wrong_patterns_are_named_by_line(pattern: str, message: str) -> None:
    Path("questions.tsv").write_text(f"a\t{json.dumps([pattern])}\n")
    with pytest.raises(UserError, match=f"questions.tsv:1: the answer .*{message}"):
        read_questions(Path("questions.tsv"), match="regex")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\ta\tb\n", "p.tsv:1: the header is '1 a b'; begin the file with id<TAB>text<TAB>title"),
        ("id\ttext\ttitle\n1\ta\n", "p.tsv:2: 2 fields, but the header has 3; fix the row"),
        ("id\ttext\nx\ta\n", "p.tsv:2: the id is 'x'; give each passage a whole number"),
        ("id\ttext\n-1\ta\n", "p.tsv:2: the id is '-1'"),
        ('id\ttext\n1\t"a\n2\tb\n', r'p.tsv:2: a field begins with a "'),
    ],
)
def test_broken_passages_are_named_by_line(text: str, message: str) -> None:
    Path("p.tsv").write_text(text)
    with pytest.raises(UserError, match=message):
        [*read_evidence([Path("p.tsv")])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 1.5, "text": "a"}', "the id is '1.5'"),
        ('{"text": "a"}', "the id is 'None'"),
        ('{"id": 1}', "text or title is not a text"),
        ('{"id": 1, "text": "a", "title": null}', "text or title is not a text"),
    ],
)
def test_broken_objects_of_passages_are_named(line: str, message: str) -> None:
    Path("p.jsonl").write_text(line)
    with pytest.raises(UserError, match=f"p.jsonl:1: {message}"):
        [*read_evidence([Path("p.jsonl")])]


def test_results_of_another_file_of_questions_are_refused() -> None:
    ids = [[10, 11, 12]] * len(QUESTIONS)
    write(ids, questions=files.sha256(Path("questions.tsv")))
    evaluated()
    Path("questions.tsv").write_text(Path("questions.tsv").read_text().replace("paris", "rome"))
    with pytest.raises(UserError, match=r"the search had other questions than questions.tsv; sear"):
        evaluated()


def test_other_questions_and_passages_are_refused() -> None:
    with Path("questions.tsv").open("a") as file:
        file.write("one more\t['x']\n")
    with pytest.raises(UserError, match=r"found.json: results of 4 queries, questions.tsv has 5"):
        evaluated()
    Path("questions.tsv").write_text(
        "".join(Path("questions.tsv").read_text().splitlines(True)[:4])
    )
    text = Path("passages.tsv").read_text()
    Path("passages.tsv").write_text(re.sub("12\t.*\n", "", text))
    with pytest.raises(
        UserError, match=r"no passage has the id 12, which found.json has found; giv"
    ):
        evaluated()
    Path("passages.tsv").write_text(text + "12\ttwice\tTwice\n")
    with pytest.raises(UserError, match=r"--passages: two have the id 12; give each its own"):
        evaluated()
    assert not Path("recall.json").exists()
    with pytest.raises(UserError, match=r"gone.tsv: cannot be read \(No such file"):
        evaluated(passages=[Path("gone.tsv")])
