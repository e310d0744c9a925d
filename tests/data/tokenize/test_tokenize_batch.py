"""Complete shards are kept; a wrong fast encoder is replaced; no raw file is overwritten."""

import fcntl
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.megatron_datasets import assert_same_dataset
from tests.support.tokenized import tokenized
from tokamake.config.data import PlanSettings
from tokamake.data import readers
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.document_rows import ORDINAL, RowsWriter
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import read_plan, write_plan
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.readers import open_input
from tokamake.data.tokenize import shard_tokenizer
from tokamake.data.tokenize.encoder import Encoder, Mismatch
from tokamake.data.tokenize.tokenize_batch import tokenize_batch
from tokamake.errors import UserError


@pytest.fixture
def planned(workspace: Path) -> Path:
    """A plan with one batch of three shards, one file each; the second file has a bad line."""
    (workspace / "some").mkdir()
    for number in range(3):
        lines = ['{"text": "a b c"}'] * 9 + ["bad"] * (number == 1)
        (workspace / f"some/{number}.jsonl").write_text("\n".join(lines))
    make_new_plan(workspace)
    return workspace


def make_new_plan(workspace: Path, *, shard_bytes: int = 180) -> None:
    corpus = Corpus(corpus="some", files=f"{workspace}/some/*.jsonl", weight=1)
    settings = PlanSettings(shard_bytes=shard_bytes, max_jobs=1)
    write_plan(workspace / "plan.json", make_plan([corpus], settings, declared={}))


def written_shards(workspace: Path, capsys: pytest.CaptureFixture[str], **options: object) -> str:
    """Tokenize the batch; return the numbers of the shards that it wrote."""
    capsys.readouterr()
    tokenize_batch(
        output=workspace / "shards",
        tokenizer=workspace / "tokenizer",
        plan=workspace / "plan.json",
        batch="some-00000",
        summary=workspace / "summary.json",
        **{"on_bad_document": "quarantine", "max_bad_fraction": 1, **options},  # type: ignore[arg-type]
    )
    lines = capsys.readouterr().out.splitlines()
    shard_lines = [line for line in lines if line.startswith(f"{workspace}/shards/some/0000")]
    assert len(shard_lines) == 3
    return "".join(
        line.partition(":")[0][-1] for line in shard_lines if "already complete" not in line
    )


