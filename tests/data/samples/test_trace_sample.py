"""From a training step to the raw lines it saw, and from a document to the steps that see it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.support.runs import ARCHITECTURE, SETTINGS, make_index
from tokamake.config.resolved_run import ResolvedTrainSettings, Run, read_run, write_run
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.fim.origins import NOWHERE
from tokamake.data.samples.fim.samples import FimSamples, Traced, training_samples
from tokamake.data.samples.loader import PAD, Samples
from tokamake.data.samples.trace_sample import trace_sample
from tokamake.data.samples.trace_steps import trace_steps
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError


@pytest.fixture(scope="module")
def run(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps of 6 samples from two pairs, one of sentences and one without a map."""
    root = tmp_path_factory.mktemp("traced")
    for name in ("one", "two"):
        texts = [f"{name} {number}. " + "Words follow it. " * (number % 5) for number in range(90)]
        path = root / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenize(
            (str(path),),
            output=root / name,
            tokenizer=sampled / "tokenizer",
            split_sentences=name == "two",
        )
    (root / "one.sources").unlink()
    (root / "weights.txt").write_text("0.4 one first\n0.6 two second\n")
    samples = {"train_samples": 48, "valid_samples": 0}
    make_index(root, sequence_length=16, split="100,0,0", seed=3, **samples)
    describe_run(root)
    return root


def describe_run(root: Path, **more: Any) -> None:
    train = {**SETTINGS, "train_steps": 8, "global_batch_size": 6, "evaluation_steps": 0}
    train |= {"split": "100,0,0", **more.pop("train", {})}
    settings = Run(
        run="traced",
        seed=3,
        checkpoint=root,
        index=root / "index",
        data_root=root,
        output=root / "training",
        architecture=ARCHITECTURE,
        train=ResolvedTrainSettings(**train),
        **more,
    )
    write_run(root / "run.yaml", settings)


def test_pieces_are_the_samples_tokens(run: Path) -> None:
    samples = Samples(run / "index", split="train", data_root=run)
    pairs = {name: IndexedDataset(run / name) for name in ("one", "two")}
    holders: dict[tuple[str, int], set[int]] = {}
    for sample in range(len(samples)):
        pieces = samples.pieces(sample)
        parts = [pairs[p.prefix][p.sequence][p.start : p.stop] for p in pieces]
        np.testing.assert_array_equal(np.concatenate(parts), samples[sample])
        for piece in pieces:
            holders.setdefault((piece.prefix, piece.sequence), set()).add(sample)
    for name, pair in pairs.items():
        for sequence in range(len(pair)):
            found = samples.seen(name, sequence)
            assert found.tolist() == sorted(holders.get((name, sequence), ()))
    assert any(len(found) > 1 for found in holders.values())


def test_there_and_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[int, set[str]] = {}
    for step in range(1, 9):
        for row in range(6):
            trace_sample(run / "run.yaml", step, row)
            head, *lines = capsys.readouterr().out.splitlines()
            assert re.match(rf"step {step}, row {row}: sample \d+, of corpus (first|second)", head)
            for line in lines:
                place = re.fullmatch(
                    rf"tokens? .* two sequence \d+, document (\d+): {run}/two.jsonl: line (\d+)",
                    line,
                )
                if place:
                    assert int(place[2]) == int(place[1]) + 1
                    seen.setdefault(int(place[1]), set()).add(f"step {step}, row {row}")
                else:
                    pattern = r"tokens? .* one sequence (\d+), document \1 \(.*no sources file"
                    assert re.match(pattern, line)
    assert len(seen) > 40
    for document in range(90):
        trace_steps(run / "run.yaml", "two", document)
        head, *lines = capsys.readouterr().out.splitlines()
        assert set(lines) == seen.get(document, set())
        assert head.startswith(f"document {document} of two: {len(lines)} sample")


