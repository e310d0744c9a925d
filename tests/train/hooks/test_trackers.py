"""Trackers get the records of metrics.jsonl, all jobs in one run, and never end training."""

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.support.runs import losses, make_run, records, train_here
from tokamake import plugins
from tokamake.config.resolved_run import read_run
from tokamake.config.train_sections import TRACKERS, TrackerSettings
from tokamake.config.training import TrainSettings
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.errors import UserError
from tokamake.preflight import packages
from tokamake.train.hooks import samples, trackers
from tokamake.train.metrics import TextSample
from tokamake.train.trackers._base import FollowedRun

pytestmark = pytest.mark.usefixtures("lone_rank")

NAMES = plugins.names(TRACKERS)
PACKAGES = [package for name in NAMES for package in plugins.constant(TRACKERS, name, "PACKAGES")]
History = dict[int, dict[str, float]]
"""Values of each step."""


_HEADER_BYTES, _BLOCK_BYTES, _PREFIX_BYTES = 7, 1 << 15, 7
_FULL, _FIRST, _LAST = 1, 2, 4
"""Types of pieces: a whole record, its first piece, its last."""


class OfflineRun(NamedTuple):
    """What one job has written."""

    id: str
    project: str
    config: dict[str, Any]
    history: list[dict[str, Any]]
    """Values of each step, with `_step`."""


