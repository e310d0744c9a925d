"""Files of configurations and splits are those that `datasets` takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets.data_files import DataFilesDict, get_data_patterns

from tokamake.errors import UserError
from tokamake.remote.addresses import parse_address
from tokamake.remote.dataset_splits import files_of

NAME = "hf://datasets/org/texts"


def chosen(names: Sequence[str], query: str = "", configs: Sequence[dict[str, Any]] = ()) -> Any:
    address = NAME + query
    return files_of(parse_address(address), sorted(names), configs=[*configs], address=address)


TREES = {
    "no words": ["a.jsonl", "b/c.jsonl"],
    "files": ["train.jsonl", "x/my-train-2.jsonl", "dev_1.jsonl", "test.v2.jsonl", "other.jsonl"],
    "folders": ["train/a.jsonl", "my_train/b.jsonl", "x/validation-1/c/d.jsonl", "eval/e.jsonl"],
    "folders before files": ["train/test-0.jsonl", "train.jsonl", "test.jsonl"],
    "training and testing": ["training.jsonl", "testing.jsonl", "evaluation.jsonl", "val.jsonl"],
    "parts of words": ["trained.jsonl", "latest.jsonl", "validity.jsonl"],
    "digits": ["train0.jsonl", "2train.jsonl", "test1/a.jsonl"],
    "shards of any split": [
        *(f"data/train_sft-0000{n}-of-00002.parquet" for n in range(2)),
        "data/train_gen-00000-of-00001.parquet",
        "data/extra.parquet",
    ],
    "shards": ["data/train-00000-of-00001-a1b2.parquet", "data/test-00000-of-00001.parquet"],
    "shards elsewhere": ["raw/extra-00000-of-00001.parquet", "raw/more-00000-of-00001.parquet"],
    "descriptions": ["data.jsonl", "config.json", "dataset_infos.json", "sub/dataset_info.json"],
    "hidden": ["a.jsonl", ".hid/b.jsonl", "__pycache__/c.jsonl", ".d.jsonl"],
    "tables": ["train.csv", "test.csv", "dataset_infos.json"],
}


@pytest.mark.parametrize("tree", TREES)
def test_splits_are_those_of_datasets(tmp_path: Path, tree: str) -> None:
    for name in TREES[tree]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    patterns = get_data_patterns(str(tmp_path))
    expected = DataFilesDict.from_patterns(patterns, base_path=str(tmp_path))
    assert expected
    for split, paths in expected.items():
        names = sorted(str(Path(path).relative_to(tmp_path.resolve())) for path in paths)
        assert chosen(TREES[tree], f"?split={split}") == names
    with pytest.raises(UserError, match=f"it has the splits {', '.join(map(str, expected))}; add"):
        chosen(TREES[tree], "?split=none")


ARCHIVES = ["LICENSE", "test-0.tar.zst", "train.zip"]
CONVERTED = "@refs%2Fconvert%2Fparquet"
ONE = ["default/test/0.parquet", "default/train/0.parquet", "default/train/1.parquet"]
TWO = ["de/partial-test/0.parquet", "de/train/0.parquet", "en/train/0.parquet"]
BESIDE = ["LICENSE", "README.md", "a.jsonl", "b.json.gz", "load.py", "train.png"]


@pytest.mark.parametrize(
    ("names", "query", "expected"),
    [
        (BESIDE, "", ["a.jsonl", "b.json.gz"]),
        (ARCHIVES, "", ["train.zip"]),
        (ARCHIVES, "?split=test", ["test-0.tar.zst"]),
        ([*ARCHIVES, "train.jsonl"], "", ["train.jsonl"]),
        (["texts.py", "raw.zip", "train.parquet"], "", ["train.parquet"]),
        (ONE, CONVERTED, ONE[1:]),
        (ONE, f"{CONVERTED}?split=test", ONE[:1]),
        (TWO, f"{CONVERTED}?config=de", TWO[1:2]),
        (TWO, f"{CONVERTED}?config=de&split=partial-test", TWO[:1]),
    ],
)
def test_data_are_told_from_other_files(names: list[str], query: str, expected: list[str]) -> None:
    assert chosen(names, query) == expected


@pytest.mark.parametrize(
    ("names", "query", "message"),
    [
        (["test.jsonl", "validation.jsonl"], "", "no file of split train; it has the splits valid"),
        (["texts.py", "raw.zip", "a.csv"], "", r"a script makes .*org/texts@refs%2Fconvert%2Fpar"),
        (TWO, CONVERTED, r"has the configurations de, en; add \?config=NAME"),
        (TWO, f"{CONVERTED}?config=de&split=test", r"a part of split test; \?split=partial-test t"),
        (["a.fasta", "b.orc"], "", r"that tokamake finds by itself among a\.fasta, b\.orc; na"),
        (["train.txt"], "", r"that tokamake finds by itself among train\.txt; na"),
        ([], "", "that tokamake finds by itself among no files; na"),
    ],
)
def test_what_cannot_be_taken_is_named(names: list[str], query: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen(names, query)


def test_a_configuration_may_name_a_folder_alone() -> None:
    names = ["README.md", "de/a.jsonl", "en/test.jsonl", "en/train.jsonl", "en2/train.jsonl"]
    configs = [
        {"config_name": "en", "data_dir": "en"},
        {"config_name": "de", "data_dir": "de/"},
        {"config_name": "all"},
    ]
    assert chosen(names, "?config=en", configs) == ["en/train.jsonl"]
    assert chosen(names, "?config=en&split=test", configs) == ["en/test.jsonl"]
    assert chosen(names, "?config=de", configs) == ["de/a.jsonl"]
    assert chosen(names, "?config=all", configs) == ["en/train.jsonl", "en2/train.jsonl"]
    with pytest.raises(UserError, match=r"has the configurations en, de, all; add \?config=NAME"):
        chosen(names, "", configs)


def test_a_configuration_of_an_address_is_named() -> None:
    configs = [{"config_name": "x", "data_files": "https://example.org/a.jsonl"}]
    with pytest.raises(UserError, match=r"that tokamake finds by itself among a\.jsonl; na"):
        chosen(["a.jsonl"], "", configs)
