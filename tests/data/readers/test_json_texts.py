"""Texts read out of jsonl by lib/csrc: the same as orjson's, or left to it."""

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
    found = json_texts(lines, key)
    return None if found is None else list(Utf8(found[0], found[1]))


def random_text(chance: random.Random) -> str:
    return "".join(chance.choices(CHARACTERS, k=chance.choice([0, 1, 5, 40])))


def random_value(chance: random.Random, depth: int = 0) -> object:
    kind = chance.randrange(7 if depth < 4 else 5)
    if kind == 5:
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 6:
        return {random_key(chance): random_value(chance, depth + 1) for _ in range(3)}
    numbers = [0, -1, 12.5, -0.25, 10**16, chance.randrange(10**6)]
    return [None, True, chance.choice(numbers), random_text(chance), False][kind]


def random_key(chance: random.Random) -> str:
    return "".join(chance.choices("abc\u20ac_- ", k=4))


def random_line(chance: random.Random) -> bytes:
    members = {random_key(chance): random_value(chance) for _ in range(chance.randrange(4))}
    items = [*members.items(), ("text", random_text(chance))]
    chance.shuffle(items)
    separators = chance.choice([(",", ":"), (", ", ": "), (" ,\t", " : ")])
    ascii_only = chance.random() < 0.5
    line = json.dumps(dict(items), separators=separators, ensure_ascii=ascii_only)
    if chance.random() < 0.2:
        line = line.replace("/", "\\/")
    return (chance.choice(["", " ", "\t"]) + line + chance.choice(["", " \r"])).encode()


def test_plain_lines_are_read_as_orjson_reads_them() -> None:
    chance = random.Random(1)
    taken = 0
    for _ in range(3_000):
        lines = [random_line(chance) for _ in range(chance.choice([1, 3]))]
        joined = b"\n".join(lines) + chance.choice([b"", b"\n"])
        found = read(joined)
        taken += found is not None
        if found is not None:
            assert found == [orjson.loads(line)["text"] for line in lines]
    assert taken > 1_500  # keys with escapes are left to orjson


def test_a_damaged_line_is_never_read_as_something_that_orjson_does_not_read() -> None:
    chance = random.Random(2)
    alphabet = b'"\\{}[]:,x0-.eu\n\t \x00\x1f\x80\xbf\xc0\xc3\xe2\xed\xf0\xf4\xff'
    taken = 0
    for _ in range(30_000):
        line = bytearray(random_line(chance))
        for _ in range(chance.choice([1, 1, 2])):
            at = chance.randrange(len(line))
            cut = chance.randrange(2)
            line[at : at + cut] = bytes([chance.choice(alphabet)]) * chance.randrange(2)
        found = read(bytes(line))
        if found is not None:
            taken += 1
            assert found == [orjson.loads(one)["text"] for one in bytes(line).splitlines() if one]
    assert taken > 5_000


@pytest.mark.parametrize("distance", range(20))
def test_each_kind_of_byte_sequence_is_text_if_it_is_utf_8(distance: int) -> None:
    """At each distance from the end: there, bytes are not looked at sixteen at a time."""
    edges = [0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1]
    edges += [0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    chance = random.Random(distance)
    sequences = [bytes(chance.choices(edges, k=size)) for size in (1, 2, 3, 4) for _ in range(150)]
    sequences += ["\u20ac\U0001f600\xe9".encode(), "\ud7ff\ue000\U0010ffff".encode()]
    good = 0
    for sequence in sequences:
        found = read(b'{"text":"' + sequence + b"x" * distance + b'"}')
        try:
            text = sequence.decode()
        except UnicodeDecodeError:
            assert found is None, sequence
        else:
            good += 1
            assert found == [text + "x" * distance]
    assert good >= 2


LEFT = {
    "a blank line": b'{"text":"a"}\n\n{"text":"b"}',
    "no such key": b'{"other":"a"}',
    "the key twice": b'{"text":"a","text":"b"}',
    "no text": b'{"text":1}',
    "a list": b'["text"]',
    "two values": b'{"text":"a"} {"text":"b"}',
    "something after it": b'{"text":"a"}x',
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
    "a comma too many": b'{"text":"a",}',
    "NaN": b'{"text":"a","n":NaN}',
    "a zero before a number": b'{"text":"a","n":01}',
    "a sign alone": b'{"text":"a","n":-}',
    "no digit behind a point": b'{"text":"a","n":1.}',
    "an exponent": b'{"text":"a","n":1e400}',
    "very many digits": b'{"text":"a","n":' + b"9" * 400 + b"}",
    "nested very deep": b'{"text":"a","n":' + b"[" * 70 + b"]" * 70 + b"}",
    "nothing": b"x",
}


@pytest.mark.parametrize("lines", LEFT.values(), ids=LEFT)
def test_what_is_not_plain_is_left(lines: bytes) -> None:
    assert read(lines) is None


def test_surrogate_pairs_and_zero_are_text() -> None:
    assert read(b'{"text":"\\ud83d\\ude00\\u0000"}') == ["\U0001f600\0"]
    assert read(b"") == []


def test_a_block_of_plain_lines_knows_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [orjson.dumps({"n": n, "text": "\u20ac" * n + "line\n"}) for n in range(5)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    (block,) = open_input(path).blocks(("text",))
    assert block.texts is not None
    assert list(block.texts) == [orjson.loads(line)["text"] for line in lines]
    assert block.texts[1:3] == [block.texts[1], block.texts[-3]]
    assert block.texts.window(2, slice(1, 7)) == "\u20acl"  # of a character cut in two: nothing
    assert list(block.records) == [orjson.loads(line) for line in lines]
    assert block.records[3] == orjson.loads(lines[3])
    assert list(block.raw or []) == lines
    assert block.numbers.tolist() == [1, 2, 3, 4, 5]
    starts = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    assert block.offsets.tolist() == starts.tolist()


def test_texts_are_the_same_whether_lines_are_plain_or_not(tmp_path: Path) -> None:
    """A line of another kind in the midst sends its block another way, and changes nothing."""
    chance = random.Random(3)
    lines = [random_line(chance) for _ in range(2_000)]
    plain, mixed = tmp_path / "plain.jsonl", tmp_path / "mixed.jsonl"
    plain.write_bytes(b"\n".join(lines) + b"\n")
    mixed.write_bytes(b"\n\n".join(lines) + b"\n")

    def all_of(path: Path) -> list[str]:
        found = [texts(block, Fields()) for block in open_input(path).blocks(("text",))]
        assert not any(one.bad for one in found)
        return [text for one in found for text in one.columns[0]]

    assert all_of(plain) == all_of(mixed) == [orjson.loads(line)["text"] for line in lines]
