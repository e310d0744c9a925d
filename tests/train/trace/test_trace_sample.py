"""Trace training steps to raw lines, and documents to training steps."""

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
from tokamake.data.indexed.manifest import read_manifest, write_manifest
from tokamake.data.indexed.paths import manifest_path
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.fim.origins import NOWHERE
from tokamake.data.samples.fim.samples import FimSamples, TracedSample, training_samples
from tokamake.data.samples.loader import PAD
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError
from tokamake.train.trace.trace_sample import trace_sample
from tokamake.train.trace.trace_steps import trace_steps


@pytest.fixture(scope="module")
def run(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps of 6 samples. Dataset one has no sources file, dataset two has sentences."""
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
    # Documents of several sequences, as other programs write them: not for an encoder.
    manifest = read_manifest(root / "two")
    del manifest["split_sentences"]
    write_manifest(manifest_path(root / "two"), manifest)
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


def test_spans_have_the_tokens_of_the_sample(run: Path) -> None:
    samples = DocumentSamples(run / "index", split="train", data_root=run)
    datasets = {name: IndexedDataset(run / name) for name in ("one", "two")}
    samples_of: dict[tuple[str, int], set[int]] = {}
    for sample in range(len(samples)):
        spans = samples.spans(sample)
        parts = [datasets[s.prefix][s.sequence][s.start : s.stop] for s in spans]
        np.testing.assert_array_equal(np.concatenate(parts), samples[sample])
        for span in spans:
            samples_of.setdefault((span.prefix, span.sequence), set()).add(sample)
    for name, dataset in datasets.items():
        for sequence in range(len(dataset)):
            numbers = samples.samples_of(name, sequence)
            assert numbers.tolist() == sorted(samples_of.get((name, sequence), ()))
    assert any(len(numbers) > 1 for numbers in samples_of.values())


def test_both_tools_agree(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_of: dict[int, set[str]] = {}
    for step in range(1, 9):
        for row in range(6):
            trace_sample(run / "run.yaml", step, row)
            head, *lines = capsys.readouterr().out.splitlines()
            assert re.match(rf"step {step}, row {row}: sample \d+, of corpus (first|second)", head)
            for line in lines:
                match = re.fullmatch(
                    rf"tokens? .* two sequence \d+, document (\d+): {run}/two.jsonl: line (\d+)",
                    line,
                )
                if match:
                    assert int(match[2]) == int(match[1]) + 1
                    rows_of.setdefault(int(match[1]), set()).add(f"step {step}, row {row}")
                else:
                    assert re.match(
                        r"tokens? .* one sequence (\d+), document \1 \(.*no sources file", line
                    )
    assert len(rows_of) > 40
    for document in range(90):
        trace_steps(run / "run.yaml", "two", document)
        head, *lines = capsys.readouterr().out.splitlines()
        assert set(lines) == rows_of.get(document, set())
        assert head.startswith(f"document {document} of two: {len(lines)} sample")


def test_each_token_comes_from_the_same_token_of_its_dataset(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = DocumentSamples(run / "index", split="train", data_root=run)
    lines = trace_tokens(run, 2, 1, capsys)
    assert len(lines) == 17
    for token, line in enumerate(lines):
        match = re.match(
            r"comes from token (\d+) of (one|two) sequence (\d+), document (\d+)", line
        )
        assert match
        dataset, sequence, document = IndexedDataset(run / match[2]), int(match[3]), int(match[4])
        first, stop = dataset.document_bounds[document : document + 2]
        assert first <= sequence < stop
        assert dataset[sequence][int(match[1])] == samples[7][token]


def trace_tokens(run: Path, step: int, row: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Output for each single token of a row, without "token N"."""
    origins = []
    for token in range(read_run(run / "run.yaml").train.sequence_length + 1):
        trace_sample(run / "run.yaml", step, row, token=token)
        _, line = capsys.readouterr().out.splitlines()
        assert line.startswith(f"token {token} ")
        origins.append(line.removeprefix(f"token {token} "))
    return origins


def trace_row(
    run: Path, step: int, row: int, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], str]:
    """Output for a whole row, expanded to single tokens, and the line about left out tokens."""
    trace_sample(run / "run.yaml", step, row)
    origins: list[str] = []
    _, *lines = capsys.readouterr().out.splitlines()
    left_out = lines.pop() if lines[-1].endswith("left out") else ""
    for line in lines:
        match = re.fullmatch(r"tokens? (\d+)(?: to (\d+))? (?:is|are|comes?) (.*)", line)
        assert match
        first, last = int(match[1]), int(match[2] or match[1])
        assert first == len(origins)  # no token is missing
        source = re.fullmatch(r"from tokens? (\d+)(?: to (\d+))? (of .*)", match[3])
        if not source:
            origins += [f"is {match[3]}"] * (last - first + 1)
            continue
        begin, end = int(source[1]), int(source[2] or source[1])
        for place in range(last - first + 1):
            # Text that is encoded again may give several tokens for one.
            origins.append(f"comes from token {min(begin + place, end)} {source[3]}")
    return origins, left_out


