"""Texts of a model: the same for any division into jobs; prompts of a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.llamas import write_confident
from tokamake.data.corpus.prompts import read_prompts
from tokamake.errors import UserError
from tokamake.generate.generate_texts import generate_texts
from tokamake.inference.sampling_settings import Sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_confident(tmp_path_factory.mktemp("model"), vocab_size=400, context=48)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": {"text": "The"}, "t": 0.75}, {"prompt": {"text": "def "}, "t": None}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def texts(model: Path, sampled: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    sampling = Sampling(temperature=1.0, top_k=0, seed=options.pop("seed", 3))
    generate_texts(
        checkpoint=model,
        tokenizer=sampled / "tokenizer",
        sampling=sampling,
        max_new_tokens=8,
        output=output / "texts.jsonl",
        **options,
    )
    return [json.loads(line) for line in (output / "texts.jsonl").read_text().splitlines()]


def test_jobs_write_parts_of_the_same_texts(model: Path, sampled: Path, tmp_path: Path) -> None:
    whole = texts(model, sampled, tmp_path, num_texts=5)
    parts = texts(model, sampled, tmp_path, num_texts=2)
    parts += texts(model, sampled, tmp_path, num_texts=3, first=2, batch_size=1)
    assert whole == parts
    assert len({line["text"] for line in whole}) == 5
    assert whole != texts(model, sampled, tmp_path, num_texts=5, seed=4)


def test_each_prompt_is_continued_several_times(
    model: Path, sampled: Path, prompts: Path, tmp_path: Path
) -> None:
    options = {"prompts": prompts, "prompt_key": "prompt.text", "continuations": 3}
    lines = texts(model, sampled, tmp_path, num_texts=6, toxicity_key="t", **options)
    assert [line["prompt_number"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert [line["prompt_toxicity"] for line in lines] == [0.75] * 3 + [None] * 3
    assert {line["prompt"] for line in lines[:3]} == {"The"}
    assert len({line["text"] for line in lines[:3]}) == 3
    part = texts(model, sampled, tmp_path, num_texts=2, first=2, toxicity_key="t", **options)
    assert part == lines[2:4]
    with pytest.raises(UserError, match=r"prompts.jsonl: has 6 continuations, fewer than 7"):
        texts(model, sampled, tmp_path, num_texts=7, **options)
    with pytest.raises(UserError, match=r"continuations: 0: too small; give 1 or more"):
        texts(model, sampled, tmp_path, num_texts=1, **{**options, "continuations": 0})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', r"prompts.jsonl:1.*: no field 'prompt'; its fields are text: fix the ke"),
        ('{"prompt": " ", "t": 0}', "field prompt holds no prompt"),
        ('{"prompt": "a"}', "no field 't'"),
        ('{"prompt": "a", "t": 2}', "field t: 2 is not a number from 0 to 1"),
        ("", "prompts.jsonl: "),
    ],
)
def test_a_wrong_prompt_is_named(prompts: Path, line: str, message: str) -> None:
    prompts.write_text(f"{line}\n" if line else "")
    with pytest.raises(UserError, match=message):
        read_prompts(prompts, key="prompt", toxicity_key="t")
