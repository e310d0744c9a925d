"""Splits: shares of the documents, parts of datasets, and weighting files of their own."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_datasets import write_dataset
from tokamake.data.mixture.split_prefixes import SplitPrefixes, parse_held_out
from tokamake.data.samples.index import index
from tokamake.data.samples.index_folder import read_index
from tokamake.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(["a-0", "b-0", "v-0"]):
        write_dataset(tmp_path / name, [20] * 40, first_token=1000 * number)
    (tmp_path / "weights.txt").write_text("0.5 a-0 a\n0.5 b-0 b 0.25:0.75\n")
    return tmp_path


def build(root: Path, /, **changes: Any) -> dict[str, Any]:
    settings = {
        "weights": root / "weights.txt", "sequence_length": 16, "train_samples": 40,
        "valid_samples": 8, "split": "80,10,10", "seed": 1, "output": root / "index",
    }  # fmt: skip
    index(**settings | changes)
    return read_index(root / "index")


def documents(described: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Return the documents of each prefix of each split."""
    return {
        name: {file["prefix"]: file["documents"] for file in split["files"]}
        for name, split in described["splits"].items()
    }


def test_a_named_part_trains_and_no_split_uses_other_documents(root: Path) -> None:
    assert documents(build(root)) == {
        "train": {"a-0": [0, 32], "b-0": [10, 30]},
        "valid": {"a-0": [32, 36]},
    }


def test_splits_with_their_own_weighting_files(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "valid.txt").write_text("1 b-0 b 0.75:1\n1 v-0 v\n")
    (root / "hard.txt").write_text("1 v-0 v 0.5:1\n")
    lists = [f"valid={root}/valid.txt", f"hard={root}/hard.txt"]
    with caplog.at_level(logging.WARNING):
        described = build(root, held_out=lists)
    assert documents(described) == {
        "train": {"a-0": [0, 32], "b-0": [10, 30]},
        "valid": {"b-0": [30, 40], "v-0": [0, 40]},
        "hard": {"v-0": [20, 40]},
    }
    assert described["splits"]["hard"]["samples"] == 8
    assert "leaves for it; to train on them, set train.split to 80,0,10" in caplog.text
    assert "too good" not in caplog.text


def test_a_split_with_its_own_file_needs_no_share(root: Path) -> None:
    (root / "v.txt").write_text("1 v-0 v\n")
    described = build(root, split="1,0,0", held_out=[f"valid={root}/v.txt"])
    assert documents(described)["valid"] == {"v-0": [0, 40]}
    described = build(root, split="1,0,0", held_out=[f"other={root}/v.txt"])
    assert list(described["splits"]) == ["train", "other"]


def test_datasets_of_which_a_part_trains_need_no_share_of_the_split(root: Path) -> None:
    (root / "weights.txt").write_text("1 b-0 b 0.25:0.75\n")
    (root / "hard.txt").write_text("1 b-0 b 0.75:1\n")
    described = build(root, held_out=[f"hard={root}/hard.txt"])
    assert documents(described) == {"train": {"b-0": [10, 30]}, "hard": {"b-0": [30, 40]}}
    splits = SplitPrefixes(
        root / "weights.txt", data_root=root, split="98,1,1", split_rule="megatron_core",
        held_out={"hard": root / "hard.txt"},
    )  # fmt: skip
    assert splits.evaluated == "hard"


def test_the_split_rule_decides_the_documents(root: Path) -> None:
    write_dataset(root / "a-0", [20] * 50)
    core = documents(build(root, split="90,5,5"))
    forks = documents(build(root, split="90,5,5", split_rule="megatron_deepspeed"))
    assert (core["train"]["a-0"], core["valid"]["a-0"]) == ([0, 45], [45, 48])
    assert (forks["train"]["a-0"], forks["valid"]["a-0"]) == ([0, 46], [46, 48])


def test_errors_name_the_origin_of_an_empty_split(root: Path) -> None:
    (root / "v.txt").write_text("1 v-0 v 0:0.001\n")
    with pytest.raises(UserError, match=r"v\.txt: no dataset has a document for the hard split"):
        build(root, held_out=[f"hard={root}/v.txt"])
    (root / "weights.txt").write_text("1 b-0 b 0.25:0.75\n")
    with pytest.raises(UserError, match=r"split: nothing to validate on; .*a part for training"):
        build(root)


@pytest.mark.parametrize("option", ["valid", "=x", "valid=", "a b=x", "-a=x", "index.json=x"])
def test_invalid_held_out_options_are_refused(option: str) -> None:
    with pytest.raises(UserError, match="write NAME=FILE; a split's name has letters"):
        parse_held_out([option])
    with pytest.raises(UserError, match="A occurs twice"):
        parse_held_out(["a=x", "A=y"])


@pytest.mark.parametrize("spelling", ["b-0", "./b-0", "x/../b-0", "ROOT/b-0"])
def test_all_spellings_of_a_prefix_are_one_dataset(
    root: Path, spelling: str, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "seen.txt").write_text(f"1 {spelling.replace('ROOT', str(root))} b 0.5:1\n")
    with caplog.at_level(logging.WARNING):
        described = build(root, held_out=[f"seen={root}/seen.txt"])
    assert list(described["pairs"]) == ["a-0", "b-0"]
    assert "b-0: documents 20 to 29 are in the train and seen splits" in caplog.text


def test_a_part_without_a_document_gets_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "weights.txt").write_text("0.5 a-0 a\n0.5 b-0 b 0:0.01\n")
    with caplog.at_level(logging.WARNING):
        build(root)
    assert "b-0: left out of the train split: has no document for it" in caplog.text
    assert "b-0: left out of the valid split" not in caplog.text  # none was meant


def test_training_has_one_weighting_file(root: Path) -> None:
    with pytest.raises(UserError, match="training has its own weighting file"):
        SplitPrefixes(
            root / "weights.txt", data_root=root, split="1,1,1", split_rule="megatron_core",
            held_out={"train": root / "weights.txt"},
        )  # fmt: skip
