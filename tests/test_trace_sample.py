"""From a training step to the raw lines it saw, and from a document to the steps that see it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from runs import ARCHITECTURE, SETTINGS, make_index

from tokamake.config import ResolvedTrainSettings, Run, write_run
from tokamake.data.pairs.indexed import IndexedDataset
from tokamake.data.samples.loader import Samples
from tokamake.data.samples.trace_sample import trace_sample
from tokamake.data.samples.trace_steps import trace_steps
from tokamake.data.shards.tokenize import tokenize
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
    train = {**SETTINGS, "train_steps": 8, "global_batch_size": 6, "evaluation_steps": 0}
    settings = Run(
        run="traced",
        seed=3,
        checkpoint=root,
        index=root / "index",
        data_root=root,
        output=root / "training",
        architecture=ARCHITECTURE,
        train=ResolvedTrainSettings(**{**train, "split": "100,0,0"}),
    )
    write_run(root / "run.yaml", settings)
    return root


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
                    rf"tokens \d+ to \d+ two document (\d+): {run}/two.jsonl: line (\d+)", line
                )
                if place:
                    assert int(place[2]) == int(place[1]) + 1
                    seen.setdefault(int(place[1]), set()).add(f"step {step}, row {row}")
                else:
                    assert re.match(r"tokens \d+ to \d+ one document \d+ \(.*no map of", line)
    assert len(seen) > 40
    for document in range(90):
        trace_steps(run / "run.yaml", "two", document)
        head, *lines = capsys.readouterr().out.splitlines()
        assert set(lines) == seen.get(document, set())
        assert head.startswith(f"document {document} of two: {len(lines)} sample")


def test_a_token(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = Samples(run / "index", split="train", data_root=run)
    for token in range(17):
        trace_sample(run / "run.yaml", 2, 1, token=token)
        _, line = capsys.readouterr().out.splitlines()
        found = re.match(rf"token {token} is token (\d+) of (one|two) document (\d+)", line)
        assert found
        pair = IndexedDataset(run / found[2])
        first, stop = pair.document_bounds[int(found[3]) : int(found[3]) + 2]
        matching = [pair[sequence] for sequence in range(first, stop)]
        assert any(
            int(found[1]) < len(tokens) and tokens[int(found[1])] == samples[7][token]
            for tokens in matching
        )


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
