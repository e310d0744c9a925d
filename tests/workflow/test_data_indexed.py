"""Runs from existing indexed datasets have the batches of raw text, alone or mixed with it."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

from tests.support.workflows import CONFIG, CORPORA, jobs, snakemake
from tokamake.data.mixture.weighting_file import read_weighting_file

TRAIN = {**CONFIG["train"], "train_steps": 4}  # type: ignore[dict-item]
HEADER, *ROWS = CORPORA.splitlines()


@pytest.fixture
def home(built: Path, tmp_path: Path) -> Path:
    """A workspace with the raw files, the tokenizer and the datasets of another one."""
    home = Path(shutil.copytree(built, tmp_path / "home", symlinks=True))
    (home / "pre").mkdir()
    for path in (home / "results/data/merged").iterdir():
        if path.suffix in (".bin", ".idx"):  # as other programs leave them: no manifest
            shutil.copy2(path, home / "pre")
    shutil.move(home / "results/tokenizer", home / "tokenizer")
    shutil.move(home / "results/raw", home / "raw")
    shutil.rmtree(home / "results/smoke")
    shutil.move(home / "results/data", home / "before")
    return home


def arguments(home: Path, name: str, rows: list[str], **sections: object) -> tuple[str, ...]:
    table = "\n".join(["corpus\tfiles\ttext_key\tweight\tformat", *rows]) + "\n"
    (home / f"{name}.tsv").write_text(table)
    config = {**CONFIG, "run": name, "corpora": f"{name}.tsv", "train": TRAIN}
    del config["sample_corpus"]
    config |= {"tokenizer": {"path": "tokenizer"}, **sections}
    (home / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return "--configfile", f"{name}.yaml", "--"


def listing(home: Path, name: str, *lines: str, **sections: object) -> tuple[str, ...]:
    """Arguments of a run of a list of datasets, without a table."""
    (home / f"{name}.txt").write_text("\n".join(lines) + "\n")
    result = arguments(home, name, [], weights=f"{name}.txt", **sections)
    config = yaml.safe_load((home / f"{name}.yaml").read_text())
    del config["corpora"]
    (home / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return result


def tokens_of(prefix: Path) -> list[int]:
    """All tokens of a dataset, as megatron-core reads them."""
    dataset = MegatronDataset(str(prefix))
    return [int(token) for number in range(len(dataset)) for token in dataset[number]]


INDEXED = ["code\tpre/code-*\t\t2\tindexed", "docs\tpre/docs-*\t\t1\tindexed"]
RAW = ["code\traw/code/*\ttext\t2\t", "docs\traw/docs/*\ttext\t1\t"]


def samples(folder: Path) -> tuple[dict[str, bytes], object]:
    """Files of a sample index, and what its description says of the splits."""
    contents = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "index.json"  # it has hashes of the manifests
    }
    assert any(name.endswith("arrays.bin") for name in contents)
    return contents, json.loads((folder / "index.json").read_text())["splits"]


def tokens(home: Path, run: str, folder: str, data: str = "") -> list[bytes]:
    """Tokens of the datasets that a run draws from, in the order of its weighting file."""
    lines = read_weighting_file(home / f"results/data/{data}{run}.weights.txt")
    assert (home / folder / "index/index.json").exists()
    paths = [home / f"results/data/{data}{line.prefix}.bin" for line in lines]
    return [path.read_bytes() for path in paths]


def rewrite_as(dtype: type[np.number], code: int, prefix: Path) -> None:
    """Write the tokens of a uint16 dataset as another type."""
    content = Path(f"{prefix}.idx").read_bytes()
    (sequences,) = struct.unpack_from("<Q", content, 18)
    starts = np.frombuffer(content, "<i8", sequences, 34 + 4 * sequences)
    scaled = (starts // 2 * np.dtype(dtype).itemsize).astype("<i8").tobytes()
    first, last = 34 + 4 * sequences, 34 + 12 * sequences
    Path(f"{prefix}.idx").write_bytes(
        content[:17] + bytes([code]) + content[18:first] + scaled + content[last:]
    )
    np.fromfile(f"{prefix}.bin", "<u2").astype(dtype).tofile(f"{prefix}.bin")


def rewrite_as_tntidx(prefix: Path) -> None:
    """Replace an index by one that --dataset-impl cached and lazy wrote."""
    content = Path(f"{prefix}.idx").read_bytes()
    code, sequences, num_bounds = struct.unpack_from("<BQQ", content, 17)
    lengths = np.frombuffer(content, "<i4", sequences, 34)
    bounds = np.frombuffer(content, "<i8", num_bounds, 34 + 12 * sequences)
    columns = [np.arange(sequences + 1), np.cumsum([0, *lengths]), lengths, bounds]
    Path(f"{prefix}.idx").write_bytes(
        b"TNTIDX\0\0"
        + struct.pack("<QQQQQQ", 1, code, 2, sequences, sequences, num_bounds)
        + np.concatenate(columns).astype("<i8").tobytes()
    )


@pytest.mark.grid
@pytest.mark.slow
def test_batches_equal_those_of_a_run_from_raw_text(home: Path) -> None:
    lazy = [Path(str(path)[: -len(".idx")]) for path in (home / "pre").glob("docs-*.idx")]
    for prefix in lazy:
        rewrite_as_tntidx(prefix)
    mine = arguments(home, "mine", INDEXED)
    planned = jobs(snakemake(home, "-n", *mine, "resolve"))
    assert "tokenize" not in planned
    assert planned["merge"] == 4
    result = snakemake(home, *mine, "resolve")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Nothing to be done" in snakemake(home, *mine, "resolve").stderr
    raw = arguments(home, "mine", RAW, data_set="raw")
    (home / "results/mine").rename(home / "from-indexed")
    result = snakemake(home, *raw, "resolve")
    assert result.returncode == 0, result.stdout + result.stderr
    indexed, expected = (
        samples(folder / "index") for folder in (home / "from-indexed", home / "results/mine")
    )
    assert indexed == expected
    merged = [home / f"results/data/{folder}merged" for folder in ("", "raw/")]
    names = {path.name for path in merged[1].glob("*.bin")}
    assert names == {path.name for path in merged[0].glob("*.bin")}
    # Megatron of today reads no TNTIDX, so these tokens are written again.
    written = {f"{prefix.name}.bin" for prefix in lazy}
    assert written < names
    assert {name for name in names if not (merged[0] / name).is_symlink()} == written
    assert all((merged[0] / n).read_bytes() == (merged[1] / n).read_bytes() for n in names)


@pytest.mark.grid
@pytest.mark.slow
def test_batches_of_a_list_equal_those_of_a_run_from_raw_text(home: Path) -> None:
    """The list has the form of Megatron's --data-path: no corpora, absolute and relative paths."""
    raw = arguments(home, "mine", RAW, data_set="raw")
    assert snakemake(home, *raw, "resolve").returncode == 0
    (home / "results/mine").rename(home / "from-raw")
    lines = read_weighting_file(home / "results/data/raw/mine.weights.txt")
    roots = {"code": f"{home}/pre", "docs": "pre"}
    pairs = [f"{line.weight!r} {roots[line.corpus]}/{Path(line.prefix).name}" for line in lines]
    mine = listing(home, "mine", " ".join(pairs))
    result = snakemake(home, *mine, "resolve")
    assert result.returncode == 0, result.stdout + result.stderr
    indexed, expected = (
        samples(folder / "index") for folder in (home / "results/mine", home / "from-raw")
    )
    assert indexed == expected
    assert tokens(home, "mine", "results/mine") == tokens(home, "mine", "from-raw", "raw/")
    assert "Nothing to be done" in snakemake(home, *mine, "resolve").stderr
    # Another weight needs no other data.
    other = listing(home, "mine", " ".join(pairs).replace(pairs[0], f"9 {pairs[0].split()[1]}"))
    planned = jobs(snakemake(home, "-n", *other, "resolve"))
    assert planned == {"weigh": 1, "index": 1, "resolve": 1}