def test_only_incomplete_or_outdated_shards_are_written(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written_shards(planned, capsys) == "012"
    assert written_shards(planned, capsys, workers=3) == ""
    os.utime(planned / "some/2.jsonl", ns=(1, 1))
    make_new_plan(planned)
    assert written_shards(planned, capsys) == "2"
    (planned / "shards/some/00000.idx").unlink()
    assert written_shards(planned, capsys) == "0"
    assert written_shards(planned, capsys, append_eod=False) == "012"


def test_the_policy_for_bad_documents_keeps_shards_that_it_allows(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written_shards(planned, capsys) == "012"
    assert written_shards(planned, capsys, max_bad_fraction=0.1) == ""
    with pytest.raises(
        UserError, match="1 of 10 documents of the file are bad, more than max_bad_fraction"
    ):
        written_shards(planned, capsys, max_bad_fraction=0.09)
    with pytest.raises(UserError, match=r"some/1\.jsonl:10: not valid JSON"):
        written_shards(planned, capsys, on_bad_document="stop")
    assert written_shards(planned, capsys) == ""


def test_more_time_for_filters_writes_shards_again_that_lacked_it(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": text}) for text in ("a b", "a" * 60 + "!")]
    (planned / "some/1.jsonl").write_text("\n".join(lines))
    make_new_plan(planned)
    endless = "regex: {drop: '^(a+)+$'}"
    for seconds, written in ((0.1, "012"), (0.1, ""), (0.05, ""), (0.2, "1")):
        options = {"filters": endless, "filter_seconds": seconds}
        assert written_shards(planned, capsys, **options) == written


def test_a_shard_with_other_duplicates_is_written_again(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def left_out(*ordinals: int) -> Path:
        with RowsWriter(planned / "duplicates") as writer:
            for number in range(3):
                rows = ordinals if number == 1 else ()
                writer.add(f"some/{number:05d}", np.array(rows, ORDINAL))
        return planned / "duplicates"

    assert written_shards(planned, capsys, duplicates=(left_out(1, 2),)) == "012"
    assert written_shards(planned, capsys, duplicates=(left_out(1, 2),)) == ""
    assert written_shards(planned, capsys, duplicates=(left_out(1, 3),)) == "1"


def test_a_wrong_fast_encoder_is_replaced(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class WrongEncoder(Encoder):
        def __call__(self, texts, place):  # type: ignore[no-untyped-def]
            if self.fast:
                raise Mismatch("tokamake differs")
            return super().__call__(texts, place)

        def __init__(self, *arguments, fast=True, **options):  # type: ignore[no-untyped-def]
            super().__init__(*arguments, fast=fast, **options)
            self.fast = fast

    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenized(workspace, raw, name="expected")
    monkeypatch.setattr(shard_tokenizer, "Encoder", WrongEncoder)
    tokenized(workspace, raw)
    assert_same_dataset(workspace / "pair", workspace / "expected")
    assert "tokamake differs" in capsys.readouterr().err
    assert read_manifest(workspace / "pair")["encoder_fallback"] == "tokamake differs"
    assert "encoder_fallback" not in read_manifest(workspace / "expected")


@pytest.mark.fault("damaged data")
@pytest.mark.parametrize("shard_bytes", [100, 180, 10_000], ids=["range", "file", "files"])
def test_a_raw_file_that_changed_since_it_was_planned_is_an_error(
    planned: Path, capsys: pytest.CaptureFixture[str], shard_bytes: int
) -> None:
    make_new_plan(planned, shard_bytes=shard_bytes)
    raw = planned / "some/1.jsonl"
    lines = raw.read_bytes().split(b"\n")
    raw.write_bytes(b"\n".join(lines[::-1]))  # of the same size
    with pytest.raises(UserError, match=r"some/1\.jsonl: changed since it was planned") as raised:
        written_shards(planned, capsys)
    assert "some/0.jsonl" not in str(raised.value)
    assert not (planned / "summary.json").exists()
    for shard in read_plan(planned / "plan.json").shards:
        is_written = (planned / f"shards/{shard.name}.bin").exists()
        assert is_written == (str(raw) not in shard.files)


@pytest.mark.fault("damaged data")
@pytest.mark.parametrize("byte_range", ["", "0:200"])
@pytest.mark.parametrize("time", ["new time", "old time"])
def test_a_raw_file_that_changes_while_it_is_read_is_an_error(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, byte_range: str, time: str
) -> None:
    raw = workspace / "changing.jsonl"
    raw.write_text('{"text": "a b c"}\n' * 20)

    def change_after_opening(*arguments, **options):  # type: ignore[no-untyped-def]
        source = open_input(*arguments, **options)
        modified = raw.stat().st_mtime_ns
        raw.write_text('{"text": "c b a"}\n' * 20)
        if time == "old time":  # as `rsync --inplace -t` gives it back
            os.utime(raw, ns=(modified, modified))
        return source

    monkeypatch.setattr(readers, "open_input", change_after_opening)
    word = "changed" if time == "new time" else "written"
    with pytest.raises(UserError, match=rf"changing\.jsonl: {word} while it was read"):
        tokenized(workspace, raw, byte_range=byte_range)
    assert not list(workspace.glob("pair*"))


def test_a_file_that_was_declared_in_the_plan_is_read(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = workspace / "some/0.jsonl"
    corpus = Corpus(corpus="some", files=str(raw), weight=1)
    plan = make_plan([corpus], PlanSettings(), declared={str(raw): 18})
    write_plan(workspace / "plan.json", plan)
    raw.parent.mkdir()
    raw.write_text('{"text": "a b c"}\n')
    options = {"plan": workspace / "plan.json", "batch": "some-00000"}
    tokenize_batch(
        output=workspace / "shards",
        tokenizer=workspace / "tokenizer",
        summary=workspace / "summary.json",
        **options,  # type: ignore[arg-type]
    )
    assert "1 document, " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pair.json", "pair.bin", "pair.quarantine.jsonl"])
def test_raw_files_are_not_overwritten(workspace: Path, name: str) -> None:
    raw = workspace / name
    raw.write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match="is both input and output; name another --output"):
        tokenized(workspace, raw)
    assert raw.read_text() == '{"text": "one"}\n'


def test_a_process_waits_for_another_one_with_the_same_batch(
    planned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[str] = []

    def wait(*_: object) -> None:
        monkeypatch.undo()
        others.append(written_shards(planned, capsys))  # the other process has the lock

    monkeypatch.setattr(fcntl, "flock", wait)
    assert written_shards(planned, capsys) == ""
    assert others == ["012"]
