"""Dumps of Wikipedia give their articles once, for all compressions and byte ranges."""

import bz2
import json
import random
import resource
from pathlib import Path

import pytest

from tests.support.readings import PACK, records, small_steps
from tests.support.wikipedia_dumps import (
    FOOTER,
    HEADER,
    cut_anywhere,
    multistream,
    page,
    pages_of,
    xml,
)
from tests.support.wikitext_cases import CASES
from tokamake.data.readers import BadRecord, Input, has_byte_ranges, open_input, sniff
from tokamake.data.readers._page_cuts import cuts
from tokamake.errors import UserError

PAGES = pages_of(30)
XML = xml(PAGES)
EXPECTED = [
    {
        "id": str(3 * number + 10),
        "revid": str(30 * number + 100),
        "url": f"https://test.wikipedia.org/wiki?curid={3 * number + 10}",
        "title": f"Title {number} & Söhne",
        "text": f"Article {number} has words.\n\n{list(CASES.values())[number]}".strip(),
    }
    for number in range(30)
]
DUMPS = {
    "dump.xml": XML,
    "dump.xml-p1p30": XML,
    "dump.txt": b"\xef\xbb\xbf<?xml version='1.0'?>\n" + XML,
    "one_line.xml": XML.replace(b"\n    ", b"").replace(b"\n  <", b"<"),
    **{f"dump.xml.{name}": pack(XML) for name, pack in PACK.items()},
    "multistream.xml.bz2": multistream(PAGES, pages_a_stream=7),
    "pbzip2.xml.bz2": cut_anywhere(XML, 5_000),
}


