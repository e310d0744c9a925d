"""`tokenize` writes the reference tokenizer's tokens in Megatron's format with any workers."""

import gzip
import io
import itertools
import json
import random
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.conftest import documents
from tests.support.megatron_datasets import assert_same_dataset
from tests.support.tokenized import tokenized
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.merge_inputs import check_consistent, open_merge_input
from tokamake.data.indexed.paths import bin_path, idx_path
from tokamake.data.tokenize import shard_reader
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError
from tokamake.runtime import console


def builder(prefix: Path, dtype: type = np.uint16) -> IndexedDatasetBuilder:
    """Return the writer of Megatron-LM's preprocess_data.py."""
    return IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)


def read(prefix: Path) -> list[list[int]]:
    """Read sequences with Megatron, by index because its iterator never stops."""
    dataset = MegatronDataset(str(prefix))
    return [dataset[number].tolist() for number in range(len(dataset))]


@pytest.fixture
def oracle(workspace: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(workspace / "tokenizer/tokenizer.json"))


def write_lines(path: Path, records: list[object]) -> tuple[str]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return (str(path),)


def test_the_bytes_equal_those_of_megatron(workspace: Path, oracle: tokenizers.Tokenizer) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenized(workspace, raw)
    eod = oracle.token_to_id("<|endoftext|>")
    megatron = builder(workspace / "megatron")
    expected = [[*oracle.encode(text).ids, eod] for text in documents(raw)]
    for ids in expected:
        megatron.add_document(torch.tensor(ids), [len(ids)])
    megatron.finalize(str(workspace / "megatron.idx"))
    assert_same_dataset(workspace / "pair", workspace / "megatron")
    manifest = read_manifest(workspace / "pair")
    assert manifest["documents"] == manifest["documents_in"] == len(expected)
    assert manifest["tokens"] == sum(map(len, expected))
    assert manifest["vocab_size"] == 400
    source = manifest["inputs"][0]
    assert (source["path"], source["bytes"]) == (str(raw), raw.stat().st_size)


