"""The stage `index`: what its folder holds, what decides it, and what it refuses."""

import json
import logging
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from tests.support.megatron_datasets import (
    assert_identical,
    config,
    overwrite,
    random_lengths,
    write_dataset,
)
from tests.support.runs import vouch
from tokamake import files
from tokamake.data.samples.array_file import Arrays
from tokamake.data.samples.dataset_index import DatasetIndex
from tokamake.data.samples.index import index
from tokamake.data.samples.loader import PAD, Samples
from tokamake.errors import UserError

WEIGHTS = {"merged/b-0000": 0.55, "merged/a-0000": 0.3, "merged/a-0001": 0.15}


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    (tmp_path / "data" / "merged").mkdir(parents=True)
    for number, prefix in enumerate(WEIGHTS):
        lengths = random_lengths(number, 60 + 20 * number)
        write_dataset(tmp_path / "data" / prefix, lengths, first_token=100_000 * number)
    lines = (f"{weight} {prefix} {prefix[7]}\n" for prefix, weight in WEIGHTS.items())
    (tmp_path / "data" / "weights.txt").write_text("".join(lines))
    return tmp_path / "data"


def build(data_root: Path, /, **changes: Any) -> Path:
    settings = {
        "weights": data_root / "weights.txt",
        "data_root": data_root,
        "sequence_length": 32,
        "train_samples": 150,
        "valid_samples": 20,
        "split": "80,15,5",
        "seed": 1234,
        "output": data_root.parent / "index",
    }
    index(**settings | changes)
    return (settings | changes)["output"]


def described(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


def arrays(folder: Path, name: str) -> list[DatasetIndex]:
    opened = Arrays(folder / name)
    return [opened.index(file["arrays"]) for file in described(folder)["splits"][name]["files"]]


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_arrays_equal_megatron(data_root: Path) -> None:
    folder = build(data_root)
    blend = ([str(data_root / prefix) for prefix in WEIGHTS], list(WEIGHTS.values()))
    settings = config(sequence_length=32, seed=1234, split="80,15,5", blend=blend)
    sizes = [150, 20, 0]
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings)
    for name, theirs in zip(("train", "valid"), builder.build(), strict=False):
        assert_identical(np.load(folder / name / "dataset_index.npy"), theirs.dataset_index)
        ours = np.load(folder / name / "dataset_sample_index.npy")
        assert_identical(ours, theirs.dataset_sample_index)
        for number, dataset in enumerate(theirs.datasets):
            for array in ("document", "sample", "shuffle"):
                assert_identical(
                    getattr(arrays(folder, name)[number], array), getattr(dataset, f"{array}_index")
                )


def test_the_description_says_what_was_built(data_root: Path) -> None:
    train = described(build(data_root))["splits"]["train"]
    assert train["requested_samples"] == 150
    assert train["samples"] == sum(file["drawn_samples"] for file in train["files"]) >= 150
    assert [file["prefix"] for file in train["files"]] == list(WEIGHTS)
    assert [file["corpus"] for file in train["files"]] == ["b", "a", "a"]
    for number, (file, weight) in enumerate(zip(train["files"], WEIGHTS.values(), strict=True)):
        first, last = file["documents"]
        lengths = random_lengths(number, 60 + 20 * number)
        assert (first, last) == (0, round(0.8 * len(lengths)))
        assert file["weight"] == weight
        assert file["tokens"] == sum(lengths[first:last])
        assert file["num_samples"] == (file["epochs"] * file["tokens"] - 1) // 32


def test_the_same_inputs_give_the_same_bytes(data_root: Path, tmp_path: Path) -> None:
    first = contents(build(data_root))
    assert contents(build(data_root)) == first
    data_root = data_root.rename(tmp_path / "elsewhere")
    assert contents(build(data_root)) == first
    assert str(tmp_path) not in first["index.json"].decode()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"split": "79,16,5"},
        {"sequence_length": 31},
        {"train_samples": 151},
        {"valid_samples": 21},
        {"split_rule": "megatron_deepspeed"},
        {"separate_last_epoch": True},
        {"drop_last_partial_sequence": False},
        {"blend": "exact"},
        {"within_corpus": "blended"},
        {"train_samples": None, "epochs": ["1"]},
    ],
)
def test_every_setting_is_in_the_digest(data_root: Path, change: dict[str, Any]) -> None:
    first = described(build(data_root))["digest"]
    assert described(build(data_root, **change))["digest"] != first