def test_a_row_lists_the_same_as_its_tokens(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in range(6):
        assert trace_row(run, 3, row, capsys) == (trace_tokens(run, 3, row, capsys), "")


@pytest.fixture(scope="module")
def rearranged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that rearranges all documents of a dataset with a sources file."""
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


def test_tokens_of_rearranged_rows(rearranged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(rearranged / "tokenizer/tokenizer.json"))
    samples = training_samples(read_run(rearranged / "run.yaml"))
    dataset = IndexedDataset(rearranged / "two")
    source = (
        r"comes from token (\d+) of two sequence (\d+), document \2: "
        rf"{rearranged}/two\.jsonl: line (\d+)"
    )
    marks = set()
    for row in range(2):
        origins = trace_tokens(rearranged, 2, row, capsys)
        for token, line in zip(samples[6 + row].tolist(), origins, strict=True):
            text = tokenizer.decode([token], skip_special_tokens=False)
            if text in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"):
                assert line == f"is {text}, inserted by train.fim"
                marks.add(text)
                continue
            match = re.fullmatch(source, line)
            assert match
            assert int(match[3]) == int(match[2]) + 1
            sequence = dataset[int(match[2])].tolist()
            before, plain, after = (
                tokenizer.decode(part, skip_special_tokens=False)
                for part in np.split(sequence, [int(match[1]), int(match[1]) + 1])
            )
            whole = before + plain + after
            assert any(whole[len(before) + place :].startswith(text) for place in range(len(plain)))
        assert len(set(origins)) > 40
        runs, left_out = trace_row(rearranged, 2, row, capsys)
        assert re.fullmatch(r"\d+ tokens? more did not fit and (is|are) left out", left_out)
        assert [line.partition(" of ")[2] for line in runs] == [
            line.partition(" of ")[2] for line in origins
        ]
    assert len(marks) == 3


def test_padding_and_marks_have_no_source(
    rearranged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {5: "<fim_prefix>"}
    tokens, origins = np.full(61, PAD), np.full(61, NOWHERE)
    tokens[:3], origins[1:3] = [5, 6, 7], [0, 1]
    traced = TracedSample(tokens, origins, marks, 0)
    monkeypatch.setattr(FimSamples, "trace", lambda *_: traced)
    trace_sample(rearranged / "run.yaml", 1, 0)
    _, mark, source, padding = capsys.readouterr().out.splitlines()
    assert mark == "token 0 is <fim_prefix>, inserted by train.fim"
    assert source.startswith("tokens 1 to 2 come from tokens ")
    assert padding == "tokens 3 to 60 are padding"
    trace_sample(rearranged / "run.yaml", 1, 0, token=60)
    assert capsys.readouterr().out.splitlines()[1] == "token 60 is padding"


@pytest.mark.parametrize(
    ("step", "row", "token", "message"),
    [
        (0, 0, None, "step 0: does not exist; give 1 to 8"),
        (9, 0, None, "step 9: does not exist; give 1 to 8"),
        (1, 6, None, "row 6: does not exist; give 0 to 5"),
        (1, 0, 17, "token 17: does not exist; give 0 to 16"),
    ],
)
def test_trace_sample_refuses_numbers_out_of_range(
    run: Path, step: int, row: int, token: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        trace_sample(run / "run.yaml", step, row, token=token)


def test_trace_steps_refuses_unknown_datasets_and_documents(run: Path) -> None:
    with pytest.raises(UserError, match="no dataset three; choose one of one, two"):
        trace_steps(run / "run.yaml", "three", 0)
    with pytest.raises(UserError, match="two: no document 90; give 0 to 89"):
        trace_steps(run / "run.yaml", "two", 90)


def test_samples_of_encoders_are_not_traced(run: Path) -> None:
    describe_run(run, train={"objective": "masked"})
    try:
        with pytest.raises(UserError, match=r"train\.objective: masked: only samples of models"):
            trace_sample(run, 1, 0)
    finally:
        describe_run(run)