def test_the_encoder_is_explained(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenized(workspace, "raw/docs/docs-00.jsonl", explain=True)
    _, used, speed = capsys.readouterr().out.splitlines()
    assert used.startswith("encoder: tokenizers ")
    assert re.fullmatch(r"speed: \d+\.\d MB/s of text on \d+ threads together", speed)


def test_prepend_bos_begins_each_document(workspace: Path, oracle: tokenizers.Tokenizer) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenized(workspace, raw, prepend_bos=True, append_eod=False)
    bos = oracle.token_to_id("<|endoftext|>")
    expected = [[bos, *oracle.encode(text).ids] for text in documents(raw)]
    assert read(workspace / "pair") == expected


def test_special_tokens_in_text_can_stay_text(
    workspace: Path, oracle: tokenizers.Tokenizer
) -> None:
    text = "end<|endoftext|>start"
    files = write_lines(workspace / "special.jsonl", [{"text": text}])
    tokens = {}
    for choice in ("special", "plain"):
        prefix = workspace / choice
        tokenized(workspace, *files, name=prefix, special_tokens_in_text=choice)
        tokens[choice] = read(prefix)[0][:-1]
        assert read_manifest(prefix)["special_tokens_in_text"] == choice
    assert tokens["special"] == oracle.encode(text).ids
    oracle.encode_special_tokens = True
    assert tokens["plain"] == oracle.encode(text).ids
    assert tokens["plain"] != tokens["special"]
    oracle.encode_special_tokens = False
    inputs = [open_merge_input(workspace / choice) for choice in tokens]
    with pytest.raises(UserError, match="special_tokens_in_text is plain, but special in"):
        check_consistent(inputs)


@pytest.mark.parametrize("append_eod", [True, False])
def test_sentences_become_sequences(
    workspace: Path, oracle: tokenizers.Tokenizer, append_eod: bool
) -> None:
    texts = [
        "Dr. Smith went home. He slept!  Then?\n\nHe woke up.",
        "",
        "One sentence only",
        "  \n ",
        "It cost 3.50 dollars. Yes.",
    ]
    sentences = [
        ["Dr. Smith went home.", "He slept!", "Then?", "He woke up."],
        ["One sentence only"],
        ["It cost 3.50 dollars.", "Yes."],
    ]
    files = write_lines(workspace / "some.jsonl", [{"text": text} for text in texts])
    tokenized(workspace, *files, split_sentences=True, append_eod=append_eod)
    megatron = builder(workspace / "megatron")
    for document in sentences:
        encoded = [oracle.encode(sentence).ids for sentence in document]
        if append_eod:
            encoded[-1].append(oracle.token_to_id("<|endoftext|>"))
        flat = [token for ids in encoded for token in ids]
        megatron.add_document(torch.tensor(flat), [len(ids) for ids in encoded])
    megatron.finalize(str(workspace / "megatron.idx"))
    assert_same_dataset(workspace / "pair", workspace / "megatron")
    manifest = read_manifest(workspace / "pair")
    counts = ("documents_in", "documents", "empty_documents", "sequences")
    assert [manifest[key] for key in counts] == [5, 3, 2, 7]


def test_empty_documents_are_kept_as_megatron_keeps_them(
    workspace: Path, oracle: tokenizers.Tokenizer
) -> None:
    texts = ["one", "", "three", ""]
    files = write_lines(workspace / "some.jsonl", [{"text": text} for text in texts])
    tokenized(workspace, *files, empty_documents="keep", append_eod=False)
    megatron = builder(workspace / "megatron")
    for text in texts:
        ids = oracle.encode(text).ids
        megatron.add_document(torch.tensor(ids), [len(ids)] if ids else [])
    megatron.finalize(str(workspace / "megatron.idx"))
    assert_same_dataset(workspace / "pair", workspace / "megatron")
    manifest = read_manifest(workspace / "pair")
    assert (manifest["documents"], manifest["empty_documents"]) == (2, 2)


def test_empty_documents_are_counted_and_skipped(workspace: Path) -> None:
    records = [{"text": text} for text in ("one", "", "three")]
    files = write_lines(workspace / "some.jsonl", records)
    tokenized(workspace, *files, append_eod=False)
    manifest = read_manifest(workspace / "pair")
    assert (manifest["documents"], manifest["empty_documents"]) == (2, 1)
    assert len(MegatronDataset(str(workspace / "pair"))) == 2
    Path(files[0]).write_text("")
    tokenized(workspace, *files)
    assert read_manifest(workspace / "pair")["documents"] == 0
    assert len(MegatronDataset(str(workspace / "pair"), mmap=False)) == 0


def test_the_bytes_do_not_depend_on_workers_and_compression(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    (workspace / "docs.gz").write_bytes(gzip.compress(raw.read_bytes()))
    written = set()
    for number, workers in enumerate((1, 2, 3, 7)):
        for path in (raw, workspace / "docs.gz"):
            prefix = workspace / f"pair{number}{path.suffix}"
            tokenized(workspace, path, name=prefix, workers=workers)
            written.add((bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()))
    assert len(written) == 1


def test_json_arrays_and_archives_give_the_bytes_of_jsonl(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    texts = [json.loads(line)["text"] for line in raw.read_bytes().splitlines()]
    (workspace / "a.json").write_text(json.dumps([{"text": text} for text in texts], indent=1))
    with zipfile.ZipFile(workspace / "a.zip", "w") as archive:
        archive.write(raw, "docs.jsonl")
    with tarfile.open(workspace / "a.tar", "w") as archive:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number:06d}.text")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    written = set()
    for path in (raw, *(workspace / f"a.{suffix}" for suffix in ("json", "zip", "tar"))):
        prefix = workspace / f"out-{path.name}"
        tokenized(workspace, path, name=prefix, workers=2)
        written.add((bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()))
    assert len(written) == 1


def test_shards_of_any_byte_ranges_merge_to_the_same_bytes(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenized(workspace, raw, name="whole")
    size = raw.stat().st_size
    random_numbers = random.Random(3)
    for trial in range(4):
        cuts = sorted(random_numbers.sample(range(size), trial + 1))
        bounds = [0, *cuts, ""]
        shards = []
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            shards.append(workspace / f"cut{trial}/{number}")
            tokenized(workspace, raw, name=shards[-1], byte_range=f"{start}:{end}")
        merge(shards, output=workspace / f"merged{trial}")
        assert_same_dataset(workspace / f"merged{trial}", workspace / "whole")
        manifests = [read_manifest(shard) for shard in shards]
        assert sum(m["inputs"][0]["bytes"] for m in manifests) == size


def test_each_of_several_keys_gives_a_dataset(
    workspace: Path, oracle: tokenizers.Tokenizer
) -> None:
    records = [{"title": f"t{n}", "body": "words " * n} for n in range(5)]
    files = write_lines(workspace / "some.jsonl", records)
    tokenized(workspace, *files, text_key=("title", "body"), append_eod=False)
    titles, bodies = read(workspace / "pair_title"), read(workspace / "pair_body")
    assert titles == [oracle.encode(record["title"]).ids for record in records]
    assert bodies == [oracle.encode(record["body"]).ids for record in records[1:]]
    assert read_manifest(workspace / "pair_body")["empty_documents"] == 1


def test_a_template_joins_keys(workspace: Path, oracle: tokenizers.Tokenizer) -> None:
    files = write_lines(workspace / "some.jsonl", [{"title": "A", "body": "b {x}"}])
    tokenized(workspace, *files, template=r"{title}:\n{body}", append_eod=False)
    assert read(workspace / "pair") == [oracle.encode("A:\nb {x}").ids]


def test_a_corpus_is_found_by_name(workspace: Path) -> None:
    write_lines(workspace / "some.jsonl", [{"body": "text"}])
    table = workspace / "table.tsv"
    table.write_text(f"corpus\tfiles\ttext_key\tweight\nmine\t{workspace}/*.jsonl\tbody\t1\n")
    tokenizer = workspace / "tokenizer"
    tokenize(("mine",), output=workspace / "pair", tokenizer=tokenizer, corpora=table)
    assert read_manifest(workspace / "pair")["text_key"] == "body"
    with pytest.raises(UserError, match="'other' is not a corpus; name one of mine"):
        tokenize(("other",), output=workspace / "pair", tokenizer=tokenizer, corpora=table)


@pytest.mark.parametrize("byte_range", ["x", "5", "1:b", "-1:4"])
def test_bad_byte_ranges_are_user_errors(workspace: Path, byte_range: str) -> None:
    with pytest.raises(UserError, match="START:END"):
        tokenized(workspace, "raw/docs/docs-00.jsonl", name="p", byte_range=byte_range)


def test_large_vocabularies_use_four_bytes_per_token(workspace: Path) -> None:
    folder = workspace / "large"
    shutil.copytree(workspace / "tokenizer", folder)
    large = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    large.add_tokens([f"<extra{n}>" for n in range(65_500 - 400)])
    large.save(str(folder / "tokenizer.json"))
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenize((str(raw),), output=workspace / "pair", tokenizer=folder)
    assert read_manifest(workspace / "pair")["dtype"] == "int32"
    assert MegatronDataset(str(workspace / "pair"))[0].dtype == np.int32


@pytest.mark.parametrize("options", [{"text_key": ("a/b", "c")}, {"workers": -1}])
def test_wrong_options_are_user_errors(workspace: Path, options: dict) -> None:
    raw = str(workspace / "raw/docs/docs-00.jsonl")
    with pytest.raises(UserError, match=r"--text-key|--workers"):
        tokenized(workspace, raw, **options)


def test_memory_is_bounded_for_empty_documents(workspace: Path) -> None:
    """The number of documents also limits a batch."""
    raw = workspace / "some.jsonl"
    raw.write_text('{"text": ""}\n' * 300_000)
    sizes = []
    concatenate = shard_reader._concatenate

    def joined(batches: list[shard_reader.DocumentBatch]) -> shard_reader.DocumentBatch:
        batch = concatenate(batches)
        sizes.append(len(batch.inputs))
        return batch

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard_reader, "_concatenate", joined)
        patched.setattr(shard_reader, "_BATCH_CHARACTERS", 64 * 1000)
        tokenized(workspace, raw)
    assert sum(sizes) == 300_000
    assert len(sizes) > 1


def test_datasets_may_have_the_names_of_megatron(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_LOG_SECONDS", 0)
    raw = workspace / "two.jsonl"
    raw.write_text('{"text": "One. Two.", "title": "T"}\n')
    for keys, split, names in (
        ("text", False, {"my-gpt2_text_document"}),
        ("text,title", True, {"my-gpt2_text_sentence", "my-gpt2_title_sentence"}),
    ):
        output = workspace / f"named-{split}/my-gpt2"
        tokenized(
            workspace,
            raw,
            name=output,
            text_key=(keys,),
            split_sentences=split,
            megatron_names=True,
        )
        assert {path.stem for path in output.parent.glob("*.idx")} == names
    printed = capsys.readouterr()
    assert f"{output}_title_sentence: 1 document, " in printed.out
    assert re.search(
        r"tokenize my-gpt2: 1 documents, [\d,]+ documents/s, [\d.]+ MB/s\n", printed.err
    )


def test_progress_counts_documents_that_filters_drop(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of many sources, filters keep so little that the encoder gets no batch for minutes."""
    monkeypatch.setattr(console, "_LOG_SECONDS", 0)
    for number in range(3):
        (workspace / f"short-{number}.txt").write_text("Short.")
    tokenized(workspace, *sorted(workspace.glob("short-*.txt")), filters="length: {min_words: 9}")
    lines = re.findall(r"tokenize pair: (\d) documents, ", capsys.readouterr().err)
    assert lines == ["1", "2", "3"]
