"""Held-out loss against transformers on the same tokens, and which documents count as held out."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.conftest import documents
from tests.support.llamas import window_nats
from tests.support.megatron_datasets import write_megatron_dataset
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError
from tokamake.evaluate.evaluate import evaluate
from tokamake.evaluate.perplexity import windows

SPLIT = "60,20,20"
LENGTH = 24


@pytest.fixture(scope="module")
def built(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two datasets of docs, one of talk, a weighting file, and a random Llama."""
    folder = tmp_path_factory.mktemp("built")
    prose = documents(*(sampled / "raw/docs").glob("*.jsonl"))
    texts = {
        "docs-0000": prose[:25],
        "docs-0001": prose[25:50],
        "talk-0000": [f"Grüße, 世界 🙂: document number {n}." for n in range(40)],
    }
    for name, some in texts.items():
        raw = folder / f"{name}.jsonl"
        raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        tokenize([raw], output=folder / "data" / name, tokenizer=sampled / "tokenizer")
    (folder / "weights.txt").write_text("".join(f"1 {n} {n[:4]}\n" for n in texts))
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


def score(built: Path, sampled: Path, output: Path, **changes: object) -> dict:
    options = {
        "checkpoint": built / "model",
        "weights": built / "weights.txt",
        "data_root": built / "data",
        "tokenizer": sampled / "tokenizer",
        "split": SPLIT,
        "sequence_length": LENGTH,
        "max_tokens": 100_000,
        "batch_size": 4,
        **changes,
    }
    evaluate(output=output, **options)
    return json.loads(output.read_text(encoding="utf-8"))


