"""Texts of documents: keys, templates, and reasons for bad documents."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamake.data.corpus.documents import Fields, read_texts, texts
from tokamake.data.readers import BadRecord, RecordBlock
from tokamake.errors import UserError


def block(*records: Any) -> RecordBlock:
    numbers = np.arange(1, len(records) + 1)
    return RecordBlock(list(records), numbers, numbers, None)


GOOD = [{"title": "A", "text": "a"}, {"title": "", "text": "ü\n", "more": 1}]
BAD = {
    '"text" holds null, not text; fix text_key or the row': {"title": "t", "text": None},
    '"text" holds a number, not text; fix text_key or the row': {"title": "t", "text": 3.5},
    '"text" holds true or false, not text; fix text_key or the row': {"title": "", "text": True},
    '"text" holds a list, not text; fix text_key or the row': {"title": "t", "text": ["a"]},
    '"title" holds an object, not text; fix text_key or the row': {"title": {}, "text": "a"},
    '"text" holds bytes, not text; fix text_key or the row': {"title": "t", "text": b"a"},
    'no key "text" (it has title, body); fix text_key or the row': {"title": "t", "body": "b"},
    'no key "title" (it has nothing); fix text_key or the row': {},
    "not valid JSON": BadRecord("not valid JSON"),
}


def test_each_key_gives_a_column() -> None:
    result = texts(block(*GOOD), Fields(("title", "text")))
    assert result.columns == (["A", ""], ["a", "ü\n"])
    assert result.kept.tolist() == [0, 1]
    assert result.bad == []
    assert texts(block(*GOOD), Fields()).columns == (["a", "ü\n"],)
    assert texts(block(), Fields(("a", "b"))).columns == ([], [])


@pytest.mark.parametrize("reason", BAD)
@pytest.mark.parametrize("template", ["", "{title}: {text}"])
def test_a_bad_document_is_bad_for_all_keys(reason: str, template: str) -> None:
    result = texts(block(GOOD[0], BAD[reason], GOOD[1]), Fields(("title", "text"), template))
    assert result.bad == [(1, reason)]
    assert result.kept.tolist() == [0, 2]
    assert result.columns == ((["A: a", ": ü\n"],) if template else (["A", ""], ["a", "ü\n"]))


@given(st.lists(st.sampled_from([*GOOD, *BAD.values()]), max_size=20))
def test_every_document_is_kept_or_bad(records: list[Any]) -> None:
    result = texts(block(*records), Fields(("title", "text")))
    bad = [index for index, _ in result.bad]
    assert sorted([*result.kept.tolist(), *bad]) == list(range(len(records)))
    assert bad == [index for index, record in enumerate(records) if record not in GOOD]
    assert result.columns[1] == [records[index]["text"] for index in result.kept]


TEMPLATES = {
    "{text}": "a",
    r"{title}\n\n{text}\t{text}": "A\n\na\ta",
    "{{{title}}} 100%s %d {text}": "{A} 100%s %d a",
    "{meta.x}": "x",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_join_keys(template: str) -> None:
    fields = Fields(("text",), template)
    record = {"title": "A", "text": "a", "meta.x": "x"}
    assert texts(block(record), fields).columns == ([TEMPLATES[template]],)
    assert fields.names == ("text",)
    assert set(fields.read_keys) <= set(record)
    assert texts(block({}), fields).bad[0][1].startswith("no key")


@pytest.mark.parametrize(
    "template", ["{}", "{0}", "{text:>9}", "{text!r}", "{a[0]}", "{text", "text}", "plain", "{ a }"]
)
def test_wrong_templates_are_user_errors(template: str) -> None:
    with pytest.raises(UserError, match=r"template: .*write keys as \{title\}"):
        texts(block(), Fields(("text",), template))


def test_keys_must_be_unique_and_not_empty() -> None:
    assert Fields(("title", "text")).names == ("title", "text")
    assert len(Fields(("title", "text"), "{title} {text}").names) == 1
    with pytest.raises(UserError, match="text_key: a,a: name each key once"):
        _ = Fields(("a", "a")).read_keys
    with pytest.raises(UserError, match="name each key once"):
        _ = Fields(("a", "")).read_keys


def test_read_texts_yields_texts_of_any_format(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, GOOD)).encode()))
    assert list(read_texts(path)) == ["a", "ü\n"]
    assert list(read_texts(path, "title,text")) == ["A", "a", "", "ü\n"]
    assert list(read_texts(path, template="{title}{text}")) == ["Aa", "ü\n"]
    assert "".join(read_texts(path, format="text")) == gzip.decompress(path.read_bytes()).decode()


def test_read_texts_stops_at_a_bad_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": 1}\n{"text": "b"}\n')
    stream = read_texts(path)
    assert next(stream) == "a"
    with pytest.raises(
        UserError, match=r'a\.jsonl:3: "text" holds a number, not text; .* the line'
    ):
        next(stream)
    table = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["a", None]}), table)
    with pytest.raises(UserError, match=r'a\.parquet: row 1: "text" holds null, not text'):
        list(read_texts(table))


def test_a_key_with_dots_names_a_nested_value(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"meta": {"a": {"text": "in"}}}\n{"meta.a.text": "literal", "meta": 1}\n')
    assert list(read_texts(path, "meta.a.text")) == ["in", "literal"]
    assert list(read_texts(path, template="<{meta.a.text}>")) == ["<in>", "<literal>"]
    for line in ('{"meta": "x"}', '{"meta": {"a": []}}', '{"meta": null}', "{}"):
        path.write_text(line)
        with pytest.raises(UserError, match=r'no key "meta\.a\.text"'):
            list(read_texts(path, "meta.a.text"))
    path.write_text('{"meta": {"a": {"text": 3}}}')
    with pytest.raises(UserError, match=r'"meta\.a\.text" holds a number, not text'):
        list(read_texts(path, "meta.a.text"))
