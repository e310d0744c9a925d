"""Datasets of each split and the index of one split; `index` itself is compared with Megatron."""

import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_datasets import write_dataset
from tokamake.data.mixture.split_prefixes import SplitPrefixes
from tokamake.data.samples import blend_index, dataset_indexers
from tokamake.data.samples.blend_index import find_datasets, write_split
from tokamake.data.samples.dataset_indexers import WeightedDataset
from tokamake.data.samples.index_folder import ArrayFile
from tokamake.data.samples.index_options import IndexSettings
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.errors import UserError

SETTINGS = IndexSettings(
    sequence_length=8,
    seed=1,
    blend="weighted",
    within_corpus="concatenated",
    separate_last_epoch=None,
    drop_last_partial_sequence=False,
)


def find(
    root: Path, lines: str, *, split: str = "80,20,0", blend: Any = "weighted", **held_out: str
) -> dict[str, list[WeightedDataset]]:
    """Datasets of each split, for the lines of a weighting file and of those of other splits."""
    for name, text in {"weights": lines, **held_out}.items():
        (root / f"{name}.txt").write_text(text)
    splits = SplitPrefixes(
        root / "weights.txt",
        data_root=root,
        split=split,
        split_rule="megatron_core",
        held_out={name: root / f"{name}.txt" for name in held_out},
    )
    return find_datasets(splits, root, blend=blend, validate=True)


