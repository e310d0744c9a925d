"""Rows of question files: positives by passage, draws by row, batches of any composition."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.finetunes import write_vocabulary
from tests.support.question_files import questions, write_questions
from tokamake.config.finetune import FinetuneTask
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.train.objectives.retrieval.rows import QuestionRows, read_rows

NUMBER, LENGTH = 23, 12


def rows_of(folder: Path, contents: list[dict[str, Any]], **settings: Any) -> QuestionRows:
    file = write_questions(folder / "train.json", contents)
    task = FinetuneTask(name="retrieval", **settings)
    return read_rows([file], task, tokenizer=write_vocabulary(folder), sequence_length=LENGTH)


def texts_of(passages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each.get("title") or "", each["text"]) for each in passages]


def test_labels_name_passages_and_all_positives(tmp_path: Path) -> None:
    contents = questions(NUMBER, 0)
    rows = rows_of(tmp_path, contents, hard_negatives=2)
    known: dict[int, tuple[str, str]] = {}
    for label, row in zip(rows.labels, contents, strict=True):
        negatives = row["hard_negative_ctxs"] or row["negative_ctxs"]
        expected = texts_of([row["positive_ctxs"][0], *negatives[:2]])
        own = label[: rows.num_passages]
        assert np.count_nonzero(own) == len(expected)
        for number, text in zip(own[own > 0].tolist(), expected, strict=True):
            assert known.setdefault(number, text) == text
        same = [other for other in contents if other["question"] == row["question"]]
        positives = {text for other in same for text in texts_of(other["positive_ctxs"])}
        numbers = {*label[rows.num_passages :].tolist()} - {0}
        assert len(numbers) == len(positives)
        assert {known[number] for number in numbers if number in known} <= positives
    assert len({*known.values()}) == len(known)
    assert rows.num_short == sum(
        len(row["hard_negative_ctxs"] or row["negative_ctxs"]) < 2 for row in contents
    )


def test_draws_of_a_row_depend_on_no_other_row(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, questions(NUMBER, 0), hard_negatives=1, positive="drawn")

    def labels(epoch: int, size: int) -> np.ndarray:
        parts = [
            rows.micro_batch(part, size, num_labels=1, epoch=(3, epoch)).labels[: len(part)]
            for part in np.array_split(np.arange(NUMBER), -(-NUMBER // size))
        ]
        return np.concatenate(parts)

    np.testing.assert_array_equal(labels(0, 1), labels(0, 8))
    assert (labels(0, 8) != labels(1, 8)).any()
    assert len({*labels(0, 8)[:, 0]} | {*labels(1, 8)[:, 0]}) > len({*rows.labels[:, 0]})


def test_texts_have_special_tokens_and_padding(tmp_path: Path) -> None:
    row = {
        "question": "w1 w2",
        "positive_ctxs": [{"title": "a b x y a b x", "text": "w1 w3 " * 20}],
        "hard_negative_ctxs": [{"title": "", "text": "w4"}],
    }
    rows = rows_of(tmp_path, [row])
    batch = rows.micro_batch(np.array([0]), 2, num_labels=1, multiple=4)
    vocabulary = (tmp_path / "vocab.txt").read_text().split()

    def shown(tokens: np.ndarray, padding: np.ndarray) -> list[str]:
        return [
            " ".join(vocabulary[n] for n in row[~p]) for row, p in zip(tokens, padding, strict=True)
        ]

    assert shown(batch.tokens, batch.is_padding) == ["[CLS] w1 w2 [SEP]", "[CLS]"]
    assert shown(batch.passages, batch.is_passage_padding) == [
        "[CLS] a b x y [SEP] w1 w3 w1 w3 w1 [SEP]",  # the title is at most half of it
        "[CLS] [SEP] w4 [SEP]",
        *["[CLS]"] * 2,
    ]
    assert batch.passages.shape[1] % 4 == batch.tokens.shape[1] % 4 == 0
    assert not batch.labels[1].any()
    assert rows.num_cut == 1


def test_the_digest_is_of_all_contents(tmp_path: Path) -> None:
    contents = questions(5, 0)
    digests = {rows_of(tmp_path, contents).digest, rows_of(tmp_path, contents[::-1]).digest}
    contents[0]["positive_ctxs"][0]["text"] += " w1"
    assert len(digests | {rows_of(tmp_path, contents).digest}) == 3


def test_questions_without_a_positive_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = questions(4, 0)
    contents[1]["positive_ctxs"] = []
    assert len(rows_of(tmp_path, contents)) == 3
    assert "train.json: 1 questions without a positive left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="no question with a positive passage; name other files"):
        rows_of(tmp_path, contents[1:2])


def test_short_sequences_are_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path)
    assert open_tokenizer(path)
    with pytest.raises(UserError, match="sequence_length: 4: too small for"):
        read_rows([], FinetuneTask(name="retrieval"), tokenizer=path, sequence_length=4)