def held_out_texts(built: Path) -> dict[str, list[str]]:
    """The last fifth of the documents of each dataset, by corpus."""
    texts: dict[str, list[str]] = {"docs": [], "talk": []}
    for name in ("docs-0000", "docs-0001", "talk-0000"):
        some = documents(built / f"{name}.jsonl")
        texts[name[:4]] += some[len(some) - len(some) // 5 :]
    return texts


def test_loss_equals_transformers_on_the_last_documents(
    built: Path, sampled: Path, tmp_path: Path
) -> None:
    scores = score(built, sampled, tmp_path / "evaluate.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(sampled / "tokenizer")
    sums = np.zeros(4)
    for corpus, texts in held_out_texts(built).items():
        ids = [t for text in texts for t in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
        nats, count = window_nats(built / "model", ids, length=LENGTH)
        size = len("".join(texts).encode())
        sums += (len(texts), count, size, nats)
        assert count % LENGTH, "the last window must be short, or this test misses it"
        check(scores["corpora"][corpus], len(texts), count, size, nats)
    assert count == len(ids) - 1
    check(scores["overall"], *sums)


def test_raw_files_have_the_scores_of_their_datasets(
    built: Path, sampled: Path, tmp_path: Path
) -> None:
    tokenizer = sampled / "tokenizer"
    as_datasets = score(built, sampled, tmp_path / "datasets.json", split="0,0,100")
    names = ("docs-0000", "docs-0001", "talk-0000")
    files = [str(built / f"{name}.jsonl") for name in names]
    evaluate(
        checkpoint=built / "model",
        tokenizer=tokenizer,
        data=(f"{built}/talk-*.jsonl",),
        sequence_length=LENGTH,
        output=tmp_path / "talk.json",
    )
    talk = json.loads((tmp_path / "talk.json").read_text())
    assert talk["corpora"] == {files[2]: as_datasets["corpora"]["talk"]}
    assert talk["overall"] == as_datasets["corpora"]["talk"]

    output = tmp_path / "part.json"
    options: dict[str, Any] = {"checkpoint": built / "model", "tokenizer": tokenizer}
    evaluate(**options, data=(*files,), max_tokens=50, sequence_length=LENGTH, output=output)
    part = json.loads(output.read_text())
    assert [*part["corpora"]] == files
    assert {corpus["tokens"] for corpus in part["corpora"].values()} == {49}
    assert part["overall"]["tokens"] == 3 * 49


def test_only_a_checkpoint_and_raw_files_are_needed(
    built: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(built / "model", tmp_path / "model")
    shutil.copytree(sampled / "tokenizer", model, dirs_exist_ok=True)
    evaluate(checkpoint=model, data=(str(built / "talk-0000.jsonl"),))
    length, header, talk, overall = capsys.readouterr().out.splitlines()
    assert length == "sequence length 64"  # as many as the model sees
    assert header.split() == ["corpus", *("documents", "tokens", "bytes"), *header.split()[4:]]
    assert talk.split()[1:] == overall.split()[1:]
    output = tmp_path / "scores.json"
    evaluate(checkpoint=model, data=(str(built / "talk-0000.jsonl"),), output=output)
    assert json.loads(output.read_text())["sequence_length"] == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either raw files with --data, or --weights with --data-root"),
        ({"data": ("a.jsonl",), "weights": Path("w.txt")}, "give either raw files with --data, or"),
        ({"data": ("missing.jsonl",)}, "missing.jsonl: no such file"),
        ({"data": ("empty.jsonl",)}, "empty.jsonl: holds no text; leave it out"),
        ({"data": ("bad.jsonl",)}, r'bad.jsonl:1: no key "text"'),
    ],
)
def test_mistakes_about_raw_files_are_explained(
    built: Path,
    sampled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text('{"text": ""}\n')
    Path("bad.jsonl").write_text('{"content": "a"}\n')
    with pytest.raises(UserError, match=message):
        evaluate(checkpoint=built / "model", tokenizer=sampled / "tokenizer", **options)


def check(scores: dict, num_documents: int, num_tokens: int, size: int, nats: float) -> None:
    assert (scores["documents"], scores["tokens"], scores["bytes"]) == (
        num_documents,
        num_tokens,
        size,
    )
    assert scores["loss"] == pytest.approx(nats / num_tokens, abs=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(nats / num_tokens), rel=1e-4)
    assert scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_batch_size_does_not_change_the_result(built: Path, sampled: Path, tmp_path: Path) -> None:
    single = score(built, sampled, tmp_path / "single.json", batch_size=1)
    many = score(built, sampled, tmp_path / "many.json", batch_size=50)
    again = score(built, sampled, tmp_path / "again.json", batch_size=50)
    assert single["overall"]["loss"] == pytest.approx(many["overall"]["loss"], abs=1e-6)
    assert many == again


def test_max_tokens_limits_each_corpus(built: Path, sampled: Path, tmp_path: Path) -> None:
    scores = score(built, sampled, tmp_path / "evaluate.json", max_tokens=30)
    tokenizer = transformers.AutoTokenizer.from_pretrained(sampled / "tokenizer")
    text = held_out_texts(built)["docs"][0]
    ids = tokenizer(text)["input_ids"][:30]
    nats, _ = window_nats(built / "model", ids, length=LENGTH)
    check(scores["corpora"]["docs"], 1, 29, len(tokenizer.decode(ids).encode()), nats)
    assert scores["corpora"]["talk"]["tokens"] == 29


@pytest.mark.parametrize("length", [1, 2, 5, 9, 10, 11, 40])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 10, 11])
def test_windows_predict_each_token_once(num_tokens: int, length: int) -> None:
    bounds = windows(num_tokens, length)
    predicted = [place for start, end in bounds for place in range(start + 1, end)]
    assert predicted == list(range(1, num_tokens))
    assert all(end - start <= length + 1 for start, end in bounds)


def test_a_corpus_without_test_documents_is_reported_empty(
    built: Path, sampled: Path, tmp_path: Path
) -> None:
    raw = tmp_path / "tiny.jsonl"
    raw.write_text('{"text": "alone"}\n')
    tokenize([raw], output=tmp_path / "tiny", tokenizer=sampled / "tokenizer")
    weights = tmp_path / "weights.txt"
    weights.write_text(f"1 {built}/data/docs-0000 docs\n1 {tmp_path}/tiny tiny\n")
    scores = score(built, sampled, tmp_path / "evaluate.json", weights=weights)
    assert scores["corpora"]["tiny"] == {
        "documents": 0,
        "tokens": 0,
        "bytes": 0,
        "loss": None,
        "perplexity": None,
        "bits_per_byte": None,
    }
    assert scores["overall"] == scores["corpora"]["docs"]


def test_without_test_documents_the_message_names_the_setting(
    built: Path, sampled: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"train\.split a larger share"):
        score(built, sampled, tmp_path / "evaluate.json", split="99,1,0")
    assert list(tmp_path.iterdir()) == []


def test_without_a_test_split_the_validation_split_is_scored(
    built: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = score(built, sampled, tmp_path / "test.json")
    found = score(built, sampled, tmp_path / "valid.json", split="80,20,0")
    assert found.pop("split") == "valid"
    assert found == tested  # the last fifth of the documents in both splits
    assert "no test split; scores of the split valid:" in capsys.readouterr().out


def test_without_a_held_out_split_nothing_is_scored(
    built: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = score(built, sampled, tmp_path / "evaluate.json", split="1,0,0")
    assert found["corpora"] == {}
    assert (found["overall"]["documents"], found["overall"]["loss"]) == (0, None)
    assert "nothing is held out; the model is not scored" in capsys.readouterr().out


def test_another_tokenizer_is_refused(built: Path, sampled: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    for file in (sampled / "tokenizer").iterdir():
        (other / file.name).write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(UserError, match="made with another tokenizer"):
        score(built, sampled, tmp_path / "evaluate.json", tokenizer=other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 65}, "sees only 64 tokens"),
        ({"sequence_length": 0}, "sequence_length: 0"),
        ({"max_tokens": 1}, "max_tokens: 1"),
        ({"batch_size": 0}, "batch_size: 0"),
    ],
)
def test_mistakes_are_explained(
    built: Path, sampled: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        score(built, sampled, tmp_path / "evaluate.json", **changes)


def test_tokens_beyond_the_vocabulary_are_refused(
    built: Path, sampled: Path, tmp_path: Path
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(built / "model")
    model.resize_token_embeddings(50)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="has 50 entries"):
        score(built, sampled, tmp_path / "evaluate.json", checkpoint=tmp_path / "model")


@pytest.mark.parametrize("token", [-3, 9999])
def test_a_token_of_another_vocabulary_is_named(
    built: Path, sampled: Path, tmp_path: Path, token: int
) -> None:
    write_megatron_dataset(tmp_path / "other", [[5, 0, token, 7]], np.int32)
    (tmp_path / "weights.txt").write_text("1.0 other other\n")
    with pytest.raises(UserError, match=f'corpus "other": holds token {token}, but the vocabulary'):
        score(
            built,
            sampled,
            tmp_path / "evaluate.json",
            weights=tmp_path / "weights.txt",
            data_root=tmp_path,
            split="0,0,1",
        )


def test_evaluate_prints_a_table(
    built: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = score(built, sampled, tmp_path / "evaluate.json")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["sequence", "corpus", "docs", "talk", "overall"]
    assert f"{scores['overall']['perplexity']:,.4f}" in lines[-1]


def test_broken_weights_are_named(built: Path, sampled: Path, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(built / "model")
    model.lm_head.weight.data[7] = math.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="loss nan: no finite perplexity"):
        score(built, sampled, tmp_path / "evaluate.json", checkpoint=tmp_path / "model")
    assert not (tmp_path / "evaluate.json").exists()