def read_wandb(path: Path) -> OfflineRun:
    """Read a file that Weights & Biases writes offline: a log of LevelDB with protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    run_id = project = ""
    config: dict[str, Any] = {}
    history = []
    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.HasField("run"):
            run_id, project = record.run.run_id, record.run.project
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif record.HasField("history"):
            history.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return OfflineRun(run_id, project, config, history)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield records; a piece has a checksum, its length and its type before it."""
    position, pieces = _HEADER_BYTES, b""
    while position < len(data):
        room = _BLOCK_BYTES - position % _BLOCK_BYTES
        if room < _PREFIX_BYTES:
            position += room
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        start = position + _PREFIX_BYTES
        position = start + length
        pieces = (b"" if kind in (_FULL, _FIRST) else pieces) + data[start:position]
        if kind in (_FULL, _LAST):
            yield pieces


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages count as installed."""
    monkeypatch.setattr(packages, "find_spec", lambda name: name)


@pytest.fixture(scope="module")
def followed(root: Path) -> Path:
    """Output folder of a run of two jobs that all trackers followed."""
    train_tokenizer(kind="ids", vocab_size=120, eod=0, output=root / "ids")
    config = make_run(
        root,
        "followed",
        trackers={"names": NAMES, "project": "demo"},
        tokenizer=root / "ids",
        sample_interval=3,
    )
    # A busy machine takes long to make the database of mlflow.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trackers, "CLOSE_SECONDS", 600.0)
        assert train_here(config, until_step=3) == 0
        assert train_here(config) == 0
    return read_run(config).output


def history_of_wandb(folder: Path) -> History:
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    jobs = [read_wandb(file) for file in files]
    assert len(jobs) == 2
    (run_id,) = {job.id for job in jobs}
    assert all(job.project == "demo" for job in jobs)
    assert all(file.stem == f"run-{run_id}" for file in files)
    assert jobs[0].config["train.optimizer.learning_rate"] == 0.01
    history: History = {}
    for job in jobs:
        for values in job.history:
            step = int(values["_step"])
            assert step not in history
            history[step] = {
                name: v for name, v in values.items() if name[0] != "_" and "texts" not in name
            }
    return history


def history_of_mlflow(folder: Path) -> History:
    history: History = {}
    with sqlite3.connect(folder / "mlflow.db") as database:
        assert [*database.execute("select name, status from runs")] == [("followed", "FINISHED")]
        assert ("demo",) in [*database.execute("select name from experiments")]
        parameters = dict(database.execute("select key, value from params"))
        rows = [*database.execute("select step, key, value from metrics")]
    assert parameters["train.optimizer.learning_rate"] == "0.01"
    for step, name, value in rows:
        assert name not in history.setdefault(step, {})
        history[step][name] = value
    return history


def history_of_trackio(folder: Path) -> History:
    history: History = {}
    with sqlite3.connect(folder / "demo.db") as database:
        rows = [*database.execute("select run_name, step, metrics from metrics")]
        (config,) = database.execute("select config from configs")
    assert json.loads(config[0])["train.optimizer.learning_rate"] == 0.01
    assert len({name for name, *_ in rows}) == 1
    for _, step, metrics in rows:
        values = {name: v for name, v in json.loads(metrics).items() if name != "texts"}
        assert history.setdefault(step, {}).keys().isdisjoint(values)
        history[step] |= values
    return history


@pytest.mark.extra("trackers", *PACKAGES)
@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_has_the_records_of_all_jobs_in_one_run(followed: Path, name: str) -> None:
    expected: History = {}
    for line in (followed / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        expected.setdefault(values.pop("step"), {}).update(values)
    assert sorted(expected) == [*range(7)]
    history = globals()[f"history_of_{name}"](followed / "trackers" / name)
    assert history.keys() == expected.keys()
    for step, values in history.items():
        assert values == pytest.approx(expected[step], rel=1e-12)


@pytest.mark.extra("trackers", *PACKAGES)
def test_trackers_have_the_texts_of_all_jobs(followed: Path) -> None:
    lines = (followed / samples.FILE).read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines if json.loads(line)["step"] == 6]
    assert texts
    folder = followed / "trackers"
    tables = {
        "wandb": sorted(folder.glob("wandb/**/media/table/*.table.json"))[-1].read_text(),
        "mlflow": next(folder.glob("mlflow/artifacts/*/artifacts/texts/step-6.json")).read_text(),
    }
    with sqlite3.connect(folder / "trackio/demo.db") as database:
        rows = database.execute("select metrics from metrics where step = 6").fetchall()
    tables["trackio"] = next(text for text in map(str, *zip(*rows, strict=True)) if "texts" in text)
    for table in tables.values():
        assert all(json.dumps(text)[1:-1] in table for text in texts)


class Slow:
    """A tracker that waits until it may go on."""

    id = "slow"
    may_go_on = threading.Event()

    def __init__(self, run: FollowedRun) -> None:
        del run

    def add(self, record: Any) -> None:
        del record
        self.may_go_on.wait()

    def add_texts(self, step: int, texts: Sequence[TextSample]) -> None:
        del step, texts

    def close(self) -> None:
        """Nothing is left."""


class Broken(Slow):
    """A tracker that fails."""

    def add(self, record: Any) -> None:
        raise ConnectionError(f"no route\nfor step {record['step']}")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("tracker", "said"),
    [
        (Slow, "did not finish in 0 s; its last records may be lost"),
        (Broken, "no route for step 0; training goes on without it"),
    ],
)
def test_a_tracker_that_hangs_or_fails_does_not_end_training(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tracker: type[Slow],
    said: str,
) -> None:
    load = plugins.load
    plug_in = SimpleNamespace(Tracker=tracker)
    monkeypatch.setattr(plugins, "load", lambda k, n: plug_in if k == TRACKERS else load(k, n))
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    config = make_run(root, tracker.__name__, trackers={"names": ["wandb"]}, train_steps=3)
    assert train_here(config) == 0
    Slow.may_go_on.set()
    assert len(losses(config)) == 3
    assert f"train.trackers: wandb: {said}\n" in capsys.readouterr().out


class Kept(Slow):
    """A tracker that keeps the records."""

    records: list[dict[str, Any]]
    texts: list[tuple[int, list[TextSample]]]

    def __init__(self, run: FollowedRun) -> None:
        self.id = run.id or "first"
        Kept.records, Kept.texts = [], []

    def add(self, record: Any) -> None:
        Kept.records.append(record)

    def add_texts(self, step: int, texts: Sequence[TextSample]) -> None:
        Kept.texts.append((step, [*texts]))


def test_steps_that_a_job_repeats_are_not_sent_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(make_run(root, "repeated", trackers={"names": ["wandb"]}))
    monkeypatch.setattr(plugins, "load", lambda *_: SimpleNamespace(Tracker=Kept))
    run.output.mkdir()

    def sent(*records: dict[str, float]) -> list[dict[str, float]]:
        follower = trackers.Tracking(run)
        for record in records:
            follower.recorded(record)  # type: ignore[arg-type]
        follower.close()
        return Kept.records

    first = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    assert sent(*first) == first
    validated = {"step": 2, "validation_loss": 2.5}
    assert sent(*first, validated, {"step": 3, "loss": 1.0}) == [
        validated,
        {"step": 3, "loss": 1.0},
    ]
    assert sent(*first, validated) == []
    states = json.loads((run.output / trackers.FILE).read_text())
    assert states == {"wandb": {"id": "first", "step": 3, "names": ["loss"]}}
    (run.output / trackers.FILE).write_text("{")  # damaged: a new run of the tracker
    assert sent(*first) == first


def test_texts_that_a_job_repeats_are_not_sent_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(make_run(root, "written", trackers={"names": ["wandb"]}))
    monkeypatch.setattr(plugins, "load", lambda *_: SimpleNamespace(Tracker=Kept))
    run.output.mkdir()
    texts = [TextSample("code", "def", " f()")]
    for sent in ([(2, texts)], []):
        follower = trackers.Tracking(run)
        follower.recorded({"step": 2, "loss": 2.0})
        follower.wrote(2, texts)
        follower.close()
        assert Kept.texts == sent


def test_a_missing_package_is_named_before_training(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "wandb" else name)
    config = make_run(root, "missing", trackers={"names": ["mlflow", "wandb"]})
    with pytest.raises(UserError, match=r"train\.trackers\.names: wandb: needs wandb, which"):
        train_here(config)
    assert not records(config)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="a name occurs twice; keep one"):
        TrackerSettings(names=("wandb", "wandb"))
    with pytest.raises(ValueError, match="unknown name; choose one of mlflow, trackio, wandb"):
        TrainSettings.model_validate({"trackers": {"names": ["comet"]}})