def prefixes(datasets: list[WeightedDataset]) -> list[str]:
    return [dataset.line.prefix for dataset in datasets]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three datasets of 10 documents of 4 tokens."""
    for name in ("a", "b", "c"):
        write_dataset(tmp_path / name, [4] * 10)
    return tmp_path


def test_each_split_has_its_share_of_the_documents(root: Path) -> None:
    found = find(root, "1 a a\n")
    assert {name: datasets[0].documents for name, datasets in found.items()} == {
        "train": range(8),
        "valid": range(8, 10),
    }
    assert [datasets[0].tokens for datasets in found.values()] == [32, 8]


def test_the_test_split_is_not_indexed(root: Path) -> None:
    assert list(find(root, "1 a a\n", split="80,10,10")) == ["train", "valid"]


def test_datasets_of_a_corpus_are_neighbors_in_a_blend_of_corpora(root: Path) -> None:
    lines = "1 b x\n1 a y\n1 c x\n"
    assert prefixes(find(root, lines)["train"]) == ["b", "a", "c"]
    assert prefixes(find(root, lines, blend="corpora")["train"]) == ["b", "c", "a"]


def test_a_dataset_without_tokens_or_weight_is_left_out(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_dataset(root / "empty", [0] * 10)
    write_dataset(root / "one", [20])
    found = find(root, "1 a a\n1 empty e\n0 b b\n1 one o\n")
    assert [prefixes(datasets) for datasets in found.values()] == [["a", "one"], ["a"]]
    assert sorted(record.getMessage() for record in caplog.records) == [
        "b: left out of the train split: has weight 0",
        "b: left out of the valid split: has weight 0",
        "empty: left out of the train split: has no document for it",
        "empty: left out of the valid split: has no document for it",
        "one: left out of the valid split: has no document for it",
    ]


def test_a_part_for_training_leaves_no_document_for_validation_and_no_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = find(root, "1 a a 0:0.5\n1 b b\n")
    assert prefixes(found["train"]) == ["a", "b"]
    assert prefixes(found["valid"]) == ["b"]
    assert not caplog.records


def test_documents_in_two_splits_get_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find(root, "1 a a 0:0.8\n1 b b\n", hard="1 a a 0.7:1\n1 b b 0.9:1\n")
    (record,) = caplog.records
    assert record.getMessage() == (
        "a: documents 7 to 7 are in the train and hard splits; the loss on hard will look too good"
    )


def test_adjacent_parts_get_no_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    find(root, "1 a a 0:0.8\n1 b b\n", hard="1 a a 0.8:1\n")
    assert not caplog.records


@pytest.mark.parametrize(
    ("lines", "split", "message"),
    [
        ("1 a a\n", "100,0,0", "split: nothing to validate on"),
        ("1 a a\n", "99,0.5,0.5", "no dataset has a document for the (valid|test) split"),
    ],
)
def test_a_split_without_documents_is_refused(
    root: Path, lines: str, split: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        find(root, lines, split=split)


def test_a_blend_by_weight_has_a_limited_number_of_datasets(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blend_index._MAX_DATASETS, "weighted", 2)
    assert len(find(root, "1 a a\n1 b b\n")["train"]) == 2
    with pytest.raises(UserError, match="train: 3 datasets; blend 'weighted' allows at most 2"):
        find(root, "1 a a\n1 b b\n1 c c\n")


def test_training_alone_takes_whole_samples_only() -> None:
    assert SETTINGS.of("train").drop_last_partial_sequence
    assert SETTINGS.of("valid") == SETTINGS


def test_the_description_counts_documents_epochs_and_samples(root: Path) -> None:
    datasets = find(root, "3 a x\n1 b y\n")["train"]
    described = write_split(
        root / "train", datasets=datasets, settings=SETTINGS, num_samples=10, epochs_of={}
    )
    # Of each dataset, 8 documents have 32 tokens: 3 samples of 8 tokens and a label in an epoch.
    assert described["requested_samples"] == 10
    assert described["samples"] == sum(each["drawn_samples"] for each in described["files"])
    assert [each["drawn_samples"] for each in described["files"]] == [8, 3]
    assert [each["epochs"] for each in described["files"]] == [3, 2]  # with Megatron's surplus
    first = described["files"][0]
    assert (first["prefix"], first["corpus"], first["weight"]) == ("a", "x", 3)
    assert (first["documents"], first["tokens"]) == ([0, 8], 32)
    assert all(each["num_samples"] >= each["drawn_samples"] for each in described["files"])


def test_a_validation_split_that_repeats_samples_gets_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = find(root, "1 a x\n1 b y\n", split="50,50,0")
    for name, num_samples in (("train", 20), ("valid", 2), ("more", 4)):
        found = datasets.get(name, datasets["valid"])
        options: dict[str, Any] = {"settings": SETTINGS, "epochs_of": {}}
        write_split(root / name, datasets=found, num_samples=num_samples, **options)
    (record,) = caplog.records
    assert record.getMessage().startswith("more: 2 of its 2 datasets are too small")


def test_epochs_decide_the_samples_of_each_corpus(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_dataset(root / "tiny", [4] * 2)
    with caplog.at_level(logging.WARNING):
        described = write_split(
            root / "train",
            datasets=find(root, "1 a x\n1 b y\n1 tiny y\n", split="90,10,0")["train"],
            settings=SETTINGS,
            num_samples=None,
            epochs_of={"x": Fraction(2), "y": Fraction(1)},
        )
    # 9 documents: 36 tokens an epoch. 71 tokens have a label in two epochs, 35 in one.
    counts = {each["prefix"]: each["drawn_samples"] for each in described["files"]}
    assert counts == {"a": 71 // 8, "b": 35 // 8}
    assert described["samples"] == 8 + 4
    assert "tiny: left out of the train split: its 8 tokens do not fill a sample of 8" in (
        caplog.text
    )


def test_whole_epochs_are_separate_but_counted_samples_mix_the_last_two(root: Path) -> None:
    """9 documents of 4 tokens: 8 samples of 8 tokens take two epochs either way."""
    datasets = find(root, "1 a x\n", split="90,10,0")["train"]
    options: dict[str, Any] = {"datasets": datasets, "settings": SETTINGS.of("train")}
    epochs_of = {"x": Fraction(2)}
    for name, num_samples, is_separate in (("epochs", None, True), ("samples", 7, False)):
        described = write_split(
            root / name, num_samples=num_samples, epochs_of=epochs_of, **options
        )
        (dataset,) = described["files"]
        documents = ArrayFile(root / name).index(dataset["arrays"], DatasetIndex).document.tolist()
        assert (dataset["epochs"], dataset["num_samples"]) == (2, 8)
        assert (sorted(documents[:9]) == [*range(9)]) == is_separate


def test_very_many_epochs_are_a_mistake(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_indexers, "_MAX_EPOCHS", 2)
    datasets = find(root, "1 a x\n")["train"]
    # With the rounding up of weights, 12 samples of 8 tokens are 3 epochs of 32 tokens.
    options: dict[str, Any] = {"datasets": datasets, "settings": SETTINGS, "epochs_of": {}}
    write_split(root / "few", num_samples=8, **options)
    with pytest.raises(UserError, match="a: its 32 tokens would be seen 3 times"):
        write_split(root / "many", num_samples=12, **options)
