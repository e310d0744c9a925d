"""The stage `index`: content of its folder, its digest, and errors."""

import json
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
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.index import index
from tokamake.data.samples.index_folder import ArrayFile
from tokamake.data.samples.loader import PAD
from tokamake.data.samples.sample_index import DatasetIndex
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


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


def arrays(folder: Path, name: str) -> list[DatasetIndex]:
    arrays_of = ArrayFile(folder / name)
    datasets = description(folder)["splits"][name]["files"]
    return [arrays_of.index(dataset["arrays"], DatasetIndex) for dataset in datasets]


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_arrays_equal_megatron(data_root: Path) -> None:
    folder = build(data_root)
    blend = ([str(data_root / prefix) for prefix in WEIGHTS], list(WEIGHTS.values()))
    settings = config(sequence_length=32, seed=1234, split="80,15,5", blend=blend)
    sizes = [150, 20, 0]
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings)
    for name, reference in zip(("train", "valid"), builder.build(), strict=False):
        assert_identical(np.load(folder / name / "dataset_index.npy"), reference.dataset_index)
        numbers = np.load(folder / name / "dataset_sample_index.npy")
        assert_identical(numbers, reference.dataset_sample_index)
        assert_arrays_equal(arrays(folder, name), reference.datasets)


def assert_arrays_equal(indexes: list[DatasetIndex], references: list[GPTDataset]) -> None:
    for arrays_of, reference in zip(indexes, references, strict=True):
        for name, array in arrays_of._asdict().items():
            assert_identical(array, getattr(reference, f"{name}_index"))


@pytest.mark.parametrize(
    ("file", "number", "value", "message"),
    [
        # The first dataset has 60 documents: lengths stand from byte 34, pointers follow them.
        ("idx", 34 + 4 * 5, -3, r"b-0000\.idx: sequence 5 has length -3; rebuild the dataset"),
        ("idx", 34 + 4 * 60 + 8 * 5, -8, r"b-0000\.idx: sequence 5 begins at .*, but \d+ follows"),
        ("bin", 4 * 7, -1, r"merged/b-0000\.bin: token 7 is -1, below 0; tokenize"),
    ],
)
def test_a_damaged_dataset_of_another_program_is_refused(
    data_root: Path, file: str, number: int, value: int, message: str
) -> None:
    path = data_root / f"merged/b-0000.{file}"
    overwrite(path, number, value, "<i")
    if "length" in message:  # the sum stays, so that the size of the token file still matches
        lengths = random_lengths(0, 60)
        overwrite(path, number + 4, lengths[5] + lengths[6] + 3, "<i")
    with pytest.raises(UserError, match=message):
        build(data_root)
    assert not (data_root.parent / "index").exists()


def test_the_largest_token_of_datasets_without_a_vocabulary_is_noted(data_root: Path) -> None:
    vouch(data_root / "merged/a-0001", vocab_size=300_000)
    expected = {
        prefix: int(np.fromfile(data_root / f"{prefix}.bin", np.int32).max())
        for prefix in ("merged/b-0000", "merged/a-0000")
    }
    assert description(build(data_root))["largest_tokens"] == expected


def test_the_description_matches_the_arrays(data_root: Path) -> None:
    train = description(build(data_root))["splits"]["train"]
    assert train["requested_samples"] == 150
    assert train["samples"] == sum(dataset["drawn_samples"] for dataset in train["files"]) >= 150
    assert [dataset["prefix"] for dataset in train["files"]] == list(WEIGHTS)
    assert [dataset["corpus"] for dataset in train["files"]] == ["b", "a", "a"]
    pairs = zip(train["files"], WEIGHTS.values(), strict=True)
    for number, (dataset, weight) in enumerate(pairs):
        first, last = dataset["documents"]
        lengths = random_lengths(number, 60 + 20 * number)
        assert (first, last) == (0, round(0.8 * len(lengths)))
        assert dataset["weight"] == weight
        assert dataset["tokens"] == sum(lengths[first:last])
        num_samples = (dataset["epochs"] * dataset["tokens"] - 1) // 32
        assert dataset["num_samples"] == num_samples


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
    first = description(build(data_root))["digest"]
    assert description(build(data_root, **change))["digest"] != first


