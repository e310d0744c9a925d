"""`split` loses and changes no line, keeps equal texts together, and ignores file boundaries."""

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
    """Return lines of JSON with unique ids, with and without spaces and escapes."""
    rng = random.Random(seed)
    result = []
    for index in range(number):
        record = {"id": index, "text": f"document {rng.randrange(10**9)} ünïcode\u2028"}
        spaces = (None, (",", ":"))[index % 2]
        result.append(json.dumps(record, ensure_ascii=index % 3 == 0, separators=spaces).encode())
    return result


def parts(prefix: Path) -> dict[str, list[bytes]]:
    """Return the lines of each existing file."""
    paths = {name: Path(f"{prefix}.{name}.jsonl") for name in PARTS}
    files = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
    assert all(data.endswith(b"\n") or not data for data in files.values())
    return {name: data.split(b"\n")[:-1] for name, data in files.items()}


def test_every_line_goes_to_one_file_unchanged_and_in_order(tmp_path: Path) -> None:
    content = lines(3000)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(content))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="80,15,5")
    files = parts(tmp_path / "out")
    assert list(files) == list(PARTS)
    positions = {line: position for position, line in enumerate(content)}
    for file_lines in files.values():
        assert all(positions[a] < positions[b] for a, b in pairwise(file_lines))
    assert Counter(line for file_lines in files.values() for line in file_lines) == Counter(content)


def test_shares_are_met_within_chance(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(20_000)))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="90,8,2")
    files = parts(tmp_path / "out")
    for name, share in zip(PARTS, (0.9, 0.08, 0.02), strict=True):
        deviation = (20_000 * share * (1 - share)) ** 0.5
        assert abs(len(files[name]) - 20_000 * share) < 5 * deviation


def test_equal_texts_stay_together_if_other_keys_differ(tmp_path: Path) -> None:
    records = [{"text": f"text {index % 50}", "id": index} for index in range(1000)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="1,1,1")
    texts = [
        {json.loads(line)["text"] for line in part} for part in parts(tmp_path / "out").values()
    ]
    assert all(texts)
    assert sum(map(len, texts)) == 50


def test_files_and_compression_change_nothing(tmp_path: Path) -> None:
    content = lines(2000)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(content))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/1.jsonl.gz").write_bytes(gzip.compress(b"\n".join(content[:700])))
    (tmp_path / "b/2.jsonl").write_bytes(b"\n".join(content[700:]) + b"\n")
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "one")
    split([str(tmp_path / "b")], output=tmp_path / "two")
    assert parts(tmp_path / "one") == parts(tmp_path / "two")


def test_the_last_file_takes_the_rounding_error_of_the_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.7 + 0.2 + 0.1 is less than 1 in floats."""
    monkeypatch.setattr(module, "_hash", lambda *_: (1 << 64) - 1)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(3)))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="7,2,1")
    assert list(map(len, parts(tmp_path / "out").values())) == [0, 0, 3]


def test_the_seed_decides_the_split(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(500)))
    splits = []
    for name, seed in (("one", 1), ("two", 2), ("again", 1)):
        split([str(tmp_path / "a.jsonl")], output=tmp_path / name, split="1,1,0", seed=seed)
        splits.append(parts(tmp_path / name))
    assert splits[0] == splits[2]
    # About a quarter of the 500 lines move from train to valid.
    moved = set(splits[0]["train"]) & set(splits[1]["valid"])
    assert 80 < len(moved) < 170


def test_a_share_of_0_gives_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(200)))
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="0,3,1")
    files = parts(tmp_path / "out")
    assert list(files) == ["valid", "test"]
    assert sum(map(len, files.values())) == 200


def test_several_keys_decide_together(tmp_path: Path) -> None:
    pairs = [("a", "bc"), ("ab", "c"), ("a", "bc")] * 40
    records = [{"q": q, "a": a, "id": index} for index, (q, a) in enumerate(pairs)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    sizes = set()
    for seed, keys in enumerate([("q", "a"), ("q,a",)] * 10):
        split(
            [str(tmp_path / "a.jsonl")],
            output=tmp_path / "out",
            split="1,1,0",
            seed=seed,
            text_key=keys,
        )
        sizes.add(tuple(sorted(len(part) for part in parts(tmp_path / "out").values())))
    # Two texts with 80 and 40 lines: in the same file or in two files.
    assert sizes == {(0, 120), (40, 80)}


def test_blank_lines_are_dropped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = lines(10)
    (tmp_path / "a.jsonl").write_bytes(b"\n\xef\xbb\xbf" + b"\n \n".join(content) + b"\n\n")
    split([str(tmp_path / "a.jsonl")], output=tmp_path / "out", split="1,0,0")
    assert parts(tmp_path / "out")["train"] == content
    output = capsys.readouterr().out
    assert "10 documents, 100.00%" in output
    assert "11 blank lines" in output


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
def test_a_bad_line_stops_split_and_leaves_no_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=BAD[content]):
        split([str(tmp_path / "a.jsonl")], output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "out.train.jsonl"
    source.write_bytes(b"\n".join(lines(20)))
    with pytest.raises(UserError, match="is both input and output"):
        split([str(source)], output=tmp_path / "out")
    (tmp_path / "new.test.jsonl").write_bytes(b"old")
    with pytest.raises(UserError, match=r"new\.test\.jsonl: is from another split"):
        split([str(source)], output=tmp_path / "new", split="9,1,0")
    with pytest.raises(UserError, match="give two or three non-negative numbers"):
        split([str(source)], output=tmp_path / "new", split="90,10,0,0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.test.jsonl", "out.train.jsonl"]


def test_parquet_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: is parquet, not jsonl"):
        split([str(tmp_path / "a.parquet")], output=tmp_path / "out")


def test_a_corpus_is_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    table = tmp_path / "table.tsv"
    table.write_text(f"corpus\tfiles\ttext_key\tweight\nmine\t{tmp_path}/*.jsonl\tbody\t1\n")
    split(["mine"], output=tmp_path / "out/mine", split="1,0,0", corpora=table)
    assert len((tmp_path / "out/mine.train.jsonl").read_text().splitlines()) == 2
    with pytest.raises(UserError, match="'yours' is not a corpus; name one of mine"):
        split(["yours"], output=tmp_path / "out/mine", corpora=table)
