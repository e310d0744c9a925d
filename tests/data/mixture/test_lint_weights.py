"""`lint_weights` lists all problems with their lines, then what the file draws."""

import json
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_datasets import write_dataset
from tests.support.programs import torch_python
from tokamake.config.resolved_run import ROOT_VARIABLE
from tokamake.data.mixture.lint_weights import count_tokens, lint_weights
from tokamake.data.mixture.weigh import weigh
from tokamake.errors import UserError

TOKENS = {"a-0": [10, 20], "a-1": [10], "b-0": [5, 5, 50], "c": [0]}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of datasets: 40 tokens of a, 60 of b, none of c."""
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    for name, lengths in TOKENS.items():
        write_dataset(tmp_path / name, lengths)
    return tmp_path


def lint(root: Path, text: str, /, **options: Any) -> None:
    (root / "w.txt").write_text(text)
    lint_weights(root / "w.txt", **options)


def findings(capsys: pytest.CaptureFixture[str], root: Path) -> list[str]:
    """Return the printed lines about problems, without the folder."""
    lines = capsys.readouterr().out.splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("corpus "))
    assert all(line.startswith(f"{root}/w.txt:") for line in lines[:end])
    return [line.replace(f"{root}/", "") for line in lines[:end]]


def table(root: Path, text: str) -> Path:
    path = root / "corpora.tsv"
    path.write_text(text.replace(" ", "\t"))
    return path


def test_a_valid_file_prints_a_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lint(root, "0.125 a-0\n0.125 a-1\n0.75 b-0\n", train_tokens=1600)
    assert capsys.readouterr().out == (
        "corpus  files  tokens  weight  epochs\n"
        "a           2      40    0.25      10\n"
        "b           1      60    0.75      20\n"
        "all         3     100       1      16\n"
    )
    lint(root, "1 a-0 first\n3 b-0 second\n")
    assert capsys.readouterr().out == (
        f"{root}/w.txt: warning: weights sum to 4, not 1; they are normalized, check that no line "
        "is missing\n"
        "corpus  files  tokens  weight  epochs\n"
        "first       1      30    0.25       -\n"
        "second      1      60    0.75       -\n"
        "all         2      90       1       -\n"
    )


GOOD = "0.5 a-0 a\n0.5 b-0 b\n"
ERRORS = {
    "0.5 a-0 a\n0.5 b-0\n": ["2: 2 columns, line 1 has 3; name the corpus in all lines or in none"],
    "1 a-0 a\n0.5 b-0 b b\n": ["2: 4 columns; write `weight prefix corpus [START:END]`, or pairs"],
    "0.5 a-0 a\n0.5 none b\n": ["2: no none.bin and no none.idx; check the prefix and --data-root"],
    "0.5 a-0 a\n0.5 half b\n": ["2: no half.idx; check the prefix and --data-root"],
    "0.5 a-0 a\n0.5 text b\n": ["2: text.idx: not a Megatron index"],
    "0.5 a-0 a\n0.5 short b\n": ["2: short.bin: 1 bytes, but its index counts 160"],
    "1 a-0 a\n0.5 a-0.bin a\n": ["2: a-0 is also in line 1; join the lines"],
    "1 a-0 a\n-1 b-0 b\n": ["2: weight '-1'; give a finite number, 0 or more"],
    "1 a-0 a\nnan b-0 b\n": ["2: weight 'nan'; give a finite number"],
    "1 a-0 a\nx b-0 b\n": ["2: weight 'x'; give a finite number"],
    "1 a-0 a\n0 b-0 b\n": ["2: weight 0 draws nothing; give a number above 0 or remove the line"],
    "1 a-0 a\n0.0000 b-0 b\n": ["2: weight 0.0000 is rounded to 0; write it with full precision"],
    "": [" no weight above 0; add lines"],
    "inf a-0 a\n1 b-0 b 3\n0 a-1 a\n": [
        "1: weight 'inf'", "2: 4 columns", "3: weight 0 draws",
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
def test_each_error_names_its_line(
    root: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    write_dataset(root / "half", [1])
    (root / "half.idx").unlink()
    write_dataset(root / "text", [1])
    (root / "text.idx").write_text("text")
    write_dataset(root / "short", [40])
    (root / "short.bin").write_bytes(b"0")
    count = len(ERRORS[text])
    with pytest.raises(UserError, match=rf"w.txt: {count} errors?; fix the lines listed above"):
        lint(root, text)
    printed = findings(capsys, root)
    assert len(printed) == count
    for line, expected in zip(printed, ERRORS[text], strict=True):
        assert line.startswith(f"w.txt:{expected}")


WARNINGS = {
    "0.5 a-0 a\n0.4 b-0 b\n": ["weights sum to 0.9, not 1; they are normalized"],
    "1 a-0 a\n0.0 c c\n": ["c has no token; remove the line"],
    "0.5 a-0 a\n0.5 c c\n": ["c has no token; remove the line"],
    "0.5 ROOT/a-0 a\n0.5 b-0 b\n": ["a-0 is absolute; write it relative to the data root"],
}


@pytest.mark.parametrize("text", WARNINGS)
def test_warnings_are_not_errors(root: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    lint(root, text.replace("ROOT", str(root)))
    printed = findings(capsys, root)
    assert len(printed) == 1
    assert ": warning: " in printed[0]
    assert WARNINGS[text][0] in printed[0]


def test_all_errors_are_listed_in_order(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = random.Random(0).sample([text for text in ERRORS if text.count("\n") == 2], 6)
    text = "".join(line for sample in bad for line in sample.splitlines(True)[1:])
    with pytest.raises(UserError, match="errors"):
        lint(root, f"0.5 a-0 a\n{text}")
    printed = findings(capsys, root)
    numbers = [line.split(":")[1] for line in printed if not line.startswith("w.txt: ")]
    assert set("234567") <= set(numbers)
    assert numbers == sorted(numbers)


TABLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "corpus files epochs\na x 4\nb x 1.01\n": ({"train_tokens": 220}, []),
    "corpus files epochs\na x 4\nb x 2\n": (
        {"train_tokens": 280},
        [
            '1: corpus "a": 5.091 epochs realized, 4 asked by corpora.tsv; rewrite the file',
            '3: corpus "b": 1.273 epochs realized, 2 asked by corpora.tsv; rewrite the file',
        ],
    ),
    "corpus files epochs\na x 8\nb x 2.04\n": ({}, ['3: corpus "b": share 0.2727, 0.2767 asked']),
    "corpus files epochs weight\na x 4 \nb x  1\n": ({"train_tokens": 220}, []),
    "corpus files epochs weight\na x  1\nb x 2 \n": (
        {"train_tokens": 220},
        [
            '1: corpus "a": 4 epochs realized, 2.5 asked',
            '3: corpus "b": 1 epochs realized, 2 asked',
        ],
    ),
    "corpus files epochs weight\na x 1 \nb x  1\n": (
        {},
        [" corpora.tsv: some corpora state epochs and some do not"],
    ),
    "corpus files epochs\na x 4\nb x 2\nd x 1\n": (
        {"train_tokens": 220},
        [' corpus "d" of corpora.tsv has no line; add its files or remove the row'],
    ),
    "corpus files epochs\nb x 2\n": (
        {"train_tokens": 220},
        ['1: corpus "a" is not in corpora.tsv; add a row or correct the name'],
    ),
    "corpus files\na x\nb x\n": (
        {"temperature": 1.0},
        ['1: corpus "a": share 0.7273, 0.4 asked', '3: corpus "b": share 0.2727, 0.6 asked'],
    ),
}


@pytest.mark.parametrize("text", TABLES)
def test_shares_are_compared_with_the_table(
    root: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    options, expected = TABLES[text]
    weights = f"{120 / 220!r} a-0 a\n{40 / 220!r} a-1 a\n{60 / 220!r} b-0 b\n"
    if expected:
        with pytest.raises(UserError, match=f"{len(expected)} error"):
            lint(root, weights, corpora=table(root, text), **options)
    else:
        lint(root, weights, corpora=table(root, text), **options)
    printed = findings(capsys, root)
    assert len(printed) == len(expected)
    for line, start in zip(printed, expected, strict=True):
        assert line.startswith(f"w.txt:{start}")


@pytest.mark.parametrize("seed", range(10))
def test_files_of_weigh_have_no_problem(
    root: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    draw = random.Random(seed)
    rows = ["a\tx\t{}\t{}", "b\tx\t{}\t{}"]
    a, b = draw.choice([("epochs", "weight"), ("weight", "weight"), ("epochs", "epochs")])
    cells = {"epochs": ("1.5", ""), "weight": ("", "0.3")}
    text = "corpus\tfiles\tepochs\tweight\n" + "\n".join(
        row.format(*cells[kind]) for row, kind in zip(rows, (a, b), strict=True)
    )
    path = root / "corpora.tsv"
    path.write_text(text + "\n")
    metadata = [
        {"data_prefix": name, "corpus": name[0], "total_num_tokens": sum(TOKENS[name])}
        for name in ("a-0", "a-1", "b-0")
    ]
    (root / "metadata.json").write_text(json.dumps(metadata))
    train_tokens = 150 if a == b == "epochs" else draw.randint(70, 500)
    options = {"corpora": path, "train_tokens": train_tokens}
    weigh(metadata=root / "metadata.json", output=root / "w.txt", max_epochs=1e9, **options)
    capsys.readouterr()
    lint_weights(root / "w.txt", **options)
    assert findings(capsys, root) == []


def test_the_data_root_may_be_another_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = root / "moved"
    moved.mkdir()
    for path in root.glob("*-*.*"):
        shutil.move(path, moved)
    with pytest.raises(UserError, match="2 errors"):
        lint(root, GOOD)
    lint(root, GOOD, data_root=moved)
    monkeypatch.setenv(ROOT_VARIABLE, str(moved))
    lint(root, GOOD)
    with pytest.raises(UserError, match="2 errors"):
        lint(root, GOOD, data_root=root)


def test_with_a_manifest_the_index_is_not_read(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = {"tokens": 30, "bytes": {"bin": 120}, "sha256": {}}
    (root / "a-0.json").write_text(json.dumps(manifest))
    (root / "a-0.idx").write_bytes(b"")
    lint(root, GOOD)
    (root / "a-0.json").write_text(json.dumps(manifest | {"bytes": {"bin": 124}}))
    capsys.readouterr()
    with pytest.raises(UserError, match="1 error"):
        lint(root, GOOD)
    assert "1: a-0.bin: 120 bytes, its manifest says 124" in findings(capsys, root)[0]
    write_dataset(root / "b-0", [9])
    (root / "b-0.json").write_text('{"tokens": "another program"}')
    lint(root, "1 b-0 b\n")
    assert "9" in capsys.readouterr().out


def test_tokens_are_the_sum_of_the_lengths(root: Path) -> None:
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.choice([0, draw.randint(0, 40)]) for _ in range(draw.randint(1, 9))]
        assert count_tokens(write_dataset(root / "p", lengths)) == sum(lengths)
    # Sequences may be in another order in the index than in the .bin file.
    write_dataset(root / "p", [3, 5])
    raw = (root / "p.idx").read_bytes()
    header, columns = raw[:34], raw[34:]
    swapped = columns[4:8] + columns[:4] + struct.pack("<qq", 12, 0) + columns[24:]
    (root / "p.idx").write_bytes(header + swapped)
    assert count_tokens(root / "p") == 8
    # An index that omits a token of each document is wrong: its last sequence ends too early.
    (root / "p.idx").write_bytes(header + struct.pack("<iiqq", 2, 4, 0, 8) + columns[24:])
    with pytest.raises(UserError, match="32 bytes, but its index counts 24"):
        count_tokens(root / "p")


def test_invalid_options_are_refused(root: Path) -> None:
    with pytest.raises(UserError, match="--train-tokens: -1"):
        lint(root, GOOD, train_tokens=-1)
    with pytest.raises(UserError, match=r"none\.txt: no such file"):
        lint_weights(root / "none.txt")


def test_the_command_prints_problems_and_exits_with_status_two(root: Path) -> None:
    def run(text: str) -> subprocess.CompletedProcess[str]:
        (root / "w.txt").write_text(text)
        command = [torch_python(), "-m", "tokamake", "lint-weights", "w.txt"]
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False
        )

    valid = run(GOOD + "# end\n")
    assert (valid.returncode, valid.stderr) == (0, "")
    assert valid.stdout.startswith("corpus  files  tokens  weight  epochs\n")
    invalid = run("1 a-0 a\n0 b-0 b\n")
    assert invalid.returncode == 2
    assert invalid.stdout.startswith("w.txt:2: weight 0 draws nothing")
    assert invalid.stderr == "tokamake lint-weights: w.txt: 1 error; fix the lines listed above\n"


def test_epochs_count_training_documents(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens are counted exactly: two of the three documents of b hold a sixth of its tokens."""
    write_dataset(root / "a-0", [10] * 9 + [900])
    rows = "corpus files epochs sets\na x 2 \nb x 1 train=0:0.7\nv x  valid\n"
    lint(
        root, f"{180 / 190!r} a-0 a\n{10 / 190!r} b-0 b 0:0.7\n",
        split="9,1,0", train_tokens=190, corpora=table(root, rows),
    )  # fmt: skip
    assert capsys.readouterr().out == (
        "corpus  files  tokens     weight  epochs\n"
        "a           1      90   0.947368       2\n"
        "b           1      10  0.0526316       1\n"
        "all         2     100          1     1.9\n"
    )
