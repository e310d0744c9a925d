"""Read and write weighting files; refuse invalid ones."""

import random
from pathlib import Path

import pytest
from megatron.core.datasets.utils import get_blend_from_list

from tokamake.data.mixture.weighting_file import (
    ROOT_VARIABLE,
    WeightedPrefix,
    divide_root,
    find_root,
    read_weighting_file,
    write_weighting_file,
)
from tokamake.errors import UserError


def test_reads_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "weights.txt"
    path.write_text("0.75 merged/b-0000 b\n\n 25e-2\tmerged/a.x-0000 a\n")
    assert read_weighting_file(path) == [
        WeightedPrefix(0.75, "merged/b-0000", "b"),
        WeightedPrefix(0.25, "merged/a.x-0000", "a"),
    ]


def test_reads_all_forms_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "weights.txt"
    path.write_text(
        "\ufeff# weight prefix\n"
        "1 /data/books-0000_text_document.bin\n"
        "2 wiki books # the last word is the corpus\n"
        "  #3 c c\n"
        "4 a/-x 5 a.bin/plain.idx\n"
        "6 x 7\n"
        "8 a#b/c#d #e\n"
    )
    assert read_weighting_file(path) == [
        WeightedPrefix(1, "/data/books-0000_text_document", "books"),
        WeightedPrefix(2, "wiki", "books"),
        WeightedPrefix(4, "a/-x", "-x"),
        WeightedPrefix(5, "a.bin/plain", "plain"),
        WeightedPrefix(6, "x", "7"),
        WeightedPrefix(8, "a#b/c#d", "c#d"),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_reads_the_data_path_of_megatron(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    pairs = [(repr(draw.random() * 10 ** draw.randint(-9, 9)), f"d/{n}-x") for n in range(1, 40)]
    text = ""
    while pairs:
        count = draw.randint(1, 4)
        text += " ".join(" ".join(pair) for pair in pairs[:count]) + draw.choice(["\n", "\n\n"])
        del pairs[:count]
    path = tmp_path / "data-path"
    path.write_text(text)
    blend = get_blend_from_list(text.split())
    assert blend is not None
    entries = read_weighting_file(path)
    assert [entry.prefix for entry in entries] == blend[0]
    assert [entry.weight for entry in entries] == blend[1]
    assert entries[8].corpus == "9"


@pytest.mark.parametrize("seed", range(5))
def test_written_files_are_read_unchanged(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    entries = [
        WeightedPrefix(draw.random() * 10.0 ** draw.randint(-300, 300), f"a/{n}", f"c{n % 3}")
        for n in range(100)
    ]
    write_weighting_file(tmp_path / "weights.txt", entries)
    assert read_weighting_file(tmp_path / "weights.txt") == entries


@pytest.mark.parametrize("prefix", ["a b", "#a", "", "a\n1 b b"])
def test_unreadable_prefixes_are_not_written(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(UserError, match=r"cannot write .*: it is empty, has a space, or begins"):
        write_weighting_file(
            tmp_path / "weights.txt", [WeightedPrefix(1, "a", "a"), WeightedPrefix(1, prefix, "a")]
        )
    assert not list(tmp_path.iterdir())


def test_a_root_that_has_moved_names_both_folders(tmp_path: Path) -> None:
    assert divide_root(tmp_path) == ("", tmp_path)
    assert divide_root(Path(f"/old/data={tmp_path}")) == ("/old/data", tmp_path)
    named = tmp_path / "a=b"  # a folder with this name is no pair
    named.mkdir()
    assert divide_root(named) == ("", named)


def test_the_root_is_the_option_or_the_variable_or_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    path = Path("/lists/weights.txt")
    assert find_root(path, None) == Path("/lists")
    monkeypatch.setenv(ROOT_VARIABLE, "")
    assert find_root(path, None) == Path("/lists")
    monkeypatch.setenv(ROOT_VARIABLE, "/data")
    assert find_root(path, None) == Path("/data")
    assert find_root(path, Path()) == Path()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": no weight above 0"),
        ("# 1 a a\n", ": no weight above 0"),
        ("0 a a\n", "no weight above 0"),
        (
            "1\n",
            r":1: 1 columns; write `weight prefix corpus \[START:END\]`, or pairs of `weight pre",
        ),
        ("1 a a\n1 b b c\n", ":2: 4 columns"),
        ("1 a 1 b 1\n", ":1: 5 columns"),
        ("-1 a a\n", ":1: weight '-1'"),
        ("nan a a\n", ":1: weight 'nan'"),
        ("inf a a\n", ":1: weight 'inf'; give a finite number, 0 or more"),
        ("half a a\n", ":1: weight 'half'"),
        ("half a\n", ":1: weight 'half'"),
        ("1 a 2 b\n1 c -2 d\n", ":2: weight '-2'"),
        ("1 a a\n\n1 a a\n", ":3: a is also in line 1; join the lines"),
        ("1 a a\n1 ./a.bin a\n", ":2: ./a is also in line 1"),
        ("1 a 2 a\n", ":1: a is also in line 1"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "weights.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_weighting_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.txt"
    with pytest.raises(UserError, match="no such file"):
        read_weighting_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        read_weighting_file(path)


def test_a_sum_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("1e308 a a\n1e308 b b\n")
    with pytest.raises(UserError, match="the sum of the weights is too large for a float"):
        read_weighting_file(tmp_path / "weights.txt")


def test_a_corpus_may_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("0.5 2024-0 2024 0:0.9\n0.5 x-0 1 0.5 y-0\n")
    with pytest.raises(UserError, match="5 columns"):
        read_weighting_file(tmp_path / "weights.txt")
    (tmp_path / "weights.txt").write_text("0.5 2024-0 2024 0:0.9\n0.5 x-0 1 y-0\n")
    assert read_weighting_file(tmp_path / "weights.txt") == [
        WeightedPrefix(0.5, "2024-0", "2024", (0.0, 0.9)),
        WeightedPrefix(0.5, "x-0", "x"),
        WeightedPrefix(1, "y-0", "y"),
    ]


def test_a_weighting_file_names_parts_of_datasets(tmp_path: Path) -> None:
    entries = [WeightedPrefix(0.5, "a-0", "a", (0.0, 0.1 + 0.2)), WeightedPrefix(0.5, "b-0", "b")]
    write_weighting_file(tmp_path / "weights.txt", entries)
    assert read_weighting_file(tmp_path / "weights.txt") == entries
    (tmp_path / "weights.txt").write_text("1 a-0 a 0.5:0.4\n")
    with pytest.raises(UserError, match=r"weights\.txt:1: '0\.5:0\.4': give a part"):
        read_weighting_file(tmp_path / "weights.txt")
