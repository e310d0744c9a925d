"""transformers loads each kind of trained tokenizer, and training is reproducible."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.conftest import documents
from tokamake.data.corpus.plan_file import Plan, TokenizerCorpus, write_plan
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError

KINDS = ["bpe", "wordpiece", "unigram"]
TEXTS = ["def f(x):\n\treturn x", "naïve ☃ 日本語 \U0001f600", "  A  b\n\n", "<|endoftext|>"]


@pytest.fixture(scope="module")
def trained(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for kind in KINDS:
        train_tokenizer(raw(sampled), kind=kind, vocab_size=600, output=folder / kind)
    return folder


def raw(sampled: Path) -> list[Path]:
    return sorted((sampled / "raw").rglob("*.*"))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_tokens(sampled: Path, trained: Path, kind: str) -> None:
    oracle = transformers.AutoTokenizer.from_pretrained(trained / kind)
    tokenizer = open_tokenizer(trained / kind)
    texts = [*TEXTS, *documents(raw(sampled)[0])[:20]]
    assert tokenizer.encode_batch(texts) == [
        oracle.encode(t, add_special_tokens=False) for t in texts
    ]
    assert (tokenizer.vocab_size, len(oracle)) == (600, 600)
    assert (tokenizer.eod, tokenizer.bos) == (oracle.eos_token_id, oracle.bos_token_id)
    end = "[SEP]" if kind == "wordpiece" else "<|endoftext|>"
    assert (oracle.eos_token, tokenizer.encode_batch([end])) == (end, [[tokenizer.eod]])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_tokenizers_over_bytes_are_lossless(trained: Path, kind: str) -> None:
    tokenizer = open_tokenizer(trained / kind)
    texts = [*TEXTS, "".join(map(chr, [*range(0x500), *range(0x2000, 0x2100), 0x10FFFF]))]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    num_tokens = len(tokenizer.encode_batch(["the same thing as the other one"])[0])
    assert num_tokens < 20  # the tokenizer has learned words


def test_wordpiece_equals_that_of_bert(trained: Path) -> None:
    tokenizer = open_tokenizer(trained / "wordpiece")
    vocabulary = json.loads((trained / "wordpiece/tokenizer.json").read_text())["model"]["vocab"]
    oracle = transformers.BertTokenizer(vocab=vocabulary)
    assert tokenizer.encode_batch(TEXTS) == [
        oracle.encode(t, add_special_tokens=False) for t in TEXTS
    ]
    assert list(vocabulary)[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert (
        oracle.decode(tokenizer.encode_batch(["Returning the value"])[0]) == "returning the value"
    )
    assert len(tokenizer.encode_batch(["return the value"])[0]) <= 6
    whole = transformers.AutoTokenizer.from_pretrained(trained / "wordpiece")("return")["input_ids"]
    assert (whole[0], whole[-1]) == (2, 3)


def test_every_process_writes_the_same_bytes(sampled: Path, trained: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from tokamake.data.corpus.train_tokenizer import train_tokenizer\n"
        "files = [Path(name) for name in sys.argv[2:]]\n"
        "for kind in ('bpe', 'wordpiece', 'unigram'):\n"
        "    train_tokenizer(files, kind=kind, vocab_size=600, output=Path(sys.argv[1]) / kind)\n"
    )
    for threads in ("1", "5"):
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / threads), *map(str, raw(sampled))],
            env=os.environ | {"RAYON_NUM_THREADS": threads},
            check=True,
        )
        for path in trained.rglob("*.json"):
            same = tmp_path / threads / path.relative_to(trained)
            assert same.read_bytes() == path.read_bytes(), path


def test_a_plan_gives_the_same_tokenizer_as_its_files(workspace: Path) -> None:
    """The corpora of the plan have different keys and templates."""
    folder = workspace / "titled"
    folder.mkdir()
    texts = documents(*sorted((workspace / "raw").rglob("*.jsonl")))
    rows = [{"title": "A title", "body": text} for text in texts]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"A title: {text}"}) + "\n" for text in texts)
    )
    code = sorted(str(path) for path in (workspace / "raw/code").iterdir())
    titled = TokenizerCorpus(
        "titled", "jsonl", "title,body", "{title}: {body}", (str(folder / "a.jsonl"),)
    )
    sources = (TokenizerCorpus("code", "", "text", "", tuple(code)), titled)
    write_plan(workspace / "plan.json", Plan({}, "", sources, (), (), (), ()))
    train_tokenizer(plan=workspace / "plan.json", vocab_size=400, output=workspace / "planned")
    named = [*map(Path, code), folder / "b.jsonl"]
    train_tokenizer(named, vocab_size=400, output=workspace / "named")
    name = "tokenizer.json"
    assert (workspace / "planned" / name).read_bytes() == (workspace / "named" / name).read_bytes()


def test_a_tokenizer_learns_from_all_keys(tmp_path: Path) -> None:
    rows = [{"a": "alpha " * 20, "b": "omega " * 20}] * 20
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(
        [tmp_path / "x.jsonl"], text_key=("a,b",), vocab_size=267, output=tmp_path / "t"
    )
    tokenizer = open_tokenizer(tmp_path / "t")
    assert [len(ids) for ids in tokenizer.encode_batch([" alpha", " omega"])] == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_document_stops_training_or_is_skipped(workspace: Path, kind: str) -> None:
    good = sorted((workspace / "raw/docs").glob("*.jsonl"))[0]
    lines = good.read_text().splitlines(keepends=True)
    bad = workspace / "bad.jsonl"
    bad.write_text("".join([*lines[:3], "{broken\n", '{"text": 7}\n', *lines[3:]]))
    with pytest.raises(UserError, match=r"bad\.jsonl:4: "):
        train_tokenizer([bad], kind=kind, vocab_size=400, output=workspace / "t")
    assert not (workspace / "t").exists()
    name = "tokenizer.json"
    for path in (bad, good):
        train_tokenizer(
            [path],
            kind=kind,
            vocab_size=400,
            on_bad_document="quarantine",
            output=workspace / path.stem,
        )
    assert (workspace / "bad" / name).read_bytes() == (workspace / good.stem / name).read_bytes()


@pytest.mark.parametrize(("kind", "minimum"), [("bpe", 257), ("wordpiece", 261), ("unigram", 257)])
def test_a_vocabulary_too_large_or_small_is_a_user_error(
    sampled: Path, tmp_path: Path, kind: str, minimum: int
) -> None:
    with pytest.raises(UserError, match=f"{minimum - 1}: too small for kind {kind}, .* {minimum}$"):
        train_tokenizer(raw(sampled)[:1], kind=kind, vocab_size=minimum - 1, output=tmp_path / "t")
    train_tokenizer(raw(sampled)[:1], kind=kind, vocab_size=minimum, output=tmp_path / "t")
    assert open_tokenizer(tmp_path / "t").vocab_size == minimum
    few = tmp_path / "few.jsonl"
    few.write_text('{"text": "few words"}\n')
    with pytest.raises(
        UserError, match=r"vocab_size: 5000: .*few.jsonl gives only \d+ entries; add text$"
    ):
        train_tokenizer([few], kind=kind, vocab_size=5000, output=tmp_path / "other")
    few.write_text('{"text": ""}\n')
    with pytest.raises(UserError, match=r"few.jsonl: no text to train the tokenizer on; add text"):
        train_tokenizer([few], kind=kind, vocab_size=5000, output=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match=r"gives only \d+ entries; lower it or add text$"):
        train_tokenizer(raw(sampled)[:1], kind=kind, vocab_size=500_000, output=tmp_path / "other")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_single_tokens(sampled: Path, tmp_path: Path, kind: str) -> None:
    more = ("<fim_prefix>", "<FIM suffix>", "[x]")
    train_tokenizer(
        raw(sampled)[:1], kind=kind, vocab_size=600, special_tokens=more, output=tmp_path / "t"
    )
    tokenizer = open_tokenizer(tmp_path / "t")
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    assert (tokenizer.vocab_size, len(oracle)) == (600, 600)
    ids = [tokens for (tokens,) in tokenizer.encode_batch(list(more))]
    assert ids == oracle.convert_tokens_to_ids(list(more))
    assert set(ids) <= set(oracle.all_special_ids)
    assert len({*ids, tokenizer.eod}) == 4
    text = "".join(f"return{token} the value" for token in more)
    assert tokenizer.encode_batch([text]) == [oracle.encode(text, add_special_tokens=False)]
    assert [token for token in tokenizer.encode_batch([text])[0] if token in ids] == ids
    assert oracle.decode(ids + ids[:1], skip_special_tokens=True) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_count_as_entries(sampled: Path, tmp_path: Path, kind: str) -> None:
    minimum = {"bpe": 258, "wordpiece": 262, "unigram": 258}[kind]
    settings = {"kind": kind, "special_tokens": ("<a>",), "output": tmp_path / "t"}
    with pytest.raises(UserError, match=f"give at least {minimum}$"):
        train_tokenizer(raw(sampled)[:1], vocab_size=minimum - 1, **settings)
    train_tokenizer(raw(sampled)[:1], vocab_size=minimum, **settings)
    assert open_tokenizer(tmp_path / "t").vocab_size == minimum


@pytest.mark.parametrize(
    ("kind", "tokens", "message"),
    [
        ("bpe", ("<a>", "<a>"), "'<a>': is one already"),
        ("bpe", ("<|endoftext|>",), "is one already"),
        ("wordpiece", ("[PAD]",), "is one already"),
        ("unigram", ("",), "'': give text"),
        ("bpe", (" <a>",), "' <a>': give text"),
    ],
)
def test_invalid_special_tokens_are_user_errors(
    sampled: Path, tmp_path: Path, kind: str, tokens: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train_tokenizer(
            raw(sampled)[:1],
            kind=kind,
            special_tokens=tokens,
            vocab_size=600,
            output=tmp_path / "t",
        )


def test_wrong_inputs_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no raw files to train on"):
        train_tokenizer(output=tmp_path / "t")
    with pytest.raises(UserError, match="no such file"):
        train_tokenizer(("none",), output=tmp_path / "t")
    write_plan(tmp_path / "plan.json", Plan({}, "", (), (), (), (), ()))
    with pytest.raises(UserError, match="lists no files to train on"):
        train_tokenizer(plan=tmp_path / "plan.json", output=tmp_path / "t")
    with pytest.raises(UserError, match="lists the files itself"):
        train_tokenizer([tmp_path / "a"], plan=tmp_path / "plan.json", output=tmp_path / "t")


# Token ids as text


def test_text_of_the_kind_ids_is_token_ids(tmp_path: Path) -> None:
    train_tokenizer(kind="ids", vocab_size=50_257, eod=2, output=tmp_path / "ids")
    tokenizer = open_tokenizer(tmp_path / "ids")
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path / "ids")
    ids = [12, 0, 2, 22, 50_256, 2]
    text = " ".join(map(str, ids))
    assert tokenizer.encode_batch([text, ""]) == [ids, []]
    assert oracle(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text
    assert not tokenizer.has_text
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (50_257, 2, None)
    assert (len(oracle), oracle.eos_token_id) == (50_257, 2)
    with pytest.raises(UserError, match="write token ids below 50,257, separated by"):
        tokenizer.encode_batch(["50257"])


def test_the_last_id_ends_documents_unless_another_is_named(tmp_path: Path) -> None:
    train_tokenizer(kind="ids", vocab_size=100, output=tmp_path / "ids")
    assert open_tokenizer(tmp_path / "ids").eod == 99
    with pytest.raises(UserError, match="--eod: 100: give a token from 0 to 99"):
        train_tokenizer(kind="ids", vocab_size=100, eod=100, output=tmp_path / "other")
    assert not (tmp_path / "other").exists()
