"""Expansion of folders, patterns and saved datasets to raw files."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from tokamake.data.readers import expand, in_natural_order, natural_key, open_input
from tokamake.errors import UserError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with many kinds of file names."""
    names = (
        "raw/10.jsonl raw/2.jsonl raw/1.json raw/deep/b.jsonl raw/deep/a.gz raw/_SUCCESS "
        "raw/.hidden raw/_tmp/x.jsonl raw/.git/y.jsonl raw/a[1].jsonl"
    )
    for name in names.split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = ["raw/1.json", "raw/2.jsonl", "raw/10.jsonl", "raw/a[1].jsonl", "raw/deep/a.gz"]
BY_PATTERN = [
    *FILES[:3],
    "raw/_SUCCESS",
    "raw/_tmp/x.jsonl",
    *FILES[3:],
    "raw/deep/b.jsonl",
]
EXPANDED = {
    "raw": [*FILES, "raw/deep/b.jsonl"],
    "raw/*.jsonl": ["raw/2.jsonl", "raw/10.jsonl", "raw/a[1].jsonl"],
    "raw/*": BY_PATTERN,
    "raw/**": BY_PATTERN,
    "raw/**/*.jsonl": [
        "raw/2.jsonl",
        "raw/10.jsonl",
        "raw/_tmp/x.jsonl",
        "raw/a[1].jsonl",
        "raw/deep/b.jsonl",
    ],
    "raw/[0-9].*": ["raw/1.json", "raw/2.jsonl"],
    "raw/a[1].jsonl": ["raw/a[1].jsonl"],
    "raw/_S*": ["raw/_SUCCESS"],
    "raw/.hidden": ["raw/.hidden"],
    "raw/d*": ["raw/deep/a.gz", "raw/deep/b.jsonl"],
}


@pytest.mark.parametrize("name", EXPANDED)
def test_names_expand_to_files_in_natural_order(tree: Path, name: str) -> None:
    assert list(map(str, expand([name]))) == EXPANDED[name]
    assert expand([tree / name]) == [tree / file for file in EXPANDED[name]]


def test_names_keep_their_order_and_links_count_once(tree: Path) -> None:
    (tree / "link.jsonl").symlink_to(tree / "raw/2.jsonl")
    os.link(tree / "raw/10.jsonl", tree / "hard.jsonl")
    paths = expand(["raw/10.jsonl", "link.jsonl", "raw", "./raw/../raw/2.jsonl", "hard.jsonl"])
    assert list(map(str, paths))[:3] == ["raw/10.jsonl", "link.jsonl", "raw/1.json"]
    assert len(paths) == len(FILES) + 1


def test_names_without_files_are_refused(tree: Path) -> None:
    (tree / "empty").mkdir()
    for name in ("none.jsonl", "raw/*.csv", "empty", "none/**", "raw/[z]*"):
        with pytest.raises(UserError, match=r"no (such )?file") as error:
            expand(["raw", name])
        assert name in str(error.value)
    (tree / "raw/broken").symlink_to("nowhere")
    with pytest.raises(UserError, match="broken"):
        expand(["raw"])


def test_link_cycles_end(tree: Path) -> None:
    (tree / "raw/deep/up").symlink_to("..")
    assert list(map(str, expand(["raw"]))) == EXPANDED["raw"]


def test_natural_key_sorts_numbers_by_value() -> None:
    names = ["a10b2", "a2b10", "a2b9", "a", "10", "9", "a02b9", "b"]
    assert sorted(names, key=natural_key) == [
        "9",
        "10",
        "a",
        "a02b9",
        "a2b9",
        "a2b10",
        "a10b2",
        "b",
    ]


@pytest.mark.parametrize("digits", ["{:04}", "{}", "{:02}"])
def test_paths_are_sorted_by_numbers_of_equal_and_of_other_length(digits: str) -> None:
    numbers = [*range(120)]
    Random(1).shuffle(numbers)
    paths = [f"a{digits.format(number)}/b" for number in numbers]
    expected = [f"a{digits.format(number)}/b" for number in range(120)]
    assert in_natural_order(paths, path=str) == expected
    assert in_natural_order([], path=str) == []


def test_large_folders_need_few_system_calls(tmp_path: Path) -> None:
    for number in range(5000):
        (tmp_path / f"{number}.jsonl").touch()
    calls: Counter[str] = Counter()

    def count_call(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call" and function.__module__ == "posix":
            # Newer Pythons implement parts of os.path in C. They only read names.
            is_path_function = function.__name__.startswith(("fspath", "_path_"))
            calls["system"] += not is_path_function

    sys.setprofile(count_call)
    try:
        paths = expand([tmp_path])
    finally:
        sys.setprofile(None)
    assert calls["natural_key"] == 5000
    assert 0 < calls["system"] < 20  # scandir gives the types of all files
    assert [path.stem for path in paths] == list(map(str, range(5000)))


ROWS = [{"text": f"row {number}", "id": number} for number in range(25)]


def test_a_saved_dataset_expands_in_row_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "raw" / "dataset"
    datasets.Dataset.from_list(ROWS).save_to_disk(folder, num_shards=11)
    (folder / "notes.jsonl").write_text("not in state.json")
    for name in (folder, tmp_path / "raw"):
        files = expand([name])
        assert len(files) == 11
        texts = [
            record["text"]
            for file in files
            for block in open_input(file).blocks(("text",))
            for record in block.records
        ]
        assert texts == datasets.load_from_disk(str(folder))["text"] == [r["text"] for r in ROWS]
    files[3].unlink()
    message = r"00003-of-00011\.arrow: listed in .*state\.json, but missing"
    with pytest.raises(UserError, match=message):
        expand([folder])
    (folder / "state.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="lists no data files"):
        expand([folder])


def test_a_folder_of_saved_splits_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    folder = tmp_path / "dataset"
    datasets.DatasetDict({"train": dataset, "valid": dataset}).save_to_disk(folder)
    message = (
        r"several splits \(train, valid\); name the folder of one split, such as .*dataset/train"
    )
    with pytest.raises(UserError, match=message):
        expand([folder])
    assert [path.parent for path in expand([folder / "train"])] == [folder / "train"]


def test_a_folder_of_data_and_documentation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("About")
    (tmp_path / "data/a.jsonl").write_text("")
    message = r"holds both texts .*README\.md.* such as .*/\*\*/\*\.jsonl"
    with pytest.raises(UserError, match=message):
        expand([tmp_path])
    assert expand([f"{tmp_path}/**/*.jsonl"]) == [tmp_path / "data/a.jsonl"]
    (tmp_path / "data/a.jsonl").unlink()
    assert expand([tmp_path]) == [tmp_path / "README.md"]
