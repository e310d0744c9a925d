"""The encoder gives the same tokens for every batch size and number of threads."""

import json
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.conftest import documents
from tests.support.tokenizer_texts import BYTES, byte_level, changed, sequence, split
from tokamake.data.tokenize import encoder as tokenize_encoder
from tokamake.data.tokenize.encoder import Encoded, Encoder, Mismatch
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.data.tokenizers._fast_encoder import FastEncoder

TIMEOUT = 300  # seconds after which a thread counts as stuck
RECENT = "a\u088fb \U000323b0"  # characters that recent versions of Unicode have


@pytest.fixture(scope="module")
def tokenizer(sampled: Path) -> Tokenizer:
    return open_tokenizer(sampled / "tokenizer")


@pytest.fixture(scope="module")
def texts(sampled: Path) -> list[str]:
    """Documents; some are empty."""
    rng = random.Random(0)
    texts = documents(*sorted((sampled / "raw").rglob("*.jsonl")))
    texts += ["", RECENT, RECENT * 50, "<|endoftext|>", "日本語 " * 40, "x" * 30_000, " " * 999]
    texts += [
        f"{word} {rng.random()}\n" for word in ("naïve", "☃", "\U0001f600") for _ in range(50)
    ]
    rng.shuffle(texts)
    return texts