def test_weights_and_tokens_are_in_the_digest(data_root: Path) -> None:
    digests = [description(build(data_root))["digest"]]
    weights = data_root / "weights.txt"
    weights.write_text(weights.read_text().replace("0.55", "0.56"))
    digests.append(description(build(data_root))["digest"])
    prefix = data_root / "merged" / "a-0000"
    # The last token, and the second of 81 document bounds. The sizes stay.
    for damaged, place in ((prefix.with_suffix(".bin"), -1), (prefix.with_suffix(".idx"), -8 * 80)):
        content = bytearray(damaged.read_bytes())
        content[place] ^= 1
        damaged.write_bytes(content)
        digests.append(description(build(data_root))["digest"])
    assert len(set(digests)) == 4


def test_files_must_match_the_manifest(data_root: Path) -> None:
    prefix = data_root / "merged" / "a-0000"
    vouch(prefix)
    identity = description(build(data_root))["pairs"]["merged/a-0000"]
    assert identity["sha256"]["bin"] == files.sha256(prefix.with_suffix(".bin"))
    manifest = prefix.with_suffix(".json").read_bytes()
    overwrite(prefix.with_suffix(".idx"), 34, 3, "<i")
    with pytest.raises(UserError, match="a-0000: files do not match the manifest"):
        build(data_root)
    prefix.with_suffix(".json").write_bytes(manifest.replace(b'"bin"', b'"bim"'))
    with pytest.raises(UserError, match=r"a-0000\.json: changed since it was written"):
        build(data_root)


def test_an_order_that_does_not_fit_on_the_disk_is_refused(data_root: Path) -> None:
    message = r"index: the order of 1,000,000,000,020 samples takes 10\.0 TB, the file system has"
    with pytest.raises(UserError, match=message):
        build(data_root, train_samples=10**12)
    assert not (data_root.parent / "index").exists()


def test_without_validation_samples_there_is_no_validation_split(data_root: Path) -> None:
    folder = build(data_root, valid_samples=0)
    assert list(description(folder)["splits"]) == ["train"]
    assert not (folder / "valid").exists()


