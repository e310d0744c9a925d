"""Samples of ict: the blocks of megatron-core, with the title of their own document."""

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.sentence_data import SEED, SentenceData, make_titled, sentences_of
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.index import index
from tokamake.data.samples.loader import open_samples
from tokamake.data.samples.steps import batches
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError
from tokamake.train.data_verification import _unread_files
from tokamake.train.objectives.ict.samples import BlockSamples

LENGTH = 48
PAD, CLS, SEP = 0, 2, 3


@pytest.fixture(scope="module")
def titled(sentences: SentenceData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The datasets wiki_text and wiki_title; some documents lack a title, or have a long one."""
    folder = tmp_path_factory.mktemp("titled")
    generator, rows = np.random.default_rng(1), list[dict[str, str]]()
    for number in range(300):
        lengths = generator.integers(0, 9, generator.integers(0, 12)).tolist()
        title = "" if number % 7 == 3 else f"Title. Of {number}."
        title += " and so on" * (40 if number % 50 == 9 else 0)
        rows.append({"text": sentences_of(lengths), "title": title})
    make_titled(folder, sentences, rows=rows)
    (folder / "weights.txt").write_text("3 wiki_text wiki\n1 wiki_title wiki\n")
    return folder


def build(titled: Path, sentences: SentenceData, output: Path, **changes: Any) -> Path:
    section = changes.pop("ict", {})
    options: dict[str, Any] = {
        "weights": titled / "weights.txt",
        "data_root": titled,
        "sequence_length": LENGTH,
        "epochs": ("1",),
        "valid_samples": 20,
        "split": "60,40,0",
        "objective": "ict",
        "tokenizer": sentences.tokenizer,
        "seed": SEED,
        "output": output,
        "objective_settings": json.dumps(section),
    }
    index(**options | changes)
    return output


def texts(dataset: IndexedDataset, document: int) -> list[list[int]]:
    bounds = dataset.document_bounds
    return [
        dataset[row].tolist() for row in range(int(bounds[document]), int(bounds[document + 1]))
    ]


def padded(tokens: list[int]) -> list[int]:
    return tokens + [PAD] * (LENGTH - len(tokens))


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_blocks_have_the_title_of_their_document(
    titled: Path, sentences: SentenceData, tmp_path: Path, split: str, kept: float
) -> None:
    from megatron.core.datasets import helpers_cpp

    section = {"query_in_block_probability": kept}
    folder = build(titled, sentences, tmp_path / "index", ict=section)
    samples = BlockSamples(folder, split=split, data_root=titled)
    text, titles = IndexedDataset(titled / "wiki_text"), IndexedDataset(titled / "wiki_title")
    documents = range(180) if split == "train" else range(180, 300)
    limit = (LENGTH - 3) // 2
    title_of = {number: [*chain(*texts(titles, number))][:limit] for number in documents}
    assert max(map(len, title_of.values())) == limit
    assert min(map(len, title_of.values())) == 0
    rows = helpers_cpp.build_blocks_mapping(
        np.ascontiguousarray(text.document_bounds[documents.start : documents.stop + 1]),
        np.ascontiguousarray(text.lengths),
        np.array([len(title) for title in title_of.values()], np.int32),
        *(1, 2**62, LENGTH - 3, SEED, False, False),
    )
    assert len(samples) == (len(rows) if split == "train" else 20)
    place_of = samples._dataset_sample_index
    num_cut = 0
    for sample in range(len(samples)):
        first, end, document = rows[place_of[sample]][:3].tolist()
        document += documents.start
        given = samples[sample]
        assert given["document"] == document
        block = [text[row].tolist() for row in range(first, end)]
        query = given["query"][1 : given["num_query"] - 1].tolist()
        assert query in block
        assert given["query"].tolist() == padded([CLS, *query, SEP])
        if not kept:
            block.remove(query)
        title = title_of[document]
        whole = [*chain(*block)]
        cut = whole[: LENGTH - 3 - len(title)]
        num_cut += len(cut) < len(whole)
        expected = padded([CLS, *title, SEP, *cut, SEP])
        assert given["block"].tolist() == expected
        assert given["num_block"] == len(title) + 3 + len(cut)
    assert num_cut or not kept


def test_queries_are_drawn_evenly_and_leave_their_block(
    titled: Path, sentences: SentenceData, tmp_path: Path
) -> None:
    section = {"query_in_block_probability": 0.25, "titles": ""}
    folder = build(titled, sentences, tmp_path / "index", ict=section, epochs=("30",))
    samples = BlockSamples(folder, split="train", data_root=titled)
    draws = [samples._draw(number, 5) for number in range(len(samples))]
    places = np.bincount([place for place, _ in draws], minlength=5) / len(draws)
    assert len(draws) > 5000
    assert abs(places - 0.2).max() < 0.02
    assert abs(np.mean([is_kept for _, is_kept in draws]) - 0.25) < 0.02
    assert samples._draw(0, 1) == (0, True)
    assert samples[0]["block"][1] != SEP


def test_workers_read_the_same_samples(
    titled: Path, sentences: SentenceData, tmp_path: Path
) -> None:
    folder = build(titled, sentences, tmp_path / "index")
    whole = open_samples(folder, split="train", data_root=titled)
    rows = np.stack([whole[sample] for sample in range(32)])
    for rank in range(2):
        # A rank of its own reads half of the samples, from the middle.
        opened = open_samples(folder, split="train", data_root=titled, verify=False)
        sizes = {"micro_batch_size": 4, "data_parallel_rank": rank, "data_parallel_size": 2}
        micro = next(iter(batches(opened, consumed_samples=16, **sizes)))
        np.testing.assert_array_equal(micro, rows[16 + 4 * rank : 20 + 4 * rank])
    spans = whole.spans(0)
    assert {span.prefix for span in spans} == {"wiki_text"}
    assert 0 in whole.samples_of("wiki_text", spans[0].sequence)


def test_the_corpus_keeps_its_weight(titled: Path, sentences: SentenceData, tmp_path: Path) -> None:
    folder = build(titled, sentences, tmp_path / "index")
    description = json.loads((folder / "index.json").read_text())
    (dataset,) = description["splits"]["train"]["files"]
    assert (dataset["prefix"], dataset["companion"]) == ("wiki_text", "wiki_title")
    assert dataset["weight"] == 4
    assert {*description["pairs"]} == {"wiki_text", "wiki_title"}
    run: Any = SimpleNamespace(
        train=SimpleNamespace(evaluation_steps=1), index=folder, data_root=titled
    )
    read = {file.path.name for file in _unread_files(run, description, noted={})}
    assert read >= {f"wiki_{key}.{name}" for key in ("text", "title") for name in ("bin", "idx")}


def test_changed_titles_are_refused(titled: Path, sentences: SentenceData, tmp_path: Path) -> None:
    folder = build(titled, sentences, tmp_path / "index")
    for path in titled.glob("wiki_t*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "wiki_title.json").unlink()
    (tmp_path / "wiki_title.sources").unlink()
    with (tmp_path / "wiki_title.bin").open("ab") as stream:
        stream.write(bytes(2))
    with pytest.raises(UserError, match="wiki_title: changed since it was indexed"):
        open_samples(folder, split="train", data_root=tmp_path)


@pytest.mark.parametrize(
    ("lines", "section", "message"),
    [
        ("1 other_text a\n", {}, "other_text: its companion is missing: no dataset .*other_title"),
        ("1 wiki_text a\n", {"text": "body"}, "wiki_text: has no titles: its name does not end in"),
        ("1 wiki_title a\n", {}, "wiki_title: titles without texts; also list"),
        ("1 short_text a\n", {}, "short_title: 2 documents, but .*short_text has 3"),
        ("1 moved_text a\n", {}, "moved_title: its documents come from other lines of the raw"),
    ],
)
def test_titles_that_do_not_belong_to_the_texts_are_refused(
    titled: Path,
    sentences: SentenceData,
    tmp_path: Path,
    lines: str,
    section: dict[str, str],
    message: str,
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for path in titled.glob("wiki_*"):
        (root / path.name).write_bytes(path.read_bytes())
    options = {"tokenizer": sentences.tokenizer, "split_sentences": True, "append_eod": False}
    for name, files in {
        "short_text": "abc",
        "short_title": "ab",
        "other_text": "a",
        "moved_text": "abc",
        "moved_title": "bac",
    }.items():
        for letter in "abc":
            (root / f"{letter}.txt").write_text(f"Text {letter}. It has a second sentence.")
        tokenize(
            tuple(str(root / f"{letter}.txt") for letter in files),
            output=root / name,
            format="text",
            **options,  # type: ignore[arg-type]
        )
    (root / "weights.txt").write_text(lines)
    with pytest.raises(UserError, match=message):
        build(root, sentences, tmp_path / "index", ict=section, split="100,0,0", valid_samples=0)
