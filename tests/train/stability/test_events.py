"""The journal of bad steps survives restarts, and tells what earlier jobs did."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.runs import prepare
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import ResolvedTrainSettings, Run
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.loader import DocumentSpan
from tokamake.data.samples.steps import StepBatch
from tokamake.runtime.process_group import process_group
from tokamake.runtime.ranks import Ranks
from tokamake.train.bad_steps import BadStep
from tokamake.train.metrics import read
from tokamake.train.stability.events import BadStepHistory, EventLog, documents_of
from tokamake.train.step_result import StepResult

pytestmark = pytest.mark.usefixtures("lone_rank")

ALONE = Ranks(0, 1, 0, 1)
NONE = np.zeros((0, 8), np.int64)
RESULT = StepResult(math.nan, math.inf, stop=False, saved=False, skipped=False)


class NoSpans:
    def spans(self, _: int) -> list[DocumentSpan]:
        return []


def open_log(folder: Path, *, done: int, batch_size: int) -> EventLog:
    """Journal of a run with 8 samples a step until now, and `batch_size` from now on."""
    train: Any = ResolvedTrainSettings.model_construct(
        global_batch_size=batch_size, train_steps=100
    ).counted_from(done, 8 * done)
    run: Any = Run.model_construct(output=folder, data_root=folder, train=train)
    start = ResumeState("digest", done, 8 * done, 0.0, 1)
    return EventLog(run, ALONE, samples=NoSpans(), start=start)


def write(
    folder: Path, actions: dict[int, str], *, done: int, batch_size: int = 8
) -> BadStepHistory:
    """Journal the actions of steps; return the history after them."""
    with process_group(ALONE):
        log = open_log(folder, done=done, batch_size=batch_size)
        for step, action in actions.items():
            bad = BadStep("not_finite", action, "loss: nan")
            log.add(step, RESULT, bad=bad, batch=StepBatch(8 * step - 8, 8, [], NONE), ranks=[0])
        log.close()
        return log.history


def entries(folder: Path) -> list[tuple[int, Any]]:
    return [(event["step"], event["action"]) for event in read(folder / "events.jsonl")]


def test_an_event_is_valid_json_with_values_ranks_and_samples(tmp_path: Path) -> None:
    write(tmp_path, {3: "skip"}, done=0)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(line, parse_constant=refuse) == {
        "step": 3,
        "case": "not_finite",
        "reason": "loss: nan",
        "action": "skip",
        "ranks": [0],
        "loss": "nan",
        "grad_norm": "inf",
        "samples": [16, 23],
        "documents": {},
    }


def test_a_restart_drops_later_events_but_not_rewinds(tmp_path: Path) -> None:
    first = {2: "skip", 5: "lower_rate", 6: "rewind", 7: "stop"}
    write(tmp_path, first, done=0)
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b"\0\0\n" + b'{"step": 9, "act')
    history = write(tmp_path, {}, done=4)
    assert entries(tmp_path) == [(2, "skip"), (6, "rewind")]
    assert history == BadStepHistory(num_acted=2, left_out=(6,))
    assert write(tmp_path, {5: "lower_rate"}, done=4).num_acted == 3
    assert entries(tmp_path) == [(2, "skip"), (6, "rewind"), (5, "lower_rate")]


def test_a_journal_of_damaged_lines_alone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"\0" * 40 + b'{"step": 5, "act\n')
    assert write(tmp_path, {}, done=4) == BadStepHistory()
    assert f"{tmp_path}/events.jsonl: left out 1 damaged line\n" in capsys.readouterr().out


def test_a_new_start_drops_all_events(tmp_path: Path) -> None:
    write(tmp_path, {2: "rewind"}, done=0)
    assert write(tmp_path, {}, done=0) == BadStepHistory()
    assert entries(tmp_path) == []


def test_journaled_and_last_events_use_up_no_budget(tmp_path: Path) -> None:
    assert write(tmp_path, {2: "journal", 3: "stop"}, done=0) == BadStepHistory()


@pytest.mark.parametrize(
    ("batch_size", "steps"), [(4, (7, 8)), (8, (6,)), (16, (5,)), (24, (5,)), (5, (6, 7, 8))]
)
def test_the_samples_of_a_rewind_are_left_out_whichever_steps_have_them(
    tmp_path: Path, batch_size: int, steps: tuple[int, ...]
) -> None:
    write(tmp_path, {6: "rewind"}, done=0)  # samples 40 to 47
    assert write(tmp_path, {}, done=4, batch_size=batch_size).left_out == steps
    assert write(tmp_path, {}, done=6, batch_size=batch_size).left_out == ()


def test_a_rewind_whose_last_sample_comes_next_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {6: "rewind"}, done=0)
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"samples": [40, 48]}) + "\n")
    assert write(tmp_path, {}, done=6).left_out == (7,)


@pytest.mark.parametrize("damage", [{"documents": {"other": [3]}}, {"samples": None}])
def test_a_rewind_before_the_data_changed_leaves_out_nothing(
    tmp_path: Path, damage: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {6: "rewind"}, done=0)
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage) + "\n")
    assert write(tmp_path, {}, done=4) == BadStepHistory(num_acted=1)
    assert "step 6: its samples have other documents now" in capsys.readouterr().out


def test_the_documents_of_samples_have_their_tokens(tmp_path: Path) -> None:
    prepare(tmp_path)
    samples = DocumentSamples(tmp_path / "index", split="train", data_root=tmp_path)
    dataset = IndexedDataset(tmp_path / "corpus")
    for numbers in (range(3), range(16, 24)):
        (documents,) = documents_of(samples, numbers, data_root=tmp_path).values()
        assert documents == sorted({*documents})
        spans = [span for number in numbers for span in samples.spans(number)]
        bounds = dataset.document_bounds
        after = {int(np.searchsorted(bounds, span.sequence, "right")) for span in spans}
        assert documents == sorted(number - 1 for number in after)
        tokens = {int(token) for document in documents for token in dataset[document]}
        assert tokens >= {int(token) for number in numbers for token in samples[number]}
