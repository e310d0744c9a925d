"""lib/csrc extracts the same texts from jsonl as orjson, or leaves the lines to orjson."""

import json
import random
from pathlib import Path

import numpy as np
import orjson
import pytest

from tokamake._csrc import json_texts
from tokamake.data.corpus.documents import Fields, texts
from tokamake.data.readers import Utf8, open_input

CHARACTERS = 'abz 09"\\/\b\f\n\r\t\0\x1f\x7f\x80\xe9'
CHARACTERS += "\u07ff\u0800\u20ac\u2028\ud7ff\ue000\uffff\U00010000\U0010ffff"


def read(lines: bytes, key: str = "text") -> list[str] | None:
    result = json_texts(lines, key)
    return None if result is None else list(Utf8(result[0], result[1]))


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.choice([0, 1, 5, 40])))


def random_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(7 if depth < 4 else 5)
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {random_key(rng): random_value(rng, depth + 1) for _ in range(3)}
    numbers = [0, -1, 12.5, -0.25, 10**16, rng.randrange(10**6)]
    return [None, True, rng.choice(numbers), random_text(rng), False][kind]


def random_key(rng: random.Random) -> str:
    return "".join(rng.choices("abc\u20ac_- ", k=4))


def random_line(rng: random.Random) -> bytes:
    members = {random_key(rng): random_value(rng) for _ in range(rng.randrange(4))}
    items = [*members.items(), ("text", random_text(rng))]
    rng.shuffle(items)
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,\t", " : ")])
    ascii_only = rng.random() < 0.5
    line = json.dumps(dict(items), separators=separators, ensure_ascii=ascii_only)
    if rng.random() < 0.2:
        line = line.replace("/", "\\/")
    return (rng.choice(["", " ", "\t"]) + line + rng.choice(["", " \r"])).encode()


def test_plain_lines_give_the_texts_of_orjson() -> None:
    rng = random.Random(1)
    num_read = 0
    for _ in range(3_000):
        lines = [random_line(rng) for _ in range(rng.choice([1, 3]))]
        joined = b"\n".join(lines) + rng.choice([b"", b"\n"])
        result = read(joined)
        if result is not None:
            num_read += 1
            assert result == [orjson.loads(line)["text"] for line in lines]
    assert num_read > 1_500  # keys with escapes are left to orjson


def test_damaged_lines_give_the_texts_of_orjson_or_none() -> None:
    rng = random.Random(2)
    alphabet = b'"\\{}[]:,x0-.eu\n\t \x00\x1f\x80\xbf\xc0\xc3\xe2\xed\xf0\xf4\xff'
    num_read = 0
    for _ in range(30_000):
        line = bytearray(random_line(rng))
        for _ in range(rng.choice([1, 1, 2])):
            start = rng.randrange(len(line))
            num_removed = rng.randrange(2)
            added = bytes([rng.choice(alphabet)]) * rng.randrange(2)
            line[start : start + num_removed] = added
        result = read(bytes(line))
        if result is not None:
            num_read += 1
            parts = filter(None, bytes(line).splitlines())
            assert result == [orjson.loads(part)["text"] for part in parts]
    assert num_read > 5_000