def test_weights_and_tokens_are_in_the_digest(data_root: Path) -> None:
    digests = [described(build(data_root))["digest"]]
    weights = data_root / "weights.txt"
    weights.write_text(weights.read_text().replace("0.55", "0.56"))
    digests.append(described(build(data_root))["digest"])
    prefix = data_root / "merged" / "a-0000"
    for damaged in (prefix.with_suffix(".bin"), prefix.with_suffix(".idx")):
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1  # as large as before
        damaged.write_bytes(content)
        digests.append(described(build(data_root))["digest"])
    assert len(set(digests)) == 4


def test_what_a_manifest_vouches_for_is_held_to_it(data_root: Path) -> None:
    prefix = data_root / "merged" / "a-0000"
    vouch(prefix)
    known = described(build(data_root))["pairs"]["merged/a-0000"]
    assert known["sha256"]["bin"] == files.sha256(prefix.with_suffix(".bin"))
    manifest = prefix.with_suffix(".json").read_bytes()
    overwrite(prefix.with_suffix(".idx"), 34, 3, "<i")
    with pytest.raises(UserError, match="a-0000: its files are others than its manifest says"):
        build(data_root)
    prefix.with_suffix(".json").write_bytes(manifest.replace(b'"bin"', b'"bim"'))
    with pytest.raises(UserError, match=r"a-0000\.json: changed since it was written"):
        build(data_root)


def test_no_validation_samples_no_validation_split(data_root: Path) -> None:
    folder = build(data_root, valid_samples=0)
    assert list(described(folder)["splits"]) == ["train"]
    assert not (folder / "valid").exists()


def test_a_file_without_documents_or_weight_is_left_out(
    data_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_dataset(data_root / "merged/tiny-0000", [200])
    write_dataset(data_root / "merged/hollow-0000", [0] * 100)
    with (data_root / "weights.txt").open("a") as stream:
        stream.write("0.1 merged/tiny-0000 tiny\n0.1 merged/hollow-0000 hollow\n")
    weights = data_root / "weights.txt"
    weights.write_text(weights.read_text().replace("0.3 ", "0 "))
    with caplog.at_level(logging.WARNING):
        splits = described(build(data_root))["splits"]
    prefixes = {name: [file["prefix"] for file in splits[name]["files"]] for name in splits}
    kept = ["merged/b-0000", "merged/a-0001"]
    assert prefixes == {"train": [*kept, "merged/tiny-0000"], "valid": kept}
    assert "merged/tiny-0000: left out of the valid set" in caplog.text
    assert "merged/a-0000: left out of the train set: has weight 0" in caplog.text


def test_few_samples_of_many_files_are_enough(tmp_path: Path) -> None:
    """Every file's share is rounded up: the large one gives more than Megatron keeps ready."""
    names = ["large", *(f"small{number}" for number in range(20))]
    for name in names:
        write_dataset(tmp_path / name, [33] * 25)
    weights = [f"{100 if name == 'large' else 0.01} {name} {name}\n" for name in names]
    (tmp_path / "weights.txt").write_text("".join(weights))
    folder = build(
        tmp_path, train_samples=20, valid_samples=0, split="1,0,0", output=tmp_path / "i"
    )
    for file in described(folder)["splits"]["train"]["files"]:
        assert file["num_samples"] >= file["drawn_samples"]
    assert described(folder)["splits"]["train"]["files"][0]["epochs"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 1}, "sequence_length: 1"),
        ({"train_samples": 0}, "train_samples: 0"),
        ({"valid_samples": -1}, "valid_samples: -1"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": 2**32}, "seed: 4294967296"),
        ({"split": "949,50"}, "949,50"),
        ({"split": "100,0,0"}, "split: nothing to validate on"),
        ({"split": "80,19.99,0.01"}, "no file has a document for the test set"),
        ({"weights": Path("nowhere.txt")}, "nowhere.txt"),
        ({"train_samples": None}, "give --train-samples or --epochs"),
        ({"epochs": ["1"]}, "give --train-samples or --epochs"),
        ({"train_samples": None, "epochs": ["x=1"]}, "'x=1': no corpus .* choose one of b, a"),
        ({"train_samples": None, "epochs": ["a=1"]}, "corpus 'b' gets none; add b=NUMBER"),
        ({"train_samples": None, "epochs": ["1", "2"]}, "'2': stands twice"),
        ({"train_samples": None, "epochs": ["0"]}, "'0': give a number above 0"),
        ({"train_samples": None, "epochs": ["1/0"]}, "'1/0': give a number above 0"),
        ({"train_samples": None, "epochs": ["1e-9"]}, "no file fills a sample"),
        ({"data_root": Path("nowhere")}, r"nowhere/merged/b-0000\.\w+: no such file"),
    ],
)
def test_a_mistake_is_a_user_error_and_leaves_nothing(
    data_root: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(data_root, **changes)
    assert sorted(path.name for path in data_root.parent.iterdir()) == ["data"]


def test_what_is_whole_is_left_alone(data_root: Path, capsys: pytest.CaptureFixture) -> None:
    folder = build(data_root)
    marks = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    build(data_root)
    assert "is whole already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == marks
    before = contents(folder)
    damaged = folder / "train" / "dataset_index.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    build(data_root)
    assert contents(folder) == before
    (folder / "valid" / "dataset_index.npy").unlink()
    build(data_root)
    assert contents(folder) == before


def test_epochs_are_exact(data_root: Path) -> None:
    train = described(build(data_root, train_samples=None, epochs=["a=1", "b=2.5"]))["splits"]
    for file in train["train"]["files"]:
        epochs = Fraction(5, 2) if file["corpus"] == "b" else 1
        assert file["drawn_samples"] == (epochs * file["tokens"] - 1) // 32
        assert file["epochs"] == math.ceil(epochs)
    drawn = [file["drawn_samples"] for file in train["train"]["files"]]
    numbers = np.load(data_root.parent / "index/train/dataset_index.npy")
    places = np.load(data_root.parent / "index/train/dataset_sample_index.npy")
    assert np.bincount(numbers).tolist() == drawn
    for number, count in enumerate(drawn):
        assert places[numbers == number].tolist() == list(range(count))


def test_one_epoch_equals_megatron_without_weights(data_root: Path) -> None:
    folder = build(data_root, train_samples=None, epochs=["1"], valid_samples=0, split="1,0,0")
    blend = ([str(data_root / prefix) for prefix in WEIGHTS], None)
    settings = config(sequence_length=32, seed=1234, split="1,0,0", blend=blend)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, settings)
    theirs = builder.build()[0]
    ours = np.load(folder / "train/dataset_index.npy")
    assert_identical(ours, theirs.dataset_index)
    ours = np.load(folder / "train/dataset_sample_index.npy")
    assert_identical(ours, theirs.dataset_sample_index)
    for number, dataset in enumerate(theirs.datasets):
        for array in ("document", "sample", "shuffle"):
            assert_identical(
                getattr(arrays(folder, "train")[number], array), getattr(dataset, f"{array}_index")
            )


