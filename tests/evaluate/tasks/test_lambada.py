"""LAMBADA: the label is the whole last word, or the last token."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.bos_tokenizers import write_bos_tokenizer
from tests.support.llamas import write_confident
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.errors import UserError
from tokamake.evaluate.evaluate_task import evaluate_task

CONTEXT = 24
PASSAGES = [
    "He had a list of words, and she had a list of numbers",
    "return the value of the function",
    "a b",
    "This passage is much longer than what the model can read at once, so it is cut on its left",
    "the file of the file of the file of the file",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 400 tokens and a context of 24."""
    return write_confident(tmp_path_factory.mktemp("model"), vocab_size=400, context=CONTEXT)


def score(model: Path, sampled: Path, folder: Path, passages: list[str], **settings: object) -> Any:
    data = folder / "lambada.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    evaluate_task(
        "lambada",
        checkpoint=model,
        tokenizer=sampled / "tokenizer",
        settings=json.dumps({"data": [str(data)], **settings}),
        batch_size=2,
        output=folder / "scores.json",
    )
    return json.loads((folder / "scores.json").read_text())["scores"]


def divided(tokenizer: Tokenizer, text: str, *, strict: bool) -> tuple[list[int], list[int]]:
    if not strict:
        tokens = tokenizer.encode_batch([text])[0]
        return tokens[:-1], tokens[-1:]
    context, _, word = text.rpartition(" ")
    encoded = tokenizer.encode_batch([context, f" {word}"])
    return encoded[0], encoded[1]


@pytest.mark.parametrize("strict", [True, False])
def test_scores_follow_from_the_logits_of_transformers(
    model: Path, sampled: Path, tmp_path: Path, *, strict: bool
) -> None:
    oracle = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    tokenizer = open_tokenizer(sampled / "tokenizer")
    passages = [*PASSAGES, _expected_passage(oracle, tokenizer)]
    right, loss = 0, 0.0
    for text in passages:
        context, label = divided(tokenizer, text, strict=strict)
        tokens = [*context[-(CONTEXT + 1 - len(label)) :], *label]
        with torch.no_grad():
            rows = oracle(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)[-len(label) :]
        right += rows.argmax(-1).tolist() == label
        loss -= sum(float(row[token]) for row, token in zip(rows, label, strict=True))
    scores = score(model, sampled, tmp_path, passages, strict=strict)
    assert 0 < right < len(passages)
    assert scores["passages"] == len(passages)
    assert scores["accuracy"] == right / len(passages)
    assert scores["perplexity"] == pytest.approx(math.exp(loss / len(passages)), rel=1e-4)


def _expected_passage(oracle: transformers.LlamaForCausalLM, tokenizer: Tokenizer) -> str:
    """A passage whose last word is the most likely token, whose text begins with a space."""
    for start in range(400):
        context = tokenizer.decode([start, 5, 9])
        tokens = tokenizer.encode_batch([context.strip()])[0]
        if not tokens:
            continue
        with torch.no_grad():
            best = int(oracle(torch.tensor([tokens])).logits[0, -1].argmax())
        word = tokenizer.decode([best])
        is_word = word.startswith(" ") and word.strip() and len(word.split()) == 1
        if is_word and tokenizer.encode_batch([word])[0] == [best]:
            return f"{context.strip()}{word}"
    pytest.fail("no context is followed by a word")


def test_a_label_is_what_follows_its_context_in_the_passage(
    model: Path, sampled: Path, tmp_path: Path
) -> None:
    """Llama 2's normalizer puts a space before each text, so also before a word with one."""
    path = write_bos_tokenizer(sorted((sampled / "raw/docs").glob("*.jsonl")), tmp_path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["pre_tokenizer"] = None
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = open_tokenizer(path)
    passage, context = "return the value", "return the"
    whole, before = tokenizer.encode_batch([passage, context])
    label = whole[len(before) :]
    assert tokenizer.encode_batch([" value"])[0] != label
    oracle = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        rows = oracle(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)[-len(label) :]
    loss = -sum(float(row[token]) for row, token in zip(rows, label, strict=True))
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"text": passage}))
    evaluate_task(
        "lambada",
        checkpoint=model,
        tokenizer=path,
        settings=json.dumps({"data": [str(data)]}),
        output=tmp_path / "one.json",
    )
    scores = json.loads((tmp_path / "one.json").read_text())["scores"]
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_a_passage_of_one_word_is_refused(model: Path, sampled: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="passage 2: 'word': has no words before it"):
        score(model, sampled, tmp_path, ["two words", "word"])