@pytest.mark.parametrize("name", DUMPS)
def test_each_dump_gives_the_same_articles(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(DUMPS[name])
    assert sniff(path)[0] == "wikipedia"
    raw = open_input(path)
    assert records(raw) == EXPECTED
    assert raw.documents == 30
    assert raw.bytes == len(DUMPS[name])
    assert raw.skipped == {"pages of other namespaces": 30, "redirects": 30}
    with small_steps(50):
        assert records(raw) == EXPECTED


@pytest.mark.parametrize("name", ["dump.xml", "multistream.xml.bz2", "pbzip2.xml.bz2"])
@pytest.mark.parametrize("count", [2, 3, 7, 100])
def test_byte_ranges_give_each_article_once(tmp_path: Path, name: str, count: int) -> None:
    path = tmp_path / name
    path.write_bytes(DUMPS[name])
    size, rng = len(DUMPS[name]), random.Random(count)
    bounds = [0, *sorted(rng.sample(range(size), count - 1)), size]
    found, num_bytes = [], 0
    for start, end in zip(bounds, [*bounds[1:-1], None], strict=False):
        raw = open_input(path, byte_range=(start, end))
        found += records(raw)
        num_bytes += raw.bytes
    assert found == EXPECTED
    assert num_bytes == size


def test_only_streams_that_begin_with_a_page_are_cuts(tmp_path: Path) -> None:
    path = tmp_path / "a.bz2"
    path.write_bytes(DUMPS["multistream.xml.bz2"])
    assert has_byte_ranges(path)
    assert len(list(cuts(path, 1, compression="bz2"))) == 13  # 90 pages, 7 in a stream
    for name in ("pbzip2.xml.bz2", "dump.xml.bz2", "dump.xml.gz"):
        path.write_bytes(DUMPS[name])
        assert not has_byte_ranges(path)
    with pytest.raises(UserError, match="a compressed file has no byte ranges"):
        open_input(path, byte_range=(0, 5))


@pytest.mark.parametrize("name", ["dump.xml", "multistream.xml.bz2", "dump.xml.gz"])
def test_a_page_is_read_from_its_offset_on(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(DUMPS[name])
    for block in open_input(path).blocks(("text",)):
        for number, offset, record in zip(block.numbers, block.offsets, block.records, strict=True):
            assert str(number) == record["id"]
            raw = open_input(path, byte_range=(max(offset, 0), None))
            from_there = records(raw)
            assert record in from_there
            if name == "dump.xml":
                assert record == from_there[0]
            assert (offset < 0) == (name == "dump.xml.gz")


def test_pages_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    newer = (
        "<revision><id>9</id><timestamp>2024-02-01T00:00:00Z</timestamp><text>new</text></revision>"
    )
    older = newer.replace("2024-02", "2020-02").replace("new", "old")
    gone = newer.replace("<text>new</text>", '<text bytes="0" deleted="deleted" />')
    stub = newer.replace("<text>new</text>", '<text bytes="7" id="3" />')
    script = newer.replace("<text>", "<model>javascript</model><text>")
    pages = [
        page(1, "History", "first", more=older + newer + older),
        page(2, "Gone", "first", more=gone),
        page(3, "Stub", "first", more=stub),
        page(4, "Empty", ""),
        page(5, "Script", "x", more=script),
        page(6, "Before 2012", "old dump", ns=None),
        page(7, "Diskussion:Before 2012", "talk", ns=None),
        page(8, "Word: of two", "article", ns=None),
        page(9, "Old", "  #Redirect [[x]]"),
        page(10, "Nameless", "text").replace("    <id>10</id>\n", ""),
        "  <page></page>\n",
    ]
    path.write_bytes(xml(pages))
    raw = open_input(path)
    found = records(raw, "text")
    texts = {record["id"]: record["text"] for record in found if isinstance(record, dict)}
    assert texts == {"1": "new", "4": "", "6": "old dump", "8": "article"}
    assert raw.skipped == {
        "deleted pages": 2,
        "pages of other content models than wikitext": 1,
        "pages of other namespaces": 1,
        "redirects": 1,
    }
    stub_fault, id_fault = (record.reason for record in found if isinstance(record, BadRecord))
    assert stub_fault == (
        'the page "Stub" lacks its text, of 7 bytes; fetch the dump again, or pages-articles if it '
        "is a dump of stubs"
    )
    assert id_fault == 'the page "Nameless" has no id; fetch the dump again'
    numbers = [int(number) for block in raw.blocks(("text",)) for number in block.numbers]
    assert numbers == [1, 3, 4, 6, 8, 0]  # the stub has its number; a page without one has 0
    assert raw.place(7) == f"{path}: page 7"
    assert raw.place(0) == str(path)


FAULTS = {
    "cut.xml": (XML[:-2_000], r'ends in the middle after the page ".*", at byte \d+; fetch it ag'),
    "footer.xml": (XML[: -len(FOOTER)], r"ends in the middle .*fetch it again: the lost pages"),
    "cut.xml.gz": (
        PACK["gz"](XML)[:-500],
        r"gz data is truncated, near byte \d+ of the compressed",
    ),
    "cut.xml.bz2": (
        DUMPS["multistream.xml.bz2"][:-400],
        r"bz2 data is truncated .*, near byte \d+",
    ),
    "cut_at_stream.bz2": (
        multistream(PAGES, pages_a_stream=7)[: -len(bz2.compress(FOOTER.encode()))],
        'ends in the middle after the page "Old 29"; fetch it again',
    ),
    "tag.xml": (
        XML.replace(b"</title>", b"</titel>", 1),
        r"is not valid XML \(mismatched tag: line",
    ),
    "text.xml": (XML.replace(b"words", b"wor\x01ds", 1), r"is not valid XML \(not well-formed"),
    "latin.xml": (XML.replace("ö".encode(), b"\xf6", 1), r"is not valid XML \(not well-formed"),
    "twice.xml": (XML + XML, r"is not valid XML \(junk after document element"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_dump_is_one_error(tmp_path: Path, name: str) -> None:
    content, message = FAULTS[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        records(open_input(path))
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_dump(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"<page></page>")
    with pytest.raises(UserError, match="is no dump of MediaWiki, which begins with <mediawiki>"):
        records(open_input(path, format="wikipedia"))
    path.write_bytes(json.dumps({"text": "x"}).encode())
    with pytest.raises(UserError, match="is no dump of MediaWiki"):
        records(open_input(path, format="wikipedia"))


@pytest.mark.grid
@pytest.mark.slow
def test_a_page_of_100_mb_takes_memory_of_a_few_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    sentence = "A '''long''' page of [[many words|words]]{{x}} and &lt;ref>notes&lt;/ref>.\n\n"
    with path.open("w") as stream:
        head, tail = page(1, "Long", "TEXT").split("TEXT")
        stream.write(HEADER + head)
        for _ in range(100):
            stream.write(sentence * (1_000_000 // len(sentence)))
        stream.write(tail + FOOTER)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (record,) = records(open_input(path))
    assert record["text"].startswith("A long page of words and.\n\nA long")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 3e9


def test_damage_to_a_multistream_dump_loses_no_article_silently(tmp_path: Path) -> None:
    content, path, rng = DUMPS["multistream.xml.bz2"], tmp_path / "a.bz2", random.Random(3)
    refused: list[str] = []
    for _ in range(60):
        start, changed = rng.randrange(len(content)), bytearray(content)
        kind, size = rng.randrange(3), rng.randrange(1, 9)
        if kind == 0:
            changed[start] ^= 1 << rng.randrange(8)
        else:
            changed[start : start + size if kind == 1 else len(content)] = b""
        path.write_bytes(changed)
        try:
            found = [record for part in halves(path) for record in records(part)]
        except UserError as error:
            refused.append(str(error))
            continue
        assert found == EXPECTED
    assert len(refused) > 50
    assert all(message.startswith(str(path)) for message in refused)


def halves(path: Path) -> list[Input]:
    middle = path.stat().st_size // 2
    return [open_input(path, byte_range=span) for span in ((0, middle), (middle, None))]