def test_a_token(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = Samples(run / "index", split="train", data_root=run)
    told = told_one_by_one(run, 2, 1, capsys)
    assert len(told) == 17
    for token, line in enumerate(told):
        found = re.match(
            r"comes from token (\d+) of (one|two) sequence (\d+), document (\d+)", line
        )
        assert found
        pair, sequence = IndexedDataset(run / found[2]), int(found[3])
        first, stop = pair.document_bounds[int(found[4]) : int(found[4]) + 2]
        assert first <= sequence < stop
        assert pair[sequence][int(found[1])] == samples[7][token]


def told_one_by_one(
    run: Path, step: int, row: int, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What is said of each token of a row, behind "token N"."""
    told = []
    for token in range(read_run(run / "run.yaml").train.sequence_length + 1):
        trace_sample(run / "run.yaml", step, row, token=token)
        _, line = capsys.readouterr().out.splitlines()
        assert line.startswith(f"token {token} ")
        told.append(line.removeprefix(f"token {token} "))
    return told


def told_at_once(
    run: Path, step: int, row: int, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], str]:
    """The same from the list of runs of tokens, and what it says last of tokens left out."""
    trace_sample(run / "run.yaml", step, row)
    told: list[str] = []
    _, *lines = capsys.readouterr().out.splitlines()
    left_out = lines.pop() if lines[-1].endswith("left out") else ""
    for line in lines:
        found = re.fullmatch(r"tokens? (\d+)(?: to (\d+))? (?:is|are|comes?) (.*)", line)
        assert found
        first, last = int(found[1]), int(found[2] or found[1])
        assert first == len(told)  # all tokens are there, in their order
        source = re.fullmatch(r"from tokens? (\d+)(?: to (\d+))? (of .*)", found[3])
        if not source:
            told += [f"is {found[3]}"] * (last - first + 1)
            continue
        begin, end = int(source[1]), int(source[2] or source[1])
        for place in range(last - first + 1):
            # Where text is encoded in other words, several tokens may come from one.
            told.append(f"comes from token {min(begin + place, end)} {source[3]}")
    return told, left_out


def test_a_list_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in range(6):
        assert told_at_once(run, 3, row, capsys) == (told_one_by_one(run, 3, row, capsys), "")


@pytest.fixture(scope="module")
def rearranged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose documents are rearranged, all of them, from a pair with a map."""
    root = tmp_path_factory.mktemp("rearranged")
    texts = [f"{number}. " + "Words follow, again. " * (number % 7 + 1) for number in range(90)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (root / "two.jsonl").write_text(lines)
    special = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    train_tokenizer(
        [root / "two.jsonl"],
        vocab_size=300,
        special_tokens=special,
        output=root / "tokenizer",
    )
    tokenize((str(root / "two.jsonl"),), output=root / "two", tokenizer=root / "tokenizer")
    (root / "weights.txt").write_text("1 two second\n")
    samples = {"train_samples": 48, "valid_samples": 0}
    make_index(root, sequence_length=60, split="100,0,0", seed=3, **samples)
    train = {"sequence_length": 60, "fim": {"rate": 1.0}}
    describe_run(root, tokenizer=root / "tokenizer", train=train)
    return root


def test_rearranged_rows(rearranged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tokenizers.Tokenizer.from_file(str(rearranged / "tokenizer/tokenizer.json"))
    samples = training_samples(read_run(rearranged / "run.yaml"))
    pair = IndexedDataset(rearranged / "two")
    source = (
        r"comes from token (\d+) of two sequence (\d+), document \2: "
        rf"{rearranged}/two\.jsonl: line (\d+)"
    )
    seen = set()
    for row in range(3):
        told = told_one_by_one(rearranged, 2, row, capsys)
        for token, line in zip(samples[6 + row].tolist(), told, strict=True):
            text = own.decode([token], skip_special_tokens=False)
            if text in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"):
                assert line == f"is {text}, put there by train.fim"
                seen.add(text)
                continue
            found = re.fullmatch(source, line)
            assert found
            assert int(found[3]) == int(found[2]) + 1
            sequence = pair[int(found[2])].tolist()
            before, held, after = (
                own.decode(part, skip_special_tokens=False)
                for part in np.split(sequence, [int(found[1]), int(found[1]) + 1])
            )
            whole = before + held + after
            assert any(whole[len(before) + at :].startswith(text) for at in range(len(held)))
        assert len(set(told)) > 40
        runs, left_out = told_at_once(rearranged, 2, row, capsys)
        assert re.fullmatch(r"\d+ tokens? more did not fit and (is|are) left out", left_out)
        assert [line.partition(" of ")[2] for line in runs] == [
            line.partition(" of ")[2] for line in told
        ]
    assert len(seen) == 3


def test_padding(
    rearranged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {5: "<fim_prefix>"}
    tokens, origins = np.full(61, PAD), np.full(61, NOWHERE)
    tokens[:3], origins[1:3] = [5, 6, 7], [0, 1]
    made = Traced(tokens, origins, marks, 0)
    monkeypatch.setattr(FimSamples, "traced", lambda *_: made)
    trace_sample(rearranged / "run.yaml", 1, 0)
    _, mark, source, padding = capsys.readouterr().out.splitlines()
    assert mark == "token 0 is <fim_prefix>, put there by train.fim"
    assert source.startswith("tokens 1 to 2 come from tokens ")
    assert padding == "tokens 3 to 60 are padding"
    trace_sample(rearranged / "run.yaml", 1, 0, token=60)
    assert capsys.readouterr().out.splitlines()[1] == "token 60 is padding"


@pytest.mark.parametrize(
    ("step", "row", "token", "reason"),
    [
        (0, 0, None, "step 0: there is none; give 1 to 8"),
        (9, 0, None, "step 9: there is none; give 1 to 8"),
        (1, 6, None, "row 6: there is none; give 0 to 5"),
        (1, 0, 17, "token 17: there is none; give 0 to 16"),
    ],
)
def test_refuses(run: Path, step: int, row: int, token: int | None, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        trace_sample(run / "run.yaml", step, row, token=token)


def test_trace_steps_refuses(run: Path) -> None:
    with pytest.raises(UserError, match="draws from no pair three; name one of one, two"):
        trace_steps(run / "run.yaml", "three", 0)
    with pytest.raises(UserError, match="two: no document 90; give 0 to 89"):
        trace_steps(run / "run.yaml", "two", 90)
