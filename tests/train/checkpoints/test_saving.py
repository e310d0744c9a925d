"""The order in which a checkpoint is saved: room, files, commit, old checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.errors import TemporaryError, UserError
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints import saving
from tokamake.train.checkpoints.saving import CheckpointSaver

pytestmark = pytest.mark.usefixtures("lone_rank")
STATE = ResumeState("digest", step=3, consumed_samples=24, seconds=1.0, world_size=1)


class Recorder:
    """Stands for the engine, the deadline and the retention; notes what is called."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.measured, self.done = calls, "measured", False
        self.errors: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.values()))
            if error := self.errors.get(name):
                raise error
            return {"save": self, "checkpoint_bytes": 100.0}.get(name)

        return call


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def recorder(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(calls)
    monkeypatch.setattr(saving, "Retention", lambda *_, **__: recorder)
    monkeypatch.setattr(saving, "commit", recorder.commit)
    monkeypatch.setattr(saving, "write_durations", recorder.write_durations)
    return recorder


def saver(recorder: Any, *, rank: int = 0, resumed: Path | None = None) -> CheckpointSaver:
    run = SimpleNamespace(
        output=Path("out"), start="start", train=SimpleNamespace(sequence_length=16)
    )
    sampler: Any = SimpleNamespace(
        run=run, notes={"labels": []}, validation_losses=list, recorder=lambda: recorder.write_run
    )
    start: Any = SimpleNamespace(resumed=resumed, state=STATE)
    return CheckpointSaver(
        sampler,
        Ranks(rank, 1, 0, 1),
        engine=recorder,
        deadline=recorder,
        start=start,
        hooks=[recorder],
    )


def test_a_checkpoint_is_committed_after_its_files_are_written(
    recorder: Recorder, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = saver(recorder)
    assert checkpoints.latest == "start (the start)"
    checkpoints.begin(STATE)
    folder = Path("out") / saving.SAVING / "global_step3"
    progress = {"iteration": 3, "consumed_samples": 24, "consumed_tokens": 384}
    assert calls == [
        ("checkpoint_bytes",),
        ("make_room", 3, 100.0),
        ("begin_saving",),
        ("save", folder, {**progress, "run_digest": "digest", "labels": []}),
    ]
    assert (checkpoints.written, checkpoints.latest) == (False, "start (the start)")
    recorder.done = True
    assert checkpoints.written
    calls.clear()
    checkpoints.finish()
    assert [name for name, *_ in calls] == [
        *("wait", "write_run", "commit", "end_saving", "write_durations", "note_commit", "saved")
    ]
    assert calls[1] == ("write_run", folder)
    assert (calls[2], *calls[-2:]) == (
        ("commit", Path("out"), STATE),
        ("note_commit", 3),
        ("saved", STATE),
    )
    assert checkpoints.latest == "out/global_step3"
    assert capsys.readouterr().out == "saved out/global_step3\n"


def test_without_a_checkpoint_there_is_nothing_to_finish(
    recorder: Recorder, calls: list[Any]
) -> None:
    checkpoints = saver(recorder, resumed=Path("out/global_step2"))
    assert (checkpoints.latest, checkpoints.written) == ("out/global_step2", False)
    checkpoints.finish()
    assert calls == []
    checkpoints.close()
    assert calls == [("close",)]


def test_a_checkpoint_is_finished_once(recorder: Recorder, calls: list[Any]) -> None:
    checkpoints = saver(recorder)
    checkpoints.begin(STATE)
    checkpoints.finish()
    calls.clear()
    checkpoints.finish()
    assert calls == []


def test_a_checkpoint_without_room_is_not_begun(recorder: Recorder, calls: list[Any]) -> None:
    checkpoints = saver(recorder)
    recorder.errors["make_room"] = TemporaryError("no room")
    with pytest.raises(TemporaryError, match="no room"):
        checkpoints.begin(STATE)
    assert "save" not in [name for name, *_ in calls]


def test_a_checkpoint_that_is_not_written_is_not_committed(
    recorder: Recorder, calls: list[Any]
) -> None:
    checkpoints = saver(recorder)
    checkpoints.begin(STATE)
    recorder.errors["wait"] = UserError("disk")
    with pytest.raises(UserError, match="disk"):
        checkpoints.finish()
    assert "commit" not in [name for name, *_ in calls]
    assert (checkpoints.latest, checkpoints.written) == ("start (the start)", False)


def test_other_ranks_write_their_files_only(recorder: Recorder, calls: list[Any]) -> None:
    checkpoints = saver(recorder, rank=1)
    checkpoints.begin(STATE)
    checkpoints.finish()
    checkpoints.close()
    assert [name for name, *_ in calls] == ["begin_saving", "save", "wait", "saved"]
    assert checkpoints.latest == "out/global_step3"
