"""Bits per byte of any text: those of `evaluate` on the same files, on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.llamas import write_confident
from tests.support.ranks import spawn
from tokamake.checkpoint.detect import open_any
from tokamake.config.tasks import TaskSettings
from tokamake.data.tokenizers import open_tokenizer
from tokamake.evaluate.evaluate import evaluate
from tokamake.evaluate.evaluate_task import evaluate_task
from tokamake.evaluate.scorer import Scorer
from tokamake.evaluate.tasks import text
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.layout import InferenceLayout, Peers
from tokamake.inference.model import InferenceModel
from tokamake.runtime.ranks import Ranks

LAYOUTS = (
    InferenceLayout(),
    InferenceLayout(fsdp=True),
    InferenceLayout(tensor_parallel_size=2),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 400 tokens and a context of 32."""
    return write_confident(tmp_path_factory.mktemp("model"), vocab_size=400, context=32)


def test_scores_are_those_of_evaluate(model: Path, sampled: Path, tmp_path: Path) -> None:
    data = [str(sampled / "raw/docs/docs-00.jsonl")]
    common = {"checkpoint": model, "tokenizer": sampled / "tokenizer"}
    evaluate(data=tuple(data), max_tokens=500, output=tmp_path / "a.json", **common)
    settings = json.dumps({"data": data, "max_tokens": 500})
    evaluate_task("text", settings=settings, output=tmp_path / "b.json", **common)
    typed = {"data": tuple(data), "settings": '{"data": ["other"], "max_tokens": 500}'}
    evaluate_task("text", output=tmp_path / "c.json", **typed, **common)
    expected = json.loads((tmp_path / "a.json").read_text())["overall"]
    for name in ("b.json", "c.json"):
        assert json.loads((tmp_path / name).read_text())["scores"] == pytest.approx(expected)


def on_ranks(model: Path, tokenizer: Path, data: str) -> list[dict[str, Any]]:
    """Scores with each layout, on the first rank."""
    size = dist.get_world_size()
    ranks = Ranks(dist.get_rank(), size, dist.get_rank(), size)
    task = TaskSettings(name="text", data=(data,), max_tokens=700)
    scores = []
    for layout in LAYOUTS:
        peers = Peers(ranks, torch.device("cpu"))
        driven = DrivenModel(InferenceModel(open_any(model), layout, peers=peers), size)
        with driven.driven() as drives:
            if drives:
                scorer = Scorer(driven, open_tokenizer(tokenizer), sequence_length=32, batch_size=8)
                scores.append(text.evaluate(scorer, task))
    return scores


@pytest.mark.ranks
def test_ranks_give_the_scores_of_one_process(model: Path, sampled: Path, tmp_path: Path) -> None:
    data, tokenizer = str(sampled / "raw/docs/docs-00.jsonl"), sampled / "tokenizer"
    settings = json.dumps({"data": [data], "max_tokens": 700})
    output = tmp_path / "alone.json"
    evaluate_task("text", checkpoint=model, tokenizer=tokenizer, settings=settings, output=output)
    expected = json.loads(output.read_text())["scores"]
    scores, others = spawn(on_ranks, 2, model, tokenizer, data)
    assert len(scores) == len(LAYOUTS)
    assert others == []
    for each in scores:
        assert each == pytest.approx(expected, rel=1e-5)
