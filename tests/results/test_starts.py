"""Starts of trainings, from files that TensorBoard's writer makes."""

import json
from pathlib import Path

import pytest

from tokamake.results import costs, starts
from tokamake.results.starts import _events, stopped_seconds

pytest.importorskip("tensorboard", reason="no tensorboard; pip install 'tokamake[train]'")

FIRST = 1_700_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "big/training/tensorboard").mkdir(parents=True)
    (tmp_path / "big/run.yaml").touch()
    return tmp_path


def write(folder: Path, seconds: int, *, done: int, steps: range) -> Path:
    """A job's file: it continues after `done` steps and logs `steps`."""
    from torch.utils.tensorboard import SummaryWriter

    place = folder / "big/training/tensorboard"
    before = {*place.iterdir()}
    with SummaryWriter(str(place), purge_step=done + 1 if done else None) as writer:
        for step in steps:
            writer.add_scalar("loss", 1.0, step, walltime=FIRST + seconds + 40)
    (made,) = {*place.iterdir()} - before
    return made.rename(made.with_name(f"events.out.tfevents.{FIRST + seconds}.node.1.0"))


def test_kills_and_planned_segments_are_told_apart(folder: Path) -> None:
    write(folder, 0, done=0, steps=range(1, 41))
    (folder / "big/train.40.json").write_text(json.dumps({}))
    write(folder, 100, done=40, steps=range(41, 68))  # killed at 67, its checkpoint is of 60
    write(folder, 200, done=60, steps=range(61, 81))
    assert [round(each) for each in stopped_seconds(folder / "big")] == [40, 40]  # one still trains
    (folder / "big/train.json").touch()
    assert [round(each) for each in stopped_seconds(folder / "big")] == [40]
    cost = costs(folder)
    assert cost[["run", "stage", "job"]].to_numpy().tolist() == [["big", "train", "big/unfinished"]]
    assert cost["node_hours"][0] == pytest.approx(40 / 3600)
    found = starts(folder)
    assert found[["run", "step", "lost_steps", "is_planned"]].to_numpy().tolist() == [
        ["big", 40, 0, True],
        ["big", 60, 7, False],
    ]
    assert [int(time.timestamp()) for time in found["time"]] == [FIRST + 100, FIRST + 200]


def test_a_start_from_the_beginning_is_the_first_one(folder: Path) -> None:
    write(folder, 0, done=0, steps=range(1, 5))
    write(folder, 100, done=0, steps=range(10, 90, 10))
    assert len(starts(folder)) == 0
    assert [round(each) for each in stopped_seconds(folder / "big")] == [40, 40]


def test_steps_are_the_ones_that_tensorboard_reads(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    path = write(folder, 0, done=300, steps=range(301, 90_000, 9_999))
    loaded = [*EventFileLoader(str(path)).Load()]
    expected = [(event.step, event.wall_time, event.HasField("session_log")) for event in loaded]
    assert [*_events(path)] == expected
    assert expected[-1][0] > 2**16
    path.write_bytes(path.read_bytes()[:-5])  # the last event is being written
    assert [*_events(path)] == expected[:-1]
