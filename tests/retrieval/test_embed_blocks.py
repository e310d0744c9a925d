"""Vectors of blocks equal transformers' BERT, for any number of ranks and batch size."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.biencoders import Oracle, biencoder
from tests.support.hf_folder import from_hf, write
from tests.support.ranks import spawn
from tests.support.sentence_data import VOCAB_SIZE, SentenceData, make_titled, sentences_of
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.readers import parse_range
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.inference.layout import Peers
from tokamake.retrieval.dataset_blocks import open_blocks
from tokamake.retrieval.embed_blocks import embed_blocks
from tokamake.retrieval.embed_passages import embed_passages
from tokamake.retrieval.embed_questions import embed_questions
from tokamake.retrieval.embedding_options import EmbeddingOptions
from tokamake.retrieval.embeddings import open_embeddings
from tokamake.retrieval.evidence import cut_passages, read_evidence
from tokamake.retrieval.rows import WHOLE, check_byte_range
from tokamake.retrieval.text_vectors import Embedder, TextTower, TokenizedText
from tokamake.runtime.ranks import Ranks

LENGTH, CLS, SEP = 32, 2, 3
SHAPE = biencoder(vocab_size=VOCAB_SIZE, projection_dim=16)


@pytest.fixture(scope="module")
def folder(sentences: SentenceData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The datasets wiki_text and wiki_title, and the biencoder `model`."""
    folder = tmp_path_factory.mktemp("embedded")
    generator, rows = np.random.default_rng(3), list[dict[str, str]]()
    for number in range(40):
        lengths = generator.integers(0, 12, generator.integers(0, 6)).tolist()
        rows.append({"text": sentences_of(lengths), "title": f"Number {number}"})
    rows.append({"text": "Long" + " word" * 600 + ". Short.", "title": "L"})
    make_titled(folder, sentences, rows=rows)
    write(folder / "model", SHAPE, from_hf(SHAPE, dict(Oracle(SHAPE).named_parameters())))
    return folder


def embed(folder: Path, sentences: SentenceData, output: Path, **options: Any) -> Any:
    embed_blocks(
        folder / "wiki_text",
        checkpoint=folder / "model",
        tokenizer=sentences.tokenizer,
        output=output / "wiki.json",
        options=reading(**{name: options.pop(name) for name in READING if name in options}),
        **{"number": 2, **options},
    )
    return open_embeddings(output, verify=True)


READING = ("sequence_length", "batch_size")


def reading(**options: int) -> EmbeddingOptions:
    return EmbeddingOptions(**{"sequence_length": LENGTH, **options})


