"""Rows equal those of transformers' tokenizer; micro batches are filled up."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import transformers

from tests.support.finetunes import SPECIAL, WORDS, write_rows, write_vocabulary
from tokamake.config.finetune import FinetuneTask
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.train.objectives.classification.data import Example
from tokamake.train.objectives.classification.rows import (
    NO_CLASS,
    LabeledRows,
    RowLimits,
    read_rows,
    special_tokens,
)

PAIRS = [("a b", "x y w1"), ("w1 w2 w3 w4", "a"), ("b", "w5 w6 w7 w8 w9 w10 w11")]
TASK = FinetuneTask(name="rte")


def make_rows(
    folder: Path, examples: Iterable[Example], *, task: FinetuneTask = TASK, length: int = 12
) -> LabeledRows:
    path = write_vocabulary(folder)
    tokenizer = open_tokenizer(path)
    return LabeledRows(
        examples,
        task,
        tokenizer=tokenizer,
        special=special_tokens(tokenizer, path),
        limits=RowLimits(length, task.own.get("max_question_tokens", length - 2)),
    )


def pairs() -> list[Example]:
    return [Example((first,), second, "entailment", "f:1") for first, second in PAIRS]


def of_transformers(folder: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.BertTokenizer(str(write_vocabulary(folder)))


@pytest.mark.parametrize("length", [8, 12])
def test_pairs_equal_those_of_transformers(tmp_path: Path, length: int) -> None:
    rows = make_rows(tmp_path, pairs(), length=length)
    batch = rows.micro_batch(np.arange(3), 3, num_labels=3, multiple=1)
    theirs = of_transformers(tmp_path)(
        [first for first, _ in PAIRS],
        [second for _, second in PAIRS],
        padding=True,
        truncation="only_second",
        max_length=length,
        return_tensors="np",
    )
    assert (batch.tokens == theirs["input_ids"]).all()
    assert (batch.types == theirs["token_type_ids"]).all()
    assert (batch.padding_mask == theirs["attention_mask"]).all()
    assert rows.num_cut == (1 if length == 8 else 0)


def test_single_texts_equal_those_of_transformers(tmp_path: Path) -> None:
    texts = ["a b x", "w1 w2 w3 w4 w5 w6 w7"]
    rows = make_rows(
        tmp_path,
        [Example((text,), None, "1", "f:1") for text in texts],
        task=FinetuneTask(name="cola"),
        length=6,
    )
    batch = rows.micro_batch(np.arange(2), 2, num_labels=2, multiple=1)
    theirs = of_transformers(tmp_path)(
        texts, padding=True, truncation=True, max_length=6, return_tensors="np"
    )
    assert (batch.tokens == theirs["input_ids"]).all()
    assert not batch.types.any()


def test_a_choice_has_a_sequence_for_each_option(tmp_path: Path) -> None:
    task = FinetuneTask(name="race", max_question_tokens=2)
    example = Example(("a b x", "w1", "w2", "w3"), "y y", "C", "f:1")
    rows = make_rows(tmp_path, [example], task=task)
    batch = rows.micro_batch(np.arange(1), 2, num_labels=1, multiple=8)
    names = [*SPECIAL, *WORDS]
    words = [[names[token] for token in row] for row in batch.tokens]
    assert batch.tokens.shape == (8, 8)
    assert words[0] == ["[CLS]", "a", "b", "[SEP]", "y", "y", "[SEP]", "[PAD]"]
    assert words[3][:6] == ["[CLS]", "w3", "[SEP]", "y", "y", "[SEP]"]
    assert batch.labels.tolist() == [2, NO_CLASS]
    assert words[4] == ["[CLS]", *["[PAD]"] * 7]


def test_numbers_of_a_regression_may_be_missing(tmp_path: Path) -> None:
    examples = [Example(("a",), "b", label, "f:1") for label in ("2.5", None)]
    rows = make_rows(tmp_path, examples, task=FinetuneTask(name="stsb"))
    assert rows.labels.dtype == np.float32
    assert rows.labels[0] == 2.5
    assert np.isnan(rows.labels[1])
    assert rows.num_labeled == 1


def test_the_digest_is_that_of_tokens_and_labels(tmp_path: Path) -> None:
    first, *others = pairs()
    same = make_rows(tmp_path, [first, *others]).digest
    assert make_rows(tmp_path, pairs()).digest == same
    changed = [first._replace(label="not_entailment"), *others]
    assert make_rows(tmp_path, changed).digest != same
    assert make_rows(tmp_path, pairs(), length=8).digest != same


@pytest.mark.parametrize(
    ("task", "label", "message"),
    [
        ("rte", "1", "label '1': rte has entailment, not_entailment; fix it"),
        ("stsb", "high", "label 'high': not a number"),
    ],
)
def test_other_labels_are_refused(tmp_path: Path, task: str, label: str, message: str) -> None:
    example = Example(("a",), "b", label, "f.tsv:7")
    with pytest.raises(UserError, match=f"f.tsv:7: {message}"):
        make_rows(tmp_path, [example], task=FinetuneTask(name=task))


def test_files_without_rows_and_other_tokenizers_are_refused(tmp_path: Path, sampled: Path) -> None:
    task = FinetuneTask(name="labeled_text", labels=["no", "yes"])
    path = write_rows(tmp_path / "a.jsonl", [])
    vocabulary = write_vocabulary(tmp_path)
    with pytest.raises(UserError, match=r"a.jsonl: no rows"):
        read_rows([path], task, tokenizer=vocabulary, sequence_length=8)
    with pytest.raises(UserError, match=r"has no \[CLS\], \[SEP\], \[PAD\]; give the tokenizer"):
        read_rows([path], task, tokenizer=sampled / "tokenizer", sequence_length=8)