def test_an_exact_blend_gives_what_weights_say(data_root: Path) -> None:
    train = described(build(data_root, blend="exact", train_samples=1000))["splits"]["train"]
    assert [file["drawn_samples"] for file in train["files"]] == [550, 300, 150]
    numbers = np.load(data_root.parent / "index/train/dataset_index.npy")
    for number, weight in enumerate(WEIGHTS.values()):
        off = np.cumsum(numbers == number) - weight * np.arange(1, 1001)
        assert np.abs(off).max() <= 1


@pytest.mark.parametrize("within", ["concatenated", "shuffled", "blended"])
def test_corpora_are_blended_exactly(data_root: Path, within: str) -> None:
    # Its files do not stand together: they are put behind each other.
    lines = (data_root / "weights.txt").read_text().splitlines()
    (data_root / "weights.txt").write_text("\n".join([lines[1], lines[0], lines[2]]))
    folder = build(data_root, blend="corpora", within_corpus=within, train_samples=1000)
    train = described(folder)["splits"]["train"]
    assert [file["prefix"][7:] for file in train["files"]] == ["a-0000", "a-0001", "b-0000"]
    assert [file["drawn_samples"] for file in train["files"]] == [300, 150, 550]
    numbers = np.load(folder / "train/dataset_index.npy")
    places = np.load(folder / "train/dataset_sample_index.npy")
    off = np.cumsum(numbers < 2) - 0.45 * np.arange(1, 1001)
    assert np.abs(off).max() <= 1
    of_corpus = numbers[numbers < 2].tolist()
    if within == "concatenated":
        assert of_corpus == [0] * 300 + [1] * 150
    elif within == "blended":
        assert of_corpus[:3] == [0, 1, 0]
    else:
        assert places[numbers == 0].tolist() != list(range(300))
    for number, count in enumerate([300, 150, 550]):
        assert sorted(places[numbers == number]) == list(range(count))


def test_a_last_sample_that_is_filled_up(data_root: Path) -> None:
    filled = []
    for seed in range(8):  # each draws others of its samples
        options = {"drop_last_partial_sequence": False, "valid_samples": 12, "seed": seed}
        samples = Samples(build(data_root, **options), split="valid", data_root=data_root)
        filled += [row for row in map(samples.__getitem__, range(12)) if PAD in row]
    assert filled
    for row in filled:
        tokens = row[: np.argmax(row == PAD)]
        assert len(tokens) > 1
        assert np.all(row[len(tokens) :] == PAD)
        assert np.all(tokens >= 0)