@pytest.mark.grid
@pytest.mark.slow
def test_a_list_without_its_tokenizer_trains_and_generates_token_ids(home: Path) -> None:
    lines = ["2 code-0000_text_document wiki-en", "1 docs-0000_text_document.bin old 0:0.9"]
    tokenizer = {"kind": "ids", "vocab_size": 500, "eod": 0}
    generate = {"max_new_tokens": 8}
    sections = {"tokenizer": tokenizer, "generate": generate, "data_root": "pre"}
    mine = listing(home, "ids", *lines, **sections)
    result = snakemake(
        home, "--set-resources", "train:tasks=1", *mine, "results/ids/evaluate.json",
        "results/ids/samples.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert (home / "results/data/ids.weights.txt").read_text() == (
        "1.0 merged/old-0000_text_document old 0.0:0.9\n"
        "2.0 merged/wiki-en-0000_text_document wiki-en\n"
    )
    (sample,) = json.loads((home / "results/ids/samples.json").read_text())
    assert sample["prompt"] == "0"
    assert all(0 <= int(word) < 500 for word in sample["text"].split())
    scores = json.loads((home / "results/ids/evaluate.json").read_text())
    assert scores["overall"]["bits_per_byte"] is None


@pytest.mark.grid
@pytest.mark.slow
def test_existing_datasets_of_any_dtype_and_raw_text_train_in_one_run(home: Path) -> None:
    """A row names the first dataset, a list those of int32 and float64, and a row raw text."""
    whole = tokens_of(home / "pre/docs-0000_text_document")
    for name, dtype, code in (("int", np.int32, 4), ("float", np.float64, 6)):
        for suffix in (".bin", ".idx"):
            shutil.copy(home / f"pre/docs-0000_text_document{suffix}", home / f"pre/{name}{suffix}")
        rewrite_as(dtype, code, home / f"pre/{name}")
    mixed = listing(home, "mixed", "1 pre/int int", "1 pre/float float")
    config = yaml.safe_load((home / "mixed.yaml").read_text())
    (home / "mixed.yaml").write_text(yaml.safe_dump({**config, "corpora": "mixed.tsv"}))
    table = "\n".join(["corpus\tfiles\ttext_key\tweight\tformat", INDEXED[0], RAW[1]])
    (home / "mixed.tsv").write_text(table + "\n")
    result = snakemake(home, "--set-resources", "train:tasks=1", *mixed, "train")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (home / "results/mixed/training/global_step4").is_dir()
    weights = read_weighting_file(home / "results/data/mixed.weights.txt")
    assert {entry.corpus for entry in weights} == {"code", "docs", "int", "float"}
    (int_prefix,), (float_prefix,) = (
        [home / "results/data" / entry.prefix for entry in weights if entry.corpus == corpus]
        for corpus in ("int", "float")
    )
    assert (tokens_of(int_prefix), tokens_of(float_prefix)) == (whole, whole)
    content = (home / "pre/code-0000_text_document.bin").read_bytes()
    # A dataset that changes is checked again, and what depends on it is made again.
    (home / "pre/code-0000_text_document.bin").write_bytes(content[:-2] + b"\xff\x7f")
    result = snakemake(home, *mixed, "describe")
    assert result.returncode == 1
    assert "1 token not in the vocabulary" in result.stdout + result.stderr