@pytest.fixture
def from_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a fast encoder from the first text on."""
    monkeypatch.setattr(tokenize_encoder, "_FAST_THRESHOLD", 1)


def rows(encoded: Encoded) -> list[list[int]]:
    assert encoded.ids.dtype == np.uint32
    assert encoded.lengths.dtype == np.int64
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1]]


def blocks(texts: list[str], size: int) -> list[list[str]]:
    return [texts[start : start + size] for start in range(0, len(texts), size)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_tokens_do_not_depend_on_the_block_size(
    tokenizer: Tokenizer, texts: list[str], from_first_text: None, workers: int, size: int
) -> None:
    sample = texts if size > 1 else texts[:60]
    expected = tokenizer.encode_batch(sample)
    for fast in (True, False):
        encoder = Encoder(tokenizer, workers=workers, fast=fast)
        assert [row for block in blocks(sample, size) for row in rows(encoder(block))] == expected
        assert encoder.name.split()[0] == ("tokamake" if fast else "tokenizers")
        assert encoder.fallback_reason == ("" if fast else "it is turned off")
        used, speed = encoder.explain(1000)
        why = "the fast encoder; equal to tokenizers " if fast else "not the fast encoder: it is "
        assert used.startswith(f"encoder: {encoder.name}, {why}")
        assert ("on each thread" in speed) == fast


def test_no_text_and_empty_texts(tokenizer: Tokenizer, from_first_text: None) -> None:
    encoder = Encoder(tokenizer, workers=2)
    assert rows(encoder([])) == []
    assert rows(encoder(["", ""])) == [[], []]
    assert rows(encoder([RECENT])) == tokenizer.encode_batch([RECENT])
    assert rows(Encoder(tokenizer, workers=1, fast=False)([])) == []


def test_text_ids_are_those_of_one_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = Encoder(tokenizer, workers=1)(texts[:20])
    assert [encoded.text_ids(number).tolist() for number in range(20)] == rows(encoded)


def test_little_text_loads_no_fast_encoder(
    sampled: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    encoder = Encoder(tokenizer, workers=1)
    assert rows(encoder(texts[:50])) == tokenizer.encode_batch(texts[:50])
    assert "not the fast encoder: below 2,000,000 characters" in encoder.explain(1)[0]
    assert (encoder.name.split()[0], encoder.fallback_reason) == ("tokenizers", "")
    script = (
        "import sys; from pathlib import Path; from tokamake.data.tokenize.encoder import Encoder;"
        "from tokamake.data.tokenizers import open_tokenizer;"
        "Encoder(open_tokenizer(Path(sys.argv[1])), workers=1)(['a'] * 1000);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    names = subprocess.run(
        [sys.executable, "-c", script, str(sampled / "tokenizer")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert names.strip() == "[]"


def test_unsupported_tokenizers_use_their_own_package(
    tmp_path: Path, from_first_text: None
) -> None:
    model = tokenizers.models.WordLevel({"<eod>": 0, "hello": 1, "?": 2}, "?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eod>"}')
    encoder = Encoder(open_tokenizer(tmp_path), workers=2)
    assert rows(encoder(["hello", "", "x"])) == [[1], [], [2]]
    assert encoder.name.split()[0] == "tokenizers"
    assert encoder.fallback_reason == "the model's type is 'WordLevel'"


@pytest.mark.parametrize(
    ("path", "value", "package"),
    [
        ("normalizer", {"type": "NFC"}, "tokamake"),
        ("normalizer", {"type": "Lowercase"}, "tokamake"),
        ("normalizer", {"type": "Prepend", "prepend": "a"}, "tokenizers"),
        ("pre_tokenizer", sequence(split(), BYTES), "tokamake"),
        ("pre_tokenizer", sequence(split(regex=r"\p{L}+|\S"), BYTES), "tokamake"),
    ],
)
def test_each_tokenizer_gets_its_fastest_exact_encoder(
    tmp_path: Path, from_first_text: None, path: str, value: object, package: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(byte_level(), path, value)))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tokenizer = open_tokenizer(tmp_path)
    encoder = Encoder(tokenizer, workers=1)
    texts = ["e\u0301", "the Å", "x\n  y"]
    assert rows(encoder(texts)) == tokenizer.encode_batch(texts)
    assert encoder.name.split()[0] == package
    is_reference = package == "tokenizers"
    assert encoder.fallback_reason == ("its normalizer is Prepend" if is_reference else "")


def wrong(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Make lib/csrc encode texts that contain `which` wrongly."""
    plain = FastEncoder.encode

    def changed(self: FastEncoder, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = plain(self, texts)
        ids = ids.copy()
        for end, length, text in zip(np.cumsum(lengths), lengths, texts, strict=True):
            if which in text and length:
                ids[end - length] ^= 1
        return ids, lengths

    monkeypatch.setattr(FastEncoder, "encode", changed)


def test_a_wrong_encoder_is_detected_in_the_first_texts(
    tokenizer: Tokenizer, from_first_text: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch, "fox")
    texts = ["good"] * 40 + ["the quick brown fox"]
    with pytest.raises(Mismatch, match=r"tokamake .* differs on .* 'the quick brown fox'"):
        Encoder(tokenizer, workers=1)(texts)
    assert rows(Encoder(tokenizer, workers=1, fast=False)(texts)) == tokenizer.encode_batch(texts)


def test_a_wrong_encoder_is_detected_later(
    tokenizer: Tokenizer, from_first_text: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_encoder, "_FIRST_SAMPLE", 1000)
    monkeypatch.setattr(tokenize_encoder, "_SAMPLE_STEP", 5000)
    monkeypatch.setattr(tokenize_encoder, "_SAMPLE", 100)
    wrong(monkeypatch, "fox")
    for size in (1, 9, 1000):
        encoder = Encoder(tokenizer, workers=1)
        texts = ["good "] * 1001 + ["the fox"] + ["good "] * 2000
        with pytest.raises(Mismatch):
            for block in blocks(["x" * 1200, *texts[:759], "fox " * 50, *texts[:500]], size):
                encoder(block)


def test_an_error_of_the_encoder_is_a_mismatch_or_a_fallback(
    tokenizer: Tokenizer, from_first_text: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("index out\nof bounds")

    with monkeypatch.context() as patch:
        patch.setattr(FastEncoder, "encode", fail)
        with pytest.raises(Mismatch, match=r"failed \(index out of bounds\)"):
            Encoder(tokenizer, workers=1)(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(FastEncoder, "__init__", fail)
        encoder = Encoder(tokenizer, workers=1)
        assert rows(encoder(["a b"])) == tokenizer.encode_batch(["a b"])
        assert encoder.fallback_reason == "tokamake cannot load it (index out of bounds)"
        assert encoder.name.startswith("tokenizers ")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FastEncoder, "__init__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Encoder(tokenizer, workers=1)(["a"])


def test_parts_end_once_they_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tokenize_encoder._in_parts
    assert [len(part) for part in parts(["a"] * 150_000)] == [65536, 65536, 18928]
    monkeypatch.setattr(tokenize_encoder, "_REFERENCE_CHUNK", 3)
    assert list(parts(["aa", "b", "cccc", "", "d"])) == [["aa", "b"], ["cccc"], ["", "d"]]
    assert list(parts(["", ""])) == [["", ""]]
    assert list(parts([])) == []


def test_samples_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_encoder, "_SAMPLE_STEP", 1000)
    monkeypatch.setattr(tokenize_encoder, "_SAMPLE", 40)
    rng = random.Random(1)
    texts = ["".join(rng.choice("abc ") for _ in range(rng.randrange(900))) for _ in range(60)]
    samples = set()
    for size in (1, 7, 60):
        windows, start = [], 0
        for block in blocks(texts, size):
            end = start + sum(map(len, block))
            windows += tokenize_encoder._samples(block, range(start, end))
            start = end
        samples.add(tuple(windows))
    (windows,) = samples
    stream = "".join(texts)
    assert len(windows) == (len(stream) - 1) // 1000
    for number, window in enumerate(windows, 1):
        assert stream[number * 1000] in window
        assert window in stream[number * 1000 - 40 : number * 1000 + 40]


def test_several_threads_encode_at_once(
    tokenizer: Tokenizer,
    texts: list[str],
    from_first_text: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenize_encoder, "_SAMPLE_STEP", 5000)
    expected = Encoder(tokenizer, workers=1, fast=False)(texts)
    encoder = Encoder(tokenizer, workers=3)
    assert encoder.threads == 3
    load, all_threads = Encoder._load, threading.Barrier(3, timeout=TIMEOUT)

    def meet(self: Encoder) -> object:  # so that each thread loads an encoder of its own
        all_threads.wait()
        return load(self)

    monkeypatch.setattr(Encoder, "_load", meet)
    parts = [texts[:20], texts[20:50], texts[50:]]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(encoder, part, encoder.reserve(part)) for part in parts]
        results = [future.result() for future in futures]
    assert len(encoder._idle) == 3
    assert np.array_equal(np.concatenate([result.ids for result in results]), expected.ids)
    assert np.array_equal(np.concatenate([result.lengths for result in results]), expected.lengths)


def test_other_threads_run_during_encoding(tokenizer: Tokenizer, from_first_text: None) -> None:
    """Encoding releases the GIL, so that other threads can run."""
    encoder = Encoder(tokenizer, workers=1)
    encoder(["start"])
    (fast,) = encoder._idle
    texts = ["".join(f"word{number} " for number in range(100_000))]
    ready, go, ran = threading.Event(), threading.Event(), threading.Event()

    def wait_and_run() -> None:
        ready.set()
        go.wait()
        ran.set()

    thread = threading.Thread(target=wait_and_run)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        ready.wait()
        sys.setswitchinterval(1e6)  # from now on, Python forces no thread to release the GIL
        go.set()
        tries = 0
        while not ran.is_set() and tries < 100:
            tries += 1
            fast.encode(texts)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        go.set()
        thread.join()
