"""Pretrained weights stay, the head is new, and the table says so."""

from pathlib import Path

import pytest
import torch

from tests.support.finetunes import prepare, run_here, small_bert
from tests.support.question_files import small_biencoder
from tests.support.random_tensors import random_tensors
from tests.support.runs import write_start
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.config.finetune import FinetuneTask
from tokamake.errors import UserError
from tokamake.finetune.task_head import table, with_task_head

TASK = FinetuneTask(name="rte")


def test_heads_of_pretraining_go_and_that_of_the_task_comes(tmp_path: Path) -> None:
    weights = random_tensors(small_bert(), 5)
    write_start(tmp_path / "bert", small_bert(), weights)
    start = with_task_head(open_any(tmp_path / "bert"), TASK, seed=1)
    assert start.new == ("model.task_head.weight", "model.task_head.bias")
    assert {name.rpartition(".")[0] for name in start.dropped} == {
        "model.masked_token_head",
        "model.masked_token_head.dense",
        "model.masked_token_head.layernorm",
        "model.sentence_order_head",
    }
    source = start.checkpoint.source
    for name in model_tensors.shapes(start.checkpoint.architecture):
        if name not in start.new:
            assert torch.equal(source.read(f"model.{name}"), weights[name])
    head = source.read("model.model.task_head.weight")
    assert head.shape == (2, 32)
    assert 0.01 < head.std() < 0.03
    other = with_task_head(open_any(tmp_path / "bert"), TASK, seed=2).checkpoint.source
    assert not torch.equal(other.read("model.model.task_head.weight"), head)
    lines = table(start).splitlines()
    assert lines[0].split(maxsplit=1) == ["model.task_head.weight", "new: random"]
    assert lines[-1].split() == ["model.sentence_order_head.bias", "dropped"]


def test_a_model_without_a_pooler_gets_one(tmp_path: Path) -> None:
    shape = small_bert(sentence_order_head=False)
    write_start(tmp_path / "bert", shape, random_tensors(shape, 5))
    start = with_task_head(open_any(tmp_path / "bert"), TASK, seed=1)
    assert start.new[:2] == ("model.pooler.weight", "model.pooler.bias")


def test_a_finetuned_model_gets_another_head(tmp_path: Path) -> None:
    run_here(prepare(tmp_path, rows=(8, 6), task={"epochs": 1}))
    finetuned = open_any(tmp_path / "task/finetuned")
    start = with_task_head(finetuned, TASK, seed=1)
    assert start.new == ("model.task_head.weight", "model.task_head.bias")
    assert start.dropped == start.new
    assert not any(key.startswith("optimizer.") for key in start.checkpoint.source)


def test_other_formats_start_from_the_same_weights(tmp_path: Path) -> None:
    write_start(tmp_path / "bert", small_bert(), random_tensors(small_bert(), 5))
    for format in ("hf", "megatron"):
        convert(source=tmp_path / "bert", target=tmp_path / format, format=format)
    starts = [
        with_task_head(open_any(tmp_path / name), TASK, seed=1).checkpoint.source
        for name in ("bert", "hf", "megatron")
    ]
    for key in starts[0]:
        for other in starts[1:]:
            assert torch.equal(other.read(key), starts[0].read(key))


def test_families_without_heads_are_refused(tmp_path: Path) -> None:
    from tests.support.runs import ARCHITECTURE

    write_start(tmp_path / "llama", ARCHITECTURE, random_tensors(ARCHITECTURE, 5))
    with pytest.raises(UserError, match=r"rte: family llama has no head for tasks, only bert"):
        with_task_head(open_any(tmp_path / "llama"), TASK, seed=1)


def test_towers_start_from_an_encoder(tmp_path: Path) -> None:
    weights = random_tensors(small_bert(), 5)
    write_start(tmp_path / "bert", small_bert(), weights)
    task = FinetuneTask(name="retrieval")
    start = with_task_head(open_any(tmp_path / "bert"), task, seed=1, wanted=small_biencoder())
    kinds = ("weight", "bias")
    assert start.new == tuple(
        f"model.{tower}_model.projection.{kind}" for tower in ("query", "context") for kind in kinds
    )
    assert "model.pooler.weight" in start.dropped
    source = start.checkpoint.source
    for name in model_tensors.shapes(small_biencoder()):
        _, _, rest = name.split(".", 2)
        other = source.read(f"model.model.context_model.{rest}")
        assert torch.equal(source.read(f"model.{name}"), other)
        if name not in start.new:
            assert torch.equal(other, weights[f"model.{rest}"])