def test_a_small_blend_may_draw_more_than_megatron_requests(tmp_path: Path) -> None:
    """Every dataset's share is rounded up: the large one gives more than Megatron requests."""
    names = ["large", *(f"small{number}" for number in range(20))]
    for name in names:
        write_dataset(tmp_path / name, [33] * 25)
    weights = [f"{100 if name == 'large' else 0.01} {name} {name}\n" for name in names]
    (tmp_path / "weights.txt").write_text("".join(weights))
    folder = build(
        tmp_path, train_samples=20, valid_samples=0, split="1,0,0", output=tmp_path / "i"
    )
    datasets = description(folder)["splits"]["train"]["files"]
    assert all(dataset["num_samples"] >= dataset["drawn_samples"] for dataset in datasets)
    assert datasets[0]["epochs"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 1}, "sequence_length: 1"),
        ({"train_samples": 0}, "train_samples: 0"),
        ({"valid_samples": -1}, "valid_samples: -1"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": 2**32}, "seed: 4294967296"),
        ({"split": "949"}, "949"),
        ({"weights": Path("nowhere.txt")}, "nowhere.txt"),
        ({"train_samples": None}, "give --train-samples or --epochs"),
        ({"epochs": ["1"]}, "give --train-samples or --epochs"),
        ({"train_samples": None, "epochs": ["x=1"]}, "'x=1': no such corpus .* choose one of b, a"),
        ({"train_samples": None, "epochs": ["a=1"]}, "corpus 'b' has none; add b=NUMBER"),
        ({"train_samples": None, "epochs": ["1", "2"]}, "'2': given twice"),
        ({"train_samples": None, "epochs": ["0"]}, "'0': give a number above 0"),
        ({"train_samples": None, "epochs": ["1/0"]}, "'1/0': give a number above 0"),
        ({"train_samples": None, "epochs": ["1e-9"]}, "no dataset fills a sample"),
        ({"data_root": Path("nowhere")}, r"nowhere/merged/b-0000\.\w+: no such file"),
    ],
)
def test_a_mistake_is_a_user_error_and_leaves_nothing(
    data_root: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(data_root, **changes)
    assert sorted(path.name for path in data_root.parent.iterdir()) == ["data"]


def test_a_complete_index_is_kept(data_root: Path, capsys: pytest.CaptureFixture) -> None:
    folder = build(data_root)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    build(data_root)
    assert "already complete" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    before = contents(folder)
    damaged = folder / "train" / "dataset_index.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    build(data_root)
    assert contents(folder) == before
    (folder / "valid" / "dataset_index.npy").unlink()
    build(data_root)
    assert contents(folder) == before


def test_epochs_are_exact(data_root: Path) -> None:
    splits = description(build(data_root, train_samples=None, epochs=["a=1", "b=2.5"]))["splits"]
    for dataset in splits["train"]["files"]:
        epochs = Fraction(5, 2) if dataset["corpus"] == "b" else 1
        assert dataset["drawn_samples"] == (epochs * dataset["tokens"] - 1) // 32
        assert dataset["epochs"] == math.ceil(epochs)
    drawn = [dataset["drawn_samples"] for dataset in splits["train"]["files"]]
    numbers = np.load(data_root.parent / "index/train/dataset_index.npy")
    sample_numbers = np.load(data_root.parent / "index/train/dataset_sample_index.npy")
    assert np.bincount(numbers).tolist() == drawn
    for number, count in enumerate(drawn):
        assert sample_numbers[numbers == number].tolist() == list(range(count))


def test_one_epoch_equals_megatron_without_weights(data_root: Path) -> None:
    folder = build(data_root, train_samples=None, epochs=["1"], valid_samples=0, split="1,0,0")
    blend = ([str(data_root / prefix) for prefix in WEIGHTS], None)
    settings = config(sequence_length=32, seed=1234, split="1,0,0", blend=blend)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, settings)
    reference = builder.build()[0]
    numbers = np.load(folder / "train/dataset_index.npy")
    assert_identical(numbers, reference.dataset_index)
    numbers = np.load(folder / "train/dataset_sample_index.npy")
    assert_identical(numbers, reference.dataset_sample_index)
    assert_arrays_equal(arrays(folder, "train"), reference.datasets)


@pytest.mark.parametrize("within", ["concatenated", "shuffled", "blended"])
def test_corpora_are_blended_exactly(data_root: Path, within: str) -> None:
    # The datasets of corpus a are not neighbors in the weighting file.
    lines = (data_root / "weights.txt").read_text().splitlines()
    (data_root / "weights.txt").write_text("\n".join([lines[1], lines[0], lines[2]]))
    folder = build(data_root, blend="corpora", within_corpus=within, train_samples=1000)
    train = description(folder)["splits"]["train"]
    assert [dataset["prefix"][7:] for dataset in train["files"]] == ["a-0000", "a-0001", "b-0000"]
    assert [dataset["drawn_samples"] for dataset in train["files"]] == [300, 150, 550]
    numbers = np.load(folder / "train/dataset_index.npy")
    sample_numbers = np.load(folder / "train/dataset_sample_index.npy")
    for number, count in enumerate([300, 150, 550]):
        assert sorted(sample_numbers[numbers == number]) == list(range(count))


def test_a_last_partial_sample_is_padded(data_root: Path) -> None:
    padded = []
    for seed in range(8):  # each draws different samples
        options = {"drop_last_partial_sequence": False, "valid_samples": 12, "seed": seed}
        samples = DocumentSamples(build(data_root, **options), split="valid", data_root=data_root)
        padded += [row for row in map(samples.__getitem__, range(12)) if PAD in row]
    assert padded
    for row in padded:
        tokens = row[: np.argmax(row == PAD)]
        assert len(tokens) > 1
        assert np.all(row[len(tokens) :] == PAD)
        assert np.all(tokens >= 0)
