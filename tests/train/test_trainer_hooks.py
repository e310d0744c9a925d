"""The training loop: hooks see its steps, in order, on every way through a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.runs import make_run, train_here
from tokamake import plugins
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.train.hooks import KIND, FinishedStep, Hook
from tokamake.train.metrics import Validation

pytestmark = pytest.mark.usefixtures("lone_rank")


class Recorder(Hook):
    """Keeps the calls of a loop."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[FinishedStep] = []

    def begin_step(self, step: int) -> None:
        self.calls.append(f"begin {step}")

    def end_step(self, finished: FinishedStep) -> None:
        self.calls.append(f"end {finished.state.step}")
        self.steps.append(finished)

    def validated(self, state: ResumeState, measured: dict[str, Validation]) -> None:
        self.calls.append(f"validated {state.step}: {', '.join(measured)}")

    def saved(self, state: ResumeState) -> None:
        self.calls.append(f"saved {state.step}")

    def sync(self) -> None:
        self.calls.append("sync")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A hook whose file is added to the folder of hooks."""
    hook, names, load = Recorder(), plugins.names, plugins.load
    added = SimpleNamespace(open_hook=lambda _: hook)
    monkeypatch.setattr(
        plugins, "names", lambda kind: [*names(kind), *(["recorder"] if kind == KIND else [])]
    )
    monkeypatch.setattr(
        plugins, "load", lambda kind, name: added if name == "recorder" else load(kind, name)
    )
    return hook


def test_hooks_are_called_around_steps_saves_and_validations(
    root: Path, recorder: Recorder
) -> None:
    config = make_run(root, "hooked", train_steps=3, save_interval=2, evaluation_interval=2)
    assert train_here(config) == 0
    assert recorder.calls == [
        *("validated 0: valid", "begin 1", "end 1", "begin 2", "end 2"),
        # Records are on disk before the checkpoint, which is in place before the validation.
        *("sync", "saved 2", "validated 2: valid", "begin 3", "end 3", "sync", "saved 3"),
        *("validated 3: valid", "sync", "close"),
    ]


def test_a_finished_step_has_its_numbers(root: Path, recorder: Recorder) -> None:
    config = make_run(root, "left-out", train_steps=4, log_interval=2, skip_data=[[2, 2]])
    assert train_here(config) == 0
    assert [step.state.consumed_samples for step in recorder.steps] == [8, 16, 24, 32]
    assert [step.is_logged for step in recorder.steps] == [True, True, False, True]
    rates = [step.learning_rate for step in recorder.steps]
    assert rates[1:] == [step.next_rate for step in recorder.steps[:-1]]
    trained, left_out, *_ = recorder.steps
    assert 0 < trained.reading < trained.seconds
    assert (left_out.reading, left_out.seconds, left_out.result.updated) == (0, 0, False)


def test_hooks_are_closed_after_an_error(
    root: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: FinishedStep) -> None:
        raise KeyError("a hook")

    monkeypatch.setattr(recorder, "end_step", fail)
    with pytest.raises(KeyError):
        train_here(make_run(root, "failing", train_steps=3))
    assert recorder.calls == ["validated 0: valid", "begin 1", "close"]
