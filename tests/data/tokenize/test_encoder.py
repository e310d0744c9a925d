"""The encoder gives the same tokens with every package, batch size and number of threads."""

import json
import queue
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import documents
from tests.support.gigatoken_texts import BYTES, byte_level, changed, sequence, split
from tokamake.data.tokenize import encoder as tokenize_encoder
from tokamake.data.tokenize.encoder import Encoded, Encoder, Mismatch
from tokamake.data.tokenizers import Tokenizer, _gigatoken, open_tokenizer
from tokamake.data.tokenizers._byte_level import ByteLevelEncoder

TIMEOUT = 300  # seconds after which a thread counts as stuck
GUARDED = "a\u088fb \U000323b0"


@pytest.fixture(scope="module")
def tokenizer(sampled: Path) -> Tokenizer:
    return open_tokenizer(sampled / "tokenizer")


@pytest.fixture(scope="module")
def texts(sampled: Path) -> list[str]:
    """Documents; some are empty, and some must go to the reference tokenizer."""
    rng = random.Random(0)
    texts = documents(*sorted((sampled / "raw").rglob("*.jsonl")))
    texts += ["", GUARDED, GUARDED * 50, "<|endoftext|>", "日本語 " * 40, "x" * 30_000, " " * 999]
    texts += [
        f"{word} {rng.random()}\n" for word in ("naïve", "☃", "\U0001f600") for _ in range(50)
    ]
    rng.shuffle(texts)
    return texts


@pytest.fixture
def from_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a fast encoder from the first text on."""
    monkeypatch.setattr(tokenize_encoder, "_FAST_THRESHOLD", 1)


@pytest.fixture
def with_gigatoken(from_first_text: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use gigatoken from the first text on, as for tokenizers that lib/csrc does not support."""
    monkeypatch.setattr(tokenize_encoder.byte_level, "refusal", lambda _: "it is turned off")


def rows(encoded: Encoded) -> list[list[int]]:
    assert encoded.ids.dtype == np.uint32
    assert encoded.lengths.dtype == np.int64
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1]]


def blocks(texts: list[str], size: int) -> list[list[str]]:
    return [texts[start : start + size] for start in range(0, len(texts), size)]


@pytest.fixture(params=["tokamake", "gigatoken"])
def package(request: pytest.FixtureRequest, from_first_text: None) -> str:
    """The fast encoders in turn."""
    if request.param == "gigatoken":
        request.getfixturevalue("with_gigatoken")
    return request.param


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_tokens_do_not_depend_on_the_block_size(
    tokenizer: Tokenizer, texts: list[str], package: str, workers: int, size: int
) -> None:
    sample = texts if size > 1 else texts[:60]
    expected = tokenizer.encode_batch(sample)
    for fast in (True, False):
        encoder = Encoder(tokenizer, workers=workers, fast=fast)
        assert [row for block in blocks(sample, size) for row in rows(encoder(block))] == expected
        assert encoder.name.split()[0] == (package if fast else "tokenizers")
        assert encoder.fallback_reason == ("" if fast else "it is turned off")


def test_no_text_and_empty_texts(tokenizer: Tokenizer, package: str) -> None:
    encoder = Encoder(tokenizer, workers=2)
    assert rows(encoder([])) == []
    assert rows(encoder(["", ""])) == [[], []]
    assert rows(encoder([GUARDED])) == tokenizer.encode_batch([GUARDED])
    assert rows(Encoder(tokenizer, workers=1, fast=False)([])) == []


def test_text_ids_are_those_of_one_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = Encoder(tokenizer, workers=1)(texts[:20])
    assert [encoded.text_ids(number).tolist() for number in range(20)] == rows(encoded)


