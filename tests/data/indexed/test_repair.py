"""`repair` turns datasets with a broken index into those that megatron-core would have written."""

import struct
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import tensor

from tests.support.megatron_datasets import assert_same_dataset
from tokamake.data.indexed import repair as repair_module
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.repair import repair
from tokamake.errors import UserError

EOD = 9
DOCUMENTS = [[[1, 2], [3, EOD]], [], [[EOD]], [[4, 5, 6], [7], [8, EOD]]]
"""Documents as lists of sentences; one document has none."""


def build(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> Path:
    """Write a correct dataset with megatron-core."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        tokens = [token for sentence in document for token in sentence]
        builder.add_document(tensor(tokens), [len(sentence) for sentence in document])
    builder.finalize(f"{prefix}.idx")
    return prefix


def write_index(
    prefix: Path, lengths: list[int], pointers: list[int], bounds: list[int], code: int = 8
) -> None:
    """Write an .idx file from its columns."""
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
        + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(bounds, "<i8").tobytes()
    )


@pytest.fixture
def right(tmp_path: Path) -> Path:
    return build(tmp_path / "right", DOCUMENTS)


@pytest.fixture
def wrong(tmp_path: Path, right: Path) -> Path:
    """A dataset with the tokens of `right`; tests write its index."""
    (tmp_path / "wrong.bin").write_bytes((tmp_path / "right.bin").read_bytes())
    return tmp_path / "wrong"


def test_lengths_without_eod_are_corrected(
    tmp_path: Path, right: Path, wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_index(wrong, [2, 1, 0, 3, 1, 1], [0, 4, 6, 6, 12, 14], [0, 2, 2, 3, 6])
    with pytest.raises(UserError, match=r"wrong\.bin: 22 bytes, .* 16; try `tokamake repair"):
        merge([wrong], output=tmp_path / "merged")
    repair(wrong, eod=EOD, output=tmp_path / "new")
    assert_same_dataset(tmp_path / "new", right)
    assert "omitted the EOD token of 3 documents" in capsys.readouterr().out
    assert (tmp_path / "new.bin").samefile(tmp_path / "wrong.bin")
    merge([tmp_path / "new"], output=tmp_path / "merged")
    assert_same_dataset(tmp_path / "merged", right)


def test_many_documents_without_eod_are_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_module, "_DOCUMENTS_AT_ONCE", 64)
    rng = np.random.default_rng(7)
    documents = [
        [rng.integers(10, 99, length).tolist() for length in rng.integers(1, 9, rng.integers(4))]
        for _ in range(200)
    ]
    for document in documents:
        if document:
            document[-1].append(EOD)
    right = build(tmp_path / "right", documents)
    sizes = [
        [len(sentence) - (number == len(document) - 1) for number, sentence in enumerate(document)]
        for document in documents
    ]
    lengths = [size for of_document in sizes for size in of_document]
    bounds = np.cumsum([0, *map(len, documents)]).tolist()
    pointers = (2 * (np.cumsum(lengths) - lengths)).tolist()
    (tmp_path / "wrong.bin").write_bytes((tmp_path / "right.bin").read_bytes())
    write_index(tmp_path / "wrong", lengths, pointers, bounds)
    repair(tmp_path / "wrong", eod=EOD, output=tmp_path / "new")
    assert_same_dataset(tmp_path / "new", right)
    tokens = np.fromfile(tmp_path / "right.bin", np.uint16)
    position = np.flatnonzero(tokens == EOD)[100]
    tokens[position] = 77
    tokens.tofile(tmp_path / "wrong.bin")
    document = [number for number, sentences in enumerate(documents) if sentences][100]
    with pytest.raises(
        UserError, match=f"document {document} should end at token {position:,} with"
    ):
        repair(tmp_path / "wrong", eod=EOD, output=tmp_path / "newer")
    assert not list(tmp_path.glob("*newer*"))


def test_overflowed_pointers_are_corrected(
    tmp_path: Path, right: Path, wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right_pointers = np.array([0, 4, 8, 10, 16, 18])
    overflowed = right_pointers - (right_pointers > 9) * 2**32
    write_index(wrong, [2, 2, 1, 3, 1, 2], overflowed.tolist(), [0, 2, 2, 3, 6])
    with pytest.raises(UserError, match=r"wrong\.idx: sequence 3 begins at -42949"):
        merge([wrong], output=tmp_path / "merged")
    repair(wrong, eod=EOD, output=tmp_path / "new")
    assert_same_dataset(tmp_path / "new", right)
    assert "3 of 6 byte pointers were wrong" in capsys.readouterr().out


def test_a_correct_dataset_stays_the_same(
    tmp_path: Path, right: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repair(right, eod=EOD, output=tmp_path / "new")
    assert_same_dataset(tmp_path / "new", right)
    assert capsys.readouterr().out == f"{right}: healthy, nothing to repair\n"


@pytest.mark.parametrize("kept", [None, 0, 10, 40, -1])
def test_tokens_are_split_at_eod_if_the_index_is_missing_or_truncated(
    tmp_path: Path, right: Path, wrong: Path, kept: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if kept is not None:
        Path(f"{wrong}.idx").write_bytes(Path(f"{right}.idx").read_bytes()[:kept])
    with pytest.raises(UserError, match=r"wrong\.idx: .*give the token type, such as --dtype"):
        repair(wrong, eod=EOD, output=tmp_path / "new")
    repair(wrong, eod=EOD, output=tmp_path / "new", dtype="uint16")
    repaired = MegatronDataset(str(tmp_path / "new"))
    assert [repaired[number].tolist() for number in range(len(repaired))] == [
        [1, 2, 3, EOD],
        [EOD],
        [4, 5, 6, 7, 8, EOD],
    ]
    assert repaired.document_indices.tolist() == [0, 1, 2, 3]
    assert "3 documents were split at their EOD tokens\n" in capsys.readouterr().out


def test_tokens_after_the_last_eod_are_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = np.full(2_500_000, 1, np.int32)  # several chunks
    tokens[[7, 1 << 20, 2_000_000]] = EOD
    tokens.tofile(tmp_path / "lost.bin")
    repair(tmp_path / "lost", eod=EOD, output=tmp_path / "new", dtype="int32")
    repaired = MegatronDataset(str(tmp_path / "new"))
    assert repaired.sequence_lengths.tolist() == [8, (1 << 20) - 7, 2_000_000 - (1 << 20), 499_999]
    assert "4 documents were split at their EOD tokens, the last one of 499,999 tokens without" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eod": 5, "dtype": "uint16"}, r"lost\.bin: EOD 5 is not in it"),
        ({"eod": -1, "dtype": "uint16"}, "--eod: -1: not a uint16"),
        ({"eod": 1, "dtype": "float32"}, "--dtype: float32: not a token type"),
        (
            {"eod": 1, "dtype": "int64"},
            r"lost\.bin: 4 bytes are not a whole number of int64 tokens",
        ),
    ],
)
def test_invalid_options_are_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    (tmp_path / "lost.bin").write_bytes(b"\1\0\2\0")
    with pytest.raises(UserError, match=message):
        repair(tmp_path / "lost", output=tmp_path / "new", **options)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["lost.bin"]


def test_errors_say_why_a_dataset_cannot_be_repaired(
    tmp_path: Path, right: Path, wrong: Path
) -> None:
    new = tmp_path / "new"
    with pytest.raises(UserError, match=r"none\.bin: no such file"):
        repair(tmp_path / "none", eod=EOD, output=new)
    write_index(wrong, [2, 2], [0, 4], [0, 2])
    with pytest.raises(
        UserError, match="11 tokens, but the index counts 4; the difference is not one EOD"
    ):
        repair(wrong, eod=EOD, output=new)
    with pytest.raises(UserError, match=r"--dtype: int32, but the index of .* says uint16"):
        repair(wrong, eod=EOD, output=new, dtype="int32")
    write_index(wrong, [2, 2, 8, -1], [0, 4, 8, 24], [0, 2, 4])
    with pytest.raises(UserError, match="a sequence has length -1"):
        repair(wrong, eod=EOD, output=new)
    write_index(wrong, [2, 2, 7], [0, 4, 8], [0, 2, 1, 3])
    with pytest.raises(UserError, match="document bounds do not ascend from 0 to 3"):
        repair(wrong, eod=EOD, output=new)
    with pytest.raises(UserError, match="is both input and output"):
        repair(right, eod=EOD, output=right)
    write_index(wrong, [2, 2, 7], [0, 4, 8], [0, 2, 3], code=6)
    with pytest.raises(UserError, match="`tokamake merge` reads it"):
        repair(wrong, eod=EOD, output=new)
    (tmp_path / "new.json").write_text("{}")
    with pytest.raises(UserError, match=r"new\.json: belongs to another dataset"):
        repair(right, eod=EOD, output=new)
    assert sorted(path.name for path in tmp_path.iterdir() if "new" in path.name) == ["new.json"]


def test_copies_if_no_link_can_be_made(
    tmp_path: Path, right: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    repair(right, eod=EOD, output=tmp_path / "new")
    assert_same_dataset(tmp_path / "new", right)
    assert not (tmp_path / "new.bin").samefile(tmp_path / "right.bin")