@pytest.mark.parametrize("titles", ["title", ""])
def test_vectors_equal_transformers(
    folder: Path,
    sentences: SentenceData,
    tmp_path: Path,
    titles: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    embedded = embed(folder, sentences, tmp_path, titles=titles, batch_size=3)
    assert ": 1 document without a block, for a sentence of more than 512 tokens" in (
        capsys.readouterr().out
    )
    oracle = Oracle(SHAPE)
    text, title = IndexedDataset(folder / "wiki_text"), IndexedDataset(folder / "wiki_title")
    blocks = open_blocks(folder / "wiki_text", text="text", titles=titles, length=LENGTH)
    assert embedded.ids.tolist() == [(2 << 32) + block for block in range(len(blocks.rows))]
    covered = [row for first, end, _ in blocks.rows.tolist() for row in range(first, end)]
    assert covered == [*range(int(text.document_bounds[40]))]
    for block, (first, end, document) in enumerate(blocks.rows.tolist()):
        tokens = [CLS]
        if titles:
            tokens += [*title[document].tolist(), SEP]
        tokens += np.concatenate([text[row] for row in range(first, end)]).tolist()
        tokens = [*tokens[: LENGTH - 1], SEP]
        with torch.no_grad():
            row = torch.tensor([tokens])
            (expected,) = oracle(row, torch.zeros_like(row, dtype=torch.bool), number=1)
        found = embedded.take(np.array([block]))[0]
        np.testing.assert_allclose(found, expected.numpy(), rtol=2e-3, atol=2e-3)


def on_ranks(folder: Path, tokenizer: Path, output: Path) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    peers = Peers(Ranks(rank, size, rank, size), torch.device("cpu"))
    embedder = Embedder(
        folder / "model",
        "block",
        tokenizer=tokenizer,
        options=reading(batch_size=4),
        peers=peers,
    )
    blocks = open_blocks(folder / "wiki_text", text="text", titles="title", length=LENGTH)
    texts = blocks.texts({"cls": CLS, "sep": SEP}, number=0)
    embedder.write(texts, manifest=output / "wiki.json", made_from={})


@pytest.mark.ranks
def test_ranks_write_the_same_bytes(folder: Path, sentences: SentenceData, tmp_path: Path) -> None:
    on_ranks(folder, sentences.tokenizer, tmp_path / "alone")
    spawn(on_ranks, 2, folder, sentences.tokenizer, tmp_path / "shared")
    for name in ("wiki.npy", "wiki.ids.npy", "wiki.json"):
        alone, shared = ((tmp_path / each / name).read_bytes() for each in ("alone", "shared"))
        assert alone == shared, name


class Unfit(Embedder):
    """Its vectors overflow fp16, which only rank 0 sees."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        tower: Any = self._tower
        embed = tower._embed
        tower._embed = lambda texts: embed(texts) * 1e9


def fail_on_ranks(folder: Path, tokenizer: Path, output: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.retrieval.test_embed_blocks.Embedder", Unfit)
        with pytest.raises(UserError, match="is not finite in fp16"):
            on_ranks(folder, tokenizer, output)


@pytest.mark.ranks
def test_an_error_of_the_rank_that_writes_ends_all_ranks(
    folder: Path, sentences: SentenceData, tmp_path: Path
) -> None:
    spawn(fail_on_ranks, 2, folder, sentences.tokenizer, tmp_path / "out", timeout=60)
    assert not [*tmp_path.glob("out/*")]


@pytest.mark.ranks
def test_ranks_leave_a_complete_shard(
    folder: Path, sentences: SentenceData, tmp_path: Path
) -> None:
    spawn(on_ranks, 2, folder, sentences.tokenizer, tmp_path)
    before = (tmp_path / "wiki.npy").stat().st_mtime_ns
    spawn(on_ranks, 2, folder, sentences.tokenizer, tmp_path)
    assert (tmp_path / "wiki.npy").stat().st_mtime_ns == before


def test_complete_blocks_are_not_embedded_again(
    folder: Path, sentences: SentenceData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, is_complete in [
        ({}, False),
        ({}, True),
        ({"number": 3}, False),
        ({"number": 3, "batch_size": 5}, True),
        ({"number": 3, "sequence_length": 24}, False),
    ]:
        embed(folder, sentences, tmp_path, **options)
        assert ("wiki.json: already complete" in capsys.readouterr().out) == is_complete, options


def test_complete_passages_and_questions_are_not_embedded_again(
    folder: Path, sentences: SentenceData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"checkpoint": folder / "model", "tokenizer": sentences.tokenizer}
    options |= {"options": reading()}
    passages, questions = tmp_path / "passages.tsv", tmp_path / "questions.tsv"
    for text, is_complete in [("one", False), ("one", True), ("two", False)]:
        passages.write_text(f"id\ttext\n1\t{text}\n")
        questions.write_text(f'{text}\t["two"]\n')
        embed_passages([passages], output=tmp_path / "p" / "wiki.json", **options)
        embed_questions(questions, output=tmp_path / "q" / "nq.json", **options)
        assert capsys.readouterr().out.count("already complete") == 2 * is_complete


def lines_of(rows: list[dict[str, Any]], suffix: str) -> list[str]:
    if suffix == "jsonl":
        return [json.dumps(row) + "\n" for row in rows]
    return ["id\ttext\n", *(f"{row['id']}\t{row['text']}\n" for row in rows)]


@pytest.mark.parametrize("suffix", ["jsonl", "tsv"])
def test_byte_ranges_of_a_file_give_the_vectors_of_the_file(
    folder: Path,
    sentences: SentenceData,
    tmp_path: Path,
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tokamake.retrieval.evidence.WINDOW_BYTES", 200)
    draw = np.random.default_rng(5)
    rows = [{"id": n, "text": "one two three four " * int(draw.integers(1, 8))} for n in range(30)]
    path = tmp_path / f"passages.{suffix}"
    path.write_text("".join(lines_of(rows, suffix)))
    options: dict[str, Any] = {"checkpoint": folder / "model", "tokenizer": sentences.tokenizer}
    options |= {"options": reading(batch_size=3)}

    batches = list[list[int]]()
    embed_batch = TextTower._embed

    def embed_and_note(tower: TextTower, texts: list[TokenizedText]) -> Any:
        batches.append([text.id for text in texts])
        return embed_batch(tower, texts)

    monkeypatch.setattr(TextTower, "_embed", embed_and_note)

    def embed_shards(shard_bytes: int) -> tuple[int, list[int], bytes, list[list[int]]]:
        batches.clear()
        ranges = cut_passages(path, shard_bytes)
        for number, byte_range in enumerate(ranges):
            output = tmp_path / f"{shard_bytes}/{number:03d}.json"
            embed_passages([path], output=output, byte_range=byte_range, **options)
        found = open_embeddings(output.parent, verify=True)
        vectors = b"".join(shard.vectors.tobytes() for shard in found.shards)
        return len(ranges), found.ids.tolist(), vectors, [*batches]

    one, ids, vectors, batched = embed_shards(10**9)
    assert (one, ids) == (1, [*range(30)])
    for shard_bytes, at_least in ((1, 9), (600, 3)):
        number, *shards = embed_shards(shard_bytes)
        assert number > at_least
        # Sums may be rounded in another way in other batches.
        assert shards == [ids, vectors, batched]
    packed = tmp_path / f"passages.{suffix}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert cut_passages(packed, 1) == [""]
    embed_passages([packed], output=tmp_path / "z/z.json", **options)
    (shard,) = open_embeddings(tmp_path / "z").shards
    assert (shard.ids.tolist(), shard.vectors.tobytes()) == (ids, vectors)
    capsys.readouterr()
    more = [*rows, {"id": 30, "text": "five " * 60}]
    path.write_text("".join(lines_of(more, suffix)))
    assert embed_shards(600)[1] == [*range(31)]
    # Only the last range had other passages.
    assert capsys.readouterr().out.count("already complete") == number - 1


def test_mistakes_in_a_byte_range_name_the_line_of_the_file(tmp_path: Path) -> None:
    path, other = tmp_path / "p.tsv", tmp_path / "p.tsv.gz"
    path.write_text("id\ttext\n1\ta\n\n2\tb\nx\tc\n")
    other.write_bytes(gzip.compress(path.read_bytes()))
    assert [each.id for each in read_evidence([path], (1, 13))] == [1]
    assert [each.id for each in read_evidence([path], (13, 17))] == [2]
    with pytest.raises(UserError, match=r"p.tsv:5: the id is 'x'; give each passage a whole"):
        [*read_evidence([path], (14, None))]
    with pytest.raises(UserError, match=r"p.tsv.gz:5: the id is 'x'; give each passage a whole"):
        [*read_evidence([other])]
    for given, byte_range, message in (
        (path, "10:99", r"--byte-range: 10:99: outside .*p.tsv, which has 21 bytes; fix the range"),
        (path, "9:5", r"--byte-range: 9:5: outside"),
        (other, "4:9", r"--byte-range: 4:9: .*p.tsv.gz is compressed, and has no byte ranges; unp"),
    ):
        with pytest.raises(UserError, match=message):
            check_byte_range(given, parse_range(byte_range, [given]) or WHOLE)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1\tone\n2\ttwo\n1\tthree\n", r"passages.tsv: the id 1 occurs twice; embed each passage"),
        ("1\tone\nx\ttwo\n", r"passages.tsv:3: the id is 'x'; give each passage a whole number"),
        ("", r"passages.tsv: no passage; write rows id<TAB>text<TAB>title, or leave the file out"),
    ],
)
def test_wrong_passages_are_named_before_any_is_embedded(
    folder: Path,
    sentences: SentenceData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: str,
    message: str,
) -> None:
    monkeypatch.delattr(Embedder, "write")
    (tmp_path / "passages.tsv").write_text("id\ttext\n" + rows)
    with pytest.raises(UserError, match=message):
        embed_passages(
            [tmp_path / "passages.tsv"],
            checkpoint=folder / "model",
            tokenizer=sentences.tokenizer,
            options=reading(),
            output=tmp_path / "wiki.json",
        )


def test_passages_and_questions_have_a_tower_each(
    folder: Path, sentences: SentenceData, tmp_path: Path
) -> None:
    passages = [(5, "One two.", "A"), (3, "Three " * 50, ""), (9, "Four five six seven.", "B c")]
    lines = [f"{number}\t{text}\t{title}" for number, text, title in passages]
    (tmp_path / "passages.tsv").write_text("\n".join(["id\ttext\ttitle", *lines]) + "\n")
    (tmp_path / "questions.tsv").write_text('one\t["two"]\nfour five\t["six"]\n')
    options: dict[str, Any] = {"checkpoint": folder / "model", "tokenizer": sentences.tokenizer}
    options |= {"options": reading(batch_size=2)}
    embed_passages([tmp_path / "passages.tsv"], output=tmp_path / "p" / "wiki.json", **options)
    embed_questions(tmp_path / "questions.tsv", output=tmp_path / "q" / "nq.json", **options)
    encode, oracle = open_tokenizer(sentences.tokenizer).encode_batch, Oracle(SHAPE)
    rows = []
    for _, text, title in passages:
        ids, of_title = (list(each) for each in encode([text, title]))
        rows.append([*[CLS, *of_title, SEP, *ids][: LENGTH - 1], SEP])
    asked = [[CLS, *encode([text])[0], SEP] for text in ("one", "four five")]
    blocks, questions = open_embeddings(tmp_path / "p"), open_embeddings(tmp_path / "q")
    assert (blocks.ids.tolist(), questions.ids.tolist()) == ([5, 3, 9], [0, 1])
    assert blocks.facts["made_from"]["model"] == questions.facts["made_from"]["model"]
    for number, store, tokens in [(1, blocks, rows), (0, questions, asked)]:
        for place, row in enumerate(tokens):
            whole = torch.tensor([row])
            with torch.no_grad():
                (expected,) = oracle(
                    whole, torch.zeros_like(whole, dtype=torch.bool), number=number
                )
            found = store.take(np.array([place]))[0]
            np.testing.assert_allclose(found, expected.numpy(), rtol=2e-3, atol=2e-3)


def test_another_tokenizer_than_the_trained_one_is_refused(
    folder: Path, sentences: SentenceData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "tokamake.retrieval.text_vectors.tokenizer_of_run"
    monkeypatch.setattr(module, lambda _: sentences.extended)
    with pytest.raises(UserError, match=r"--tokenizer: .*wordpiece: another tokenizer than .*exte"):
        embed(folder, sentences, tmp_path)
    monkeypatch.setattr(module, lambda _: sentences.tokenizer)
    assert embed(folder, sentences, tmp_path).num_vectors


def test_mistakes_are_one_line(folder: Path, sentences: SentenceData, tmp_path: Path) -> None:
    for options, message in [
        ({"sequence_length": 1000}, "sequence_length: 1000: the model of .* sees only"),
        ({"titles": "caption"}, "wiki_text: no dataset of its titles, .*wiki_caption"),
        ({"sequence_length": 4}, "--sequence-length: 4: too small for .*; give 5 or more"),
        ({"batch_size": 0}, "--batch-size: 0: give 1 or more"),
        ({"number": -1}, "--number: -1: give 0 to 2147483647"),
    ]:
        with pytest.raises(UserError, match=message):
            embed(folder, sentences, tmp_path, **options)
    assert not [*tmp_path.iterdir()]