def test_a_torn_index_of_a_list_is_one_line_at_the_dry_run(home: Path) -> None:
    whole = home / "pre/code-0000_text_document"
    shutil.copy(f"{whole}.bin", home / "pre/cut.bin")
    (home / "pre/cut.idx").write_bytes(Path(f"{whole}.idx").read_bytes()[:-8])
    result = snakemake(home, "-n", *listing(home, "bad", "1 pre/cut"), "train")
    assert result.returncode == 2, result.stdout + result.stderr
    fault = "bad.txt:1: pre/cut.idx: 454 bytes, its header says 462; rebuild the dataset"
    assert result.stderr.splitlines()[-1].startswith(f"tokamake: {fault}")


def test_mistakes_are_one_line_at_the_dry_run(home: Path) -> None:
    def refused(rows: list[str], **sections: object) -> str:
        result = snakemake(home, "-n", *arguments(home, "bad", rows, **sections), "train")
        assert result.returncode == 2, result.stdout + result.stderr
        return result.stderr.splitlines()[-1]

    assert refused(INDEXED, tokenizer={"vocab_size": 500}) == (
        "tokamake: bad.tsv:2: format indexed: its tokens need the tokenizer that made them; name "
        "it in tokenizer.path, or give tokenizer.kind: ids and tokenizer.vocab_size"
    )
    (home / "pre/code-0000_text_document.idx").unlink()
    assert "code-0000_text_document.idx: cannot be read" in refused(INDEXED)
