"""Samples of text while a run trains: greedy as in transformers, training stays as it is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.forked import train
from tests.support.llamas import reference
from tests.support.runs import ARCHITECTURE, hashes, make_run, read_weights, train_here
from tokamake.config.resolved_run import read_run
from tokamake.config.training import TrainSettings
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.train.hooks.samples import FILE, SampledPrompt, continued

SAMPLES: dict[str, Any] = {"sample_interval": 2, "sample_tokens": 6, "sample_temperature": 0}


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> Path:
    """Tokenizer whose text is the ids of its tokens."""
    folder = root / "ids"
    train_tokenizer(kind="ids", vocab_size=120, eod=0, output=folder)
    return folder


def samples(config: Path) -> list[dict[str, Any]]:
    lines = (read_run(config).output / FILE).read_text().splitlines()
    return [json.loads(line) for line in lines]


def greedy(config: Path, step: int, prompt: str) -> str:
    """Continuation by transformers, with the weights of a step."""
    _, weights, _ = read_weights(read_run(config).output / f"global_step{step}")
    model = reference(ARCHITECTURE)
    model.load_state_dict(weights)
    tokens = torch.tensor([[*map(int, prompt.split())]])
    out = model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=0)
    new = out[0, tokens.shape[1] :].tolist()
    return " ".join(str(token) for token in new if token)


def assert_greedy(config: Path) -> None:
    written = samples(config)
    assert [each["step"] for each in written] == [2] * 4 + [4] * 4 + [6] * 4
    assert len({each["prompt"] for each in written}) == 4
    for each in written:
        assert each["corpus"] == "corpus"
        assert each["text"].strip() == greedy(config, each["step"], each["prompt"])


@pytest.mark.usefixtures("lone_rank")
def test_samples_are_greedy_and_leave_training_as_it_is(root: Path, tokenizer: Path) -> None:
    settings: dict[str, Any] = {"dropout": {"hidden": 0.1}, "tokenizer": tokenizer}
    plain = make_run(root, "plain", **settings)
    sampled = make_run(root, "sampled", **settings, **SAMPLES)
    for config in (plain, sampled):
        assert train_here(config, until_step=4) == 0
        assert train_here(config) == 0  # a later job continues the file
    assert hashes(sampled) == hashes(plain)
    assert_greedy(sampled)
    assert not (read_run(plain).output / FILE).exists()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
    "pipeline": {"parallel": {"pipeline_parallel_size": 2}},
    "context": {"parallel": {"context_parallel_size": 2}},
    "sharded": {"zero_stage": 3},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 3},
}
QUICK = ("pipeline",)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.grid]) for n in LAYOUTS],
)
def test_ranks_that_share_a_model_write_the_same(root: Path, tokenizer: Path, layout: str) -> None:
    plain = make_run(root, f"{layout}-plain", **LAYOUTS[layout])
    sampled = make_run(root, layout, tokenizer=tokenizer, **LAYOUTS[layout], **SAMPLES)
    train(plain, ranks=2)
    assert " | sample: " in train(sampled, ranks=2)
    assert hashes(sampled) == hashes(plain)
    assert_greedy(sampled)


@pytest.mark.usefixtures("lone_rank")
def test_averaged_weights_do_not_change_by_samples(root: Path, tokenizer: Path) -> None:
    """An optimizer that switches between two sets of weights would round them."""
    settings: dict[str, Any] = {
        "optimizer": {"name": "schedule_free_adamw", "learning_rate": 0.01},
        "schedule": {"name": "constant"},
        "evaluation_interval": 6,
        "save_interval": 6,
    }
    plain = make_run(root, "averaged", **settings)
    sampled = make_run(root, "averaged-samples", tokenizer=tokenizer, **settings, **SAMPLES)
    for config in (plain, sampled):
        assert train_here(config) == 0
    assert hashes(sampled) == hashes(plain)


@pytest.mark.usefixtures("lone_rank")
def test_draws_follow_the_softmax_and_are_the_same_at_each_step(
    root: Path, tokenizer: Path
) -> None:
    """Tokens by transformers' logits, and the numbers of NumPy's generator of the seed."""
    drawing = {**SAMPLES, "sample_temperature": 0.7, "sample_prompts": ["7 8 9", "11"]}
    config = make_run(root, "drawn", tokenizer=tokenizer, **drawing)
    assert train_here(config) == 0
    chances = np.random.default_rng(11).random((2, 6))
    for number, each in enumerate(samples(config)):
        model = reference(ARCHITECTURE)
        model.load_state_dict(
            read_weights(read_run(config).output / f"global_step{each['step']}")[1]
        )
        tokens = [*map(int, each["prompt"].split())]
        for chance in chances[number % 2]:
            logits = model(torch.tensor([tokens])).logits[0, -1].double()
            shares = (logits / 0.7).softmax(-1).cumsum(-1)
            tokens.append(int((shares <= chance).sum()))
        assert each["text"].split() == [*map(str, tokens[len(each["prompt"].split()) :])]


@pytest.mark.usefixtures("lone_rank")
def test_stated_prompts_are_continued(root: Path, tokenizer: Path) -> None:
    settings = {"train_steps": 2, "evaluation_steps": 0, "sample_prompts": ["7 8 9", "11"]}
    config = make_run(root, "stated", tokenizer=tokenizer, **SAMPLES, **settings)
    assert train_here(config) == 0
    assert [(each["corpus"], each["prompt"]) for each in samples(config)] == [
        ("", "7 8 9"),
        ("", "11"),
    ]
    long = {**settings, "sample_prompts": [" ".join(["5"] * 16)]}
    config = make_run(root, "long", tokenizer=tokenizer, **SAMPLES, **long)
    with pytest.raises(UserError, match="its 16 tokens fill the sequence_length 16; shorten it"):
        train_here(config)


@pytest.mark.usefixtures("lone_rank")
def test_a_run_without_a_tokenizer_is_refused(root: Path) -> None:
    config = make_run(root, "speechless", **SAMPLES)
    with pytest.raises(UserError, match="the run has no tokenizer to write text with"):
        train_here(config)


def test_an_end_of_document_is_no_text(tokenizer: Path) -> None:
    opened = open_tokenizer(tokenizer)
    assert continued(opened, SampledPrompt([5, 6], "5 6"), [7, 0]).strip() == "7"
    assert continued(opened, SampledPrompt([5, 6], "5 6"), [0]) == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "masked"}, "sample_interval: 5: models of objective masked do not continue"),
        ({"evaluation_steps": 0}, "with evaluation_steps 0, no validation split has prompts"),
    ],
)
def test_settings_that_cannot_write_text_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(sample_interval=5, **settings)


def test_prompts_need_an_interval() -> None:
    with pytest.raises(ValueError, match="sample_prompts: without sample_interval"):
        TrainSettings(sample_prompts=("a",))
