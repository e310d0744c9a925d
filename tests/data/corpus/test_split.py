"""The split tool: nothing lost or changed, equal texts together, the same whatever the cut."""

import gzip
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tokamake.data.corpus import split as module
from tokamake.data.corpus.split import split
from tokamake.errors import UserError

PARTS = ("train", "valid", "test")


def lines(number: int, seed: int = 0) -> list[bytes]:
    """Lines that differ in more than their text, in several spellings of JSON."""
    rng = random.Random(seed)
    made = []
    for index in range(number):
        record = {"id": index, "text": f"document {rng.randrange(10**9)} ünïcode\u2028"}
        spaces = (None, (",", ":"))[index % 2]
        made.append(json.dumps(record, ensure_ascii=index % 3 == 0, separators=spaces).encode())
    return made


def parts(prefix: Path) -> dict[str, list[bytes]]:
    """Lines of each file that is there."""
    paths = {name: Path(f"{prefix}.{name}.jsonl") for name in PARTS}
    found = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
    assert all(content.endswith(b"\n") or not content for content in found.values())
    return {name: content.split(b"\n")[:-1] for name, content in found.items()}


def test_every_line_goes_unchanged_and_in_order_to_one_part(tmp_path: Path) -> None:
    given = lines(3000)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(given))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="80,15,5")
    found = parts(tmp_path / "out")
    assert list(found) == list(PARTS)
    places = {line: place for place, line in enumerate(given)}
    for content in found.values():
        assert all(places[a] < places[b] for a, b in pairwise(content))
    assert Counter(line for content in found.values() for line in content) == Counter(given)


def test_shares_come_out_within_chance(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(20_000)))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="90,8,2")
    found = parts(tmp_path / "out")
    for name, share in zip(PARTS, (0.9, 0.08, 0.02), strict=True):
        deviation = (20_000 * share * (1 - share)) ** 0.5
        assert abs(len(found[name]) - 20_000 * share) < 5 * deviation


def test_equal_texts_stay_together_whatever_else_differs(tmp_path: Path) -> None:
    records = [{"text": f"text {index % 50}", "id": index} for index in range(1000)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="1,1,1")
    texts = [
        {json.loads(line)["text"] for line in part} for part in parts(tmp_path / "out").values()
    ]
    assert all(texts)
    assert sum(map(len, texts)) == 50


def test_files_and_compression_change_nothing(tmp_path: Path) -> None:
    given = lines(2000)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(given))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/1.jsonl.gz").write_bytes(gzip.compress(b"\n".join(given[:700])))
    (tmp_path / "b/2.jsonl").write_bytes(b"\n".join(given[700:]) + b"\n")
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "one")
    split([str(tmp_path / "b")], output=tmp_path / "two")
    assert parts(tmp_path / "one") == parts(tmp_path / "two")


def test_the_last_part_takes_what_rounding_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.7 + 0.2 + 0.1 is less than 1 in floats."""
    monkeypatch.setattr(module, "_hash", lambda *_: (1 << 64) - 1)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(3)))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="7,2,1")
    assert list(map(len, parts(tmp_path / "out").values())) == [0, 0, 3]


def test_another_seed_splits_otherwise_and_the_same_one_alike(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(500)))
    found = []
    for name, seed in (("one", 1), ("two", 2), ("again", 1)):
        split([str(tmp_path / "a.jsonl")], output=tmp_path / name, split="1,1,0", seed=seed)
        found.append(parts(tmp_path / name))
    assert found[0] == found[2]
    # Half of the lines change sides.
    moved = set(found[0]["train"]) & set(found[1]["valid"])
    assert 80 < len(moved) < 170


def test_a_share_of_nothing_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(200)))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="0,3,1")
    found = parts(tmp_path / "out")
    assert list(found) == ["valid", "test"]
    assert sum(map(len, found.values())) == 200


def test_several_keys_are_one_text(tmp_path: Path) -> None:
    pairs = [("a", "bc"), ("ab", "c"), ("a", "bc")] * 40
    records = [{"q": q, "a": a, "id": index} for index, (q, a) in enumerate(pairs)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    sides = set()
    for seed, keys in enumerate([("q", "a"), ("q,a",)] * 10):
        split(
            [str(tmp_path / "a.jsonl")],
            output=tmp_path / "out",
            split="1,1,0",
            seed=seed,
            text_key=keys,
        )
        sides.add(tuple(sorted(len(part) for part in parts(tmp_path / "out").values())))
    # Two texts, one of 80 lines and one of 40: together in one part, or apart.
    assert sides == {(0, 120), (40, 80)}


def test_blank_lines_go_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = lines(10)
    (tmp_path / "a.jsonl").write_bytes(b"\n\xef\xbb\xbf" + b"\n \n".join(given) + b"\n\n")
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="1,0,0")
    assert parts(tmp_path / "out")["train"] == given
    told = capsys.readouterr().out
    assert "10 documents, 100.00%" in told
    assert "11 blank lines" in told


BAD = {
    b'{"text": "a"}\n{"text": "b"\n': "a.jsonl:2: not valid JSON",
    b'{"text": "a"}\n\n[1]\n': "a.jsonl:3: not a JSON object",
    b'{"body": "a"}\n': 'a.jsonl:1: no key "text"',
    b'{"text": 7}\n': 'a.jsonl:1: "text" holds a number',
    b'{"text": "\xff"}\n': "a.jsonl:1: not valid UTF-8",
    b'{"text": "\\ud800"}\n': "a.jsonl:1: a lone surrogate",
    b"\n\n": "no document",
}


@pytest.mark.parametrize("content", BAD)
def test_a_bad_line_stops_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=BAD[content]):
        split([str(tmp_path / "a.jsonl")], output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_files_are_not_lost(tmp_path: Path) -> None:
    source = tmp_path / "out.train.jsonl"
    source.write_bytes(b"\n".join(lines(20)))
    with pytest.raises(UserError, match="is both input and output"):
        split([str(source)], output=tmp_path / "out")
    (tmp_path / "new.test.jsonl").write_bytes(b"old")
    with pytest.raises(UserError, match=r"new\.test\.jsonl: is from another split"):
        split([str(source)], output=tmp_path / "new", split="9,1,0")
    with pytest.raises(UserError, match="give three non-negative numbers"):
        split([str(source)], output=tmp_path / "new", split="90,10")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.test.jsonl", "out.train.jsonl"]


def test_tables_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: is parquet, not jsonl"):
        split([str(tmp_path / "a.parquet")], output=tmp_path / "out")


def test_a_corpus_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    table = tmp_path / "table.tsv"
    table.write_text(f"corpus\tfiles\ttext_key\tweight\nmine\t{tmp_path}/*.jsonl\tbody\t1\n")
    split(["mine"], output=tmp_path / "out/mine", split="1,0,0", corpora=table)
    assert len((tmp_path / "out/mine.train.jsonl").read_text().splitlines()) == 2
    with pytest.raises(UserError, match="'yours' is not a corpus; name one of mine"):
        split(["yours"], output=tmp_path / "out/mine", corpora=table)
