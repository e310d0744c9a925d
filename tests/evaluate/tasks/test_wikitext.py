"""Word-level perplexity of WikiText: Megatron's formulas on the logits of transformers."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.llamas import write_confident
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.evaluate.evaluate_task import evaluate_task
from tokamake.evaluate.tasks.wikitext import detokenize

CONTEXT = 32
TEXT = """ = Robert Boulter =\x20

 Robert Boulter is an English film , television and theatre actor . He had a guest @-@ starring role
 = = Career = =\x20
 " It was good " , he said ; in 2 @,@ 000 ( or 2 @.@ 5 ) he had the director 's role : N years of
 the players ' games [ sic ] at 30 ° Celsius !
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the dogs ' bowl", "the dogs' bowl"),
        ("guest @-@ starring 1 @,@ 000 2 @.@ 5", "guest-starring 1,000 2.5"),
        (
            "one , two ; three : four . five ! six ? seven",
            "one, two; three: four. five! six? seven",
        ),
        ("Boulter et al . , 2004 )", "Boulter et al., 2004 )"),
        ("what ? ! . ; , yes", "what ?! .;, yes"),
        ("a ( b ) [ c ] { d } \" e \" ' f '", "a (b) [c] {d} \"e\" 'f'"),
        ("= = = = A = = = =", "==== A ===="),
        ("= = = A = = =", "=== A ==="),
        ("= = A = =", "== A =="),
        ("30 ° C", "30°C"),
        ("end \n begin", "end\nbegin"),
        ("the director 's N men", "the director's 1 men"),
    ],
)
def test_text_is_detokenized(text: str, expected: str) -> None:
    assert detokenize(text) == expected


@pytest.mark.extra("lm-eval", "lm_eval")
def test_text_is_detokenized_as_by_lm_eval() -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    draw = random.Random(1)
    parts = [*":;.!?,()[]{}'\"=°N\n", "@-@", "@,@", "@.@", "'s", "s '", "words", "2"]
    drawn = [" ".join(draw.choices(parts, k=draw.randint(1, 12))) for _ in range(20_000)]
    for text in (TEXT, *drawn):
        assert detokenize(text) == wikitext_detokenizer({"page": text})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 400 tokens and a context of 32."""
    return write_confident(tmp_path_factory.mktemp("model"), vocab_size=400, context=CONTEXT)


def score(model: Path, sampled: Path, folder: Path, **settings: object) -> dict[str, Any]:
    evaluate_task(
        "wikitext",
        checkpoint=model,
        tokenizer=sampled / "tokenizer",
        settings=json.dumps(settings),
        batch_size=3,
        output=folder / "scores.json",
    )
    scores: dict[str, Any] = json.loads((folder / "scores.json").read_text())["scores"]
    return scores


@pytest.mark.parametrize("stride", [5, 32])
def test_scores_are_megatrons_formulas_on_the_logits_of_transformers(
    model: Path, sampled: Path, tmp_path: Path, stride: int
) -> None:
    path = tmp_path / "wiki.test.tokens"
    path.write_text(TEXT)
    scores = score(model, sampled, tmp_path, data=[str(path)], stride=stride)
    tokens = open_tokenizer(sampled / "tokenizer").encode_batch([detokenize(TEXT)])[0]
    oracle = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    losses: dict[int, float] = {}
    for first in range(0, len(tokens) - 1, stride):
        window = tokens[first : first + CONTEXT + 1]
        with torch.no_grad():
            rows = oracle(torch.tensor([window[:-1]])).logits[0].log_softmax(-1)
        for place, token in enumerate(window[1:]):
            losses.setdefault(first + place + 1, -float(rows[place, token]))
    assert [*losses] == [*range(1, len(tokens))]
    loss = sum(losses.values()) / (len(tokens) - 1)
    words = len(TEXT.strip().split(" "))
    ratio = (len(tokens) - 1) / (words - 1)
    assert (scores["tokens"], scores["words"]) == (len(tokens), words)
    assert scores["loss"] == pytest.approx(loss, abs=1e-4)
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert scores["adjusted_perplexity"] == pytest.approx(math.exp(min(20, loss * ratio)), rel=1e-4)


def test_mistakes_are_explained(model: Path, sampled: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("word\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, message in (
        ("nowhere", "no such file"),
        ("empty", "less than two words; name other files"),
        ("binary", "not UTF-8; name text files"),
    ):
        with pytest.raises(UserError, match=message):
            score(model, sampled, tmp_path, data=[str(tmp_path / name)])
    with pytest.raises(UserError, match=r"settings: stride: 0"):
        score(model, sampled, tmp_path, data=["a"], stride=0)
