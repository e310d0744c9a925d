"""Whole shards stay; an erring fast encoder is replaced; no raw file is overwritten."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.megatron_datasets import assert_same_pair
from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.document_rows import ORDINAL, RowsWriter
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import write_plan
from tokamake.data.tokenize import batch
from tokamake.data.tokenize.encoder import Encoder, Mismatch
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError


@pytest.fixture
def planned(workspace: Path) -> Path:
    """A plan of one batch, of three shards of a file each; the second file ends with a bad line."""
    (workspace / "some").mkdir()
    for number in range(3):
        lines = ['{"text": "a b c"}'] * 9 + ["bad"] * (number == 1)
        (workspace / f"some/{number}.jsonl").write_text("\n".join(lines))
    corpus = Corpus(corpus="some", files=f"{workspace}/some/*.jsonl", weight=1)
    settings = PlanSettings(shard_bytes=180, max_jobs=1)
    write_plan(workspace / "plan.json", make_plan([corpus], settings, {}))
    return workspace


def made(workspace: Path, capsys: pytest.CaptureFixture[str], **options: object) -> str:
    """Make the batch; returns the numbers of the shards that were not already complete."""
    capsys.readouterr()
    tokenize(
        output=workspace / "shards",
        tokenizer=workspace / "tokenizer",
        plan=workspace / "plan.json",
        batch="some-00000",
        summary=workspace / "summary.json",
        **{"on_bad_document": "quarantine", **options},  # type: ignore[arg-type]
    )
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith(f"{workspace}/shards/some/0000")]
    assert len(told) == 3
    return "".join(line.partition(":")[0][-1] for line in told if "already complete" not in line)


def test_only_shards_that_are_not_whole_are_made(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made(planned, capsys) == "012"
    assert made(planned, capsys, workers=3) == ""
    os.utime(planned / "some/2.jsonl", ns=(1, 1))
    assert made(planned, capsys) == "2"
    (planned / "shards/some/00000.idx").unlink()
    assert made(planned, capsys) == "0"
    assert made(planned, capsys, append_eod=False) == "012"


def test_what_is_done_about_bad_documents_keeps_shards_that_it_allows(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made(planned, capsys) == "012"
    assert made(planned, capsys, max_bad_fraction=0.1) == ""
    with pytest.raises(UserError, match="1 of 10 documents are bad, more than max_bad_fraction"):
        made(planned, capsys, max_bad_fraction=0.09)
    with pytest.raises(UserError, match=r"some/1\.jsonl:10: not valid JSON"):
        made(planned, capsys, on_bad_document="stop")
    assert made(planned, capsys) == ""


def test_other_duplicates_are_other_shards(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def left_out(*ordinals: int) -> Path:
        with RowsWriter(planned / "duplicates") as writer:
            for number in range(3):
                rows = ordinals if number == 1 else ()
                writer.add(f"some/{number:05d}", np.array(rows, ORDINAL))
        return planned / "duplicates"

    assert made(planned, capsys, duplicates=left_out(1, 2)) == "012"
    assert made(planned, capsys, duplicates=left_out(1, 2)) == ""
    assert made(planned, capsys, duplicates=left_out(1, 3)) == "1"


def test_an_erring_fast_encoder_is_replaced(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Erring(Encoder):
        def __call__(self, texts, place):  # type: ignore[no-untyped-def]
            if self.fast:
                raise Mismatch("gigatoken differs")
            return super().__call__(texts, place)

        def __init__(self, *arguments, fast=True, **options):  # type: ignore[no-untyped-def]
            super().__init__(*arguments, fast=fast, **options)
            self.fast = fast

    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenize((str(raw),), output=workspace / "calm", tokenizer=workspace / "tokenizer")
    monkeypatch.setattr(batch, "Encoder", Erring)
    tokenize((str(raw),), output=workspace / "pair", tokenizer=workspace / "tokenizer")
    assert_same_pair(workspace / "pair", workspace / "calm")
    assert "gigatoken differs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["pair.json", "pair.bin", "pair.quarantine.jsonl"])
def test_raw_files_are_not_overwritten(workspace: Path, name: str) -> None:
    raw = workspace / name
    raw.write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match="is both input and output; name another --output"):
        tokenize((str(raw),), output=workspace / "pair", tokenizer=workspace / "tokenizer")
    assert raw.read_text() == '{"text": "one"}\n'