@pytest.mark.parametrize("distance", range(20))
def test_only_valid_utf_8_is_text(distance: int) -> None:
    """The parser reads 16 bytes at once, except near the end: `distance` covers both paths."""
    edges = [0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1]
    edges += [0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    rng = random.Random(distance)
    sequences = [bytes(rng.choices(edges, k=size)) for size in (1, 2, 3, 4) for _ in range(150)]
    sequences += ["\u20ac\U0001f600\xe9".encode(), "\ud7ff\ue000\U0010ffff".encode()]
    num_valid = 0
    for sequence in sequences:
        result = read(b'{"text":"' + sequence + b"x" * distance + b'"}')
        try:
            text = sequence.decode()
        except UnicodeDecodeError:
            assert result is None, sequence
        else:
            num_valid += 1
            assert result == [text + "x" * distance]
    assert num_valid >= 2


NOT_PLAIN = {
    "a blank line": b'{"text":"a"}\n\n{"text":"b"}',
    "no such key": b'{"other":"a"}',
    "the key twice": b'{"text":"a","text":"b"}',
    "a number instead of text": b'{"text":1}',
    "a list": b'["text"]',
    "two values": b'{"text":"a"} {"text":"b"}',
    "trailing data": b'{"text":"a"}x',
    "a byte order mark": b'\xef\xbb\xbf{"text":"a"}',
    "a key with an escape": b'{"te\\u0078t":"a"}',
    "a lone high surrogate": b'{"text":"\\ud800"}',
    "a lone low surrogate": b'{"text":"\\udc00"}',
    "two high surrogates": b'{"text":"\\ud800\\ud800"}',
    "an unknown escape": b'{"text":"\\x41"}',
    "an escape cut off": b'{"text":"\\u00',
    "a control character": b'{"text":"a\x01"}',
    "a line feed in a text": b'{"text":"a\nb"}',
    "no end": b'{"text":"a"',
    "no end of the text": b'{"text":"a',
    "an extra comma": b'{"text":"a",}',
    "NaN": b'{"text":"a","n":NaN}',
    "a zero before a number": b'{"text":"a","n":01}',
    "a sign alone": b'{"text":"a","n":-}',
    "no digit after a point": b'{"text":"a","n":1.}',
    "an exponent": b'{"text":"a","n":1e400}',
    "too many digits": b'{"text":"a","n":' + b"9" * 400 + b"}",
    "nested too deep": b'{"text":"a","n":' + b"[" * 70 + b"]" * 70 + b"}",
    "nothing": b"x",
}


@pytest.mark.parametrize("lines", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_lines_that_are_not_plain_are_left_to_orjson(lines: bytes) -> None:
    assert read(lines) is None


def test_surrogate_pairs_and_escaped_zero_bytes_are_text() -> None:
    assert read(b'{"text":"\\ud83d\\ude00\\u0000"}') == ["\U0001f600\0"]
    assert read(b"") == []


def test_a_block_of_plain_lines_has_texts_records_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [orjson.dumps({"n": n, "text": "\u20ac" * n + "line\n"}) for n in range(5)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    (block,) = open_input(path).blocks(("text",))
    assert block.texts is not None
    assert list(block.texts) == [orjson.loads(line)["text"] for line in lines]
    assert block.texts[1:3] == [block.texts[1], block.texts[-3]]
    assert block.texts.window(2, slice(1, 7)) == "\u20acl"  # the window drops a cut character
    assert list(block.records) == [orjson.loads(line) for line in lines]
    assert block.records[3] == orjson.loads(lines[3])
    assert list(block.raw or []) == lines
    assert block.numbers.tolist() == [1, 2, 3, 4, 5]
    starts = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    assert block.offsets.tolist() == starts.tolist()


def test_lib_csrc_and_orjson_give_the_same_texts_of_a_file(tmp_path: Path) -> None:
    """A blank line makes the reader parse its block with orjson."""
    rng = random.Random(3)
    lines = [random_line(rng) for _ in range(2_000)]
    plain, mixed = tmp_path / "plain.jsonl", tmp_path / "mixed.jsonl"
    plain.write_bytes(b"\n".join(lines) + b"\n")
    mixed.write_bytes(b"\n\n".join(lines) + b"\n")

    def file_texts(path: Path) -> list[str]:
        blocks = [texts(block, Fields()) for block in open_input(path).blocks(("text",))]
        assert not any(block.bad for block in blocks)
        return [text for block in blocks for text in block.columns[0]]

    assert file_texts(plain) == file_texts(mixed) == [orjson.loads(line)["text"] for line in lines]