def test_little_text_loads_no_fast_encoder(
    sampled: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    encoder = Encoder(tokenizer, workers=1)
    assert rows(encoder(texts[:50])) == tokenizer.encode_batch(texts[:50])
    assert (encoder.name.split()[0], encoder.fallback_reason) == ("tokenizers", "")
    script = (
        "import sys; from pathlib import Path; from tokamake.data.tokenize.encoder import Encoder;"
        "from tokamake.data.tokenizers import open_tokenizer;"
        "Encoder(open_tokenizer(Path(sys.argv[1])), workers=1)(['a'] * 1000);"
        "print([name for name in ('gigatoken', 'awkward', 'transformers') if name in sys.modules])"
    )
    names = subprocess.run(
        [sys.executable, "-c", script, str(sampled / "tokenizer")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert names.strip() == "[]"


def test_unsafe_texts_go_to_the_reference_tokenizer(
    tokenizer: Tokenizer, with_gigatoken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_texts: list[str] = []
    plain = _gigatoken.Gigatoken.encode

    def spy(self: _gigatoken.Gigatoken, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        fast_texts.extend(texts)
        return plain(self, texts)

    monkeypatch.setattr(_gigatoken.Gigatoken, "encode", spy)
    texts = ["one", GUARDED, "two", GUARDED + "é", "three"]
    assert rows(Encoder(tokenizer, workers=1)(texts)) == tokenizer.encode_batch(texts)
    assert {"one", "two", "three"} <= set(fast_texts)
    assert not any("\u088f" in text for text in fast_texts)


def test_unsupported_tokenizers_use_their_own_package(
    tmp_path: Path, from_first_text: None
) -> None:
    words = ["[UNK]", "[SEP]", "[CLS]", "hello", "##s", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = open_tokenizer(tmp_path)
    encoder = Encoder(tokenizer, workers=2)
    assert rows(encoder(["Hellos world", "", "x"])) == [[3, 4, 5], [], [0]]
    assert encoder.name.split()[0] == "tokenizers"
    assert encoder.fallback_reason == "the model's type is 'WordPiece'"


@pytest.mark.parametrize(
    ("path", "value", "package"),
    [
        ("normalizer", {"type": "NFC"}, "tokamake"),
        ("normalizer", {"type": "Lowercase"}, "tokenizers"),
        ("pre_tokenizer", sequence(split(), BYTES), "gigatoken"),
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
    assert encoder.fallback_reason == ("its normalizer is Lowercase" if is_reference else "")


def wrong(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Make gigatoken encode texts that contain `which` wrongly."""
    plain = _gigatoken.Gigatoken._encode_part

    def changed(self: _gigatoken.Gigatoken, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = plain(self, texts)
        ids = ids.copy()
        for end, length, text in zip(np.cumsum(lengths), lengths, texts, strict=True):
            if which in text and length:
                ids[end - length] ^= 1
        return ids, lengths

    monkeypatch.setattr(_gigatoken.Gigatoken, "_encode_part", changed)


def test_a_wrong_gigatoken_is_detected_in_the_first_texts(
    tokenizer: Tokenizer, with_gigatoken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch, "fox")
    texts = ["good"] * 40 + ["the quick brown fox"]
    with pytest.raises(Mismatch, match=r"gigatoken .* differs on .* 'the quick brown fox'"):
        Encoder(tokenizer, workers=1)(texts)
    assert rows(Encoder(tokenizer, workers=1, fast=False)(texts)) == tokenizer.encode_batch(texts)


def test_a_wrong_byte_level_encoder_is_detected(
    tokenizer: Tokenizer, from_first_text: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ByteLevelEncoder.encode

    def changed(self: ByteLevelEncoder, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = plain(self, texts)
        return ids ^ 1, lengths

    monkeypatch.setattr(ByteLevelEncoder, "encode", changed)
    with pytest.raises(Mismatch, match=r"tokamake .* differs on .* 'good'"):
        Encoder(tokenizer, workers=1)(["good"] * 40)


def test_a_wrong_gigatoken_is_detected_later(
    tokenizer: Tokenizer, with_gigatoken: None, monkeypatch: pytest.MonkeyPatch
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


def test_a_panic_in_gigatoken_is_a_mismatch_or_a_fallback(
    tokenizer: Tokenizer, with_gigatoken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """The exception of Rust packages with a bug."""

    def panic(*_: object) -> None:
        raise PanicException("index out\nof bounds")

    with monkeypatch.context() as patch:
        patch.setattr(_gigatoken.Gigatoken, "_encode_part", panic)
        with pytest.raises(Mismatch, match=r"failed \(index out of bounds\)"):
            Encoder(tokenizer, workers=1)(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(_gigatoken, "_open", panic)
        encoder = Encoder(tokenizer, workers=1)
        assert rows(encoder(["a b"])) == tokenizer.encode_batch(["a b"])
        assert encoder.fallback_reason == "gigatoken cannot load it (index out of bounds)"
        assert encoder.name.startswith("tokenizers ")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_gigatoken, "_open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Encoder(tokenizer, workers=1)(["a"])


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
    tokenizer: Tokenizer, texts: list[str], package: str, monkeypatch: pytest.MonkeyPatch
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


class ReportingCondition(threading.Condition):
    """A condition that reports each time that a thread waits for it."""

    def __init__(self, events: "queue.Queue[str]") -> None:
        super().__init__()
        self._events = events

    def wait(self, timeout: float | None = TIMEOUT) -> bool:
        self._events.put("waits")
        assert super().wait(timeout)
        return True


def test_caches_are_dropped_together(
    tokenizer: Tokenizer, with_gigatoken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full caches are dropped when no thread uses one; only then is a new one loaded."""
    monkeypatch.setattr(tokenize_encoder, "_CACHE_LIMIT", 50)
    encoder = Encoder(tokenizer, workers=2)
    encoder(["start"])  # 5 of the 100 characters that two threads may cache
    load, events = Encoder._load, queue.Queue()

    def note(self: Encoder) -> object:
        events.put("loads")
        return load(self)

    def borrow(characters: int) -> object:
        with encoder._borrow(characters) as fast:
            return fast

    monkeypatch.setattr(Encoder, "_load", note)
    encoder._borrowing = ReportingCondition(events)
    first = borrow(5)
    assert events.empty()  # an encoder with free cache is reused
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        assert stack.enter_context(encoder._borrow(10)) is first
        with encoder._borrow(80) as second:
            assert events.get_nowait() == "loads"
            renewed = pool.submit(borrow, 1)
            assert events.get(timeout=TIMEOUT) == "waits"
        assert events.get(timeout=TIMEOUT) == "waits"  # the first one is still in use
        stack.close()
        fresh = renewed.result(timeout=TIMEOUT)
    assert events.get_nowait() == "loads"
    assert fresh not in (first, second)
    assert encoder._idle == [fresh]
    assert borrow(99) is fresh
    assert events.empty()
    assert borrow(1) is not fresh


def test_dropped_caches_do_not_change_tokens(
    tokenizer: Tokenizer, texts: list[str], with_gigatoken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The longest text fills the caches of both threads.
    monkeypatch.setattr(tokenize_encoder, "_CACHE_LIMIT", max(map(len, texts)) // 2)
    expected = Encoder(tokenizer, workers=1, fast=False)(texts)
    encoder = Encoder(tokenizer, workers=2)
    load, loads = Encoder._load, []

    def note(self: Encoder) -> object:
        loads.append(self)
        return load(self)

    monkeypatch.setattr(Encoder, "_load", note)
    parts = blocks(texts, 4)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(encoder, part, encoder.reserve(part)) for part in parts]
        results = [future.result() for future in futures]
    assert len(loads) > 2  # more often than once per thread
    assert np.array_equal(np.concatenate([result.ids for result in results]), expected.ids)


def test_other_threads_run_during_encoding(
    tokenizer: Tokenizer, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding releases the GIL, so that other threads can run."""
    # The real function reads a file, which would release the GIL.
    monkeypatch.setattr(_gigatoken, "_resident_bytes", lambda: 0)
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
