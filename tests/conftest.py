"""Fixtures that several test files share: a little real text and a tokenizer trained on it."""

import gc
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import faults, neighbors
from tests.support.fork_server import shared_folder
from tests.support.megatron_datasets import MERGE_INPUTS, write_megatron_dataset
from tests.support.programs import HIDDEN, worker_python
from tests.support.sentence_data import SentenceData, at, make_sentences
from tests.support.shared_folders import made_once
from tests.support.tokenized import tokenized
from tests.support.web_server import Server, serving
from tokamake.data.corpus.sample_corpus import sample_corpus
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.indexed.merge import merge
from tokamake.runtime.process_group import process_group
from tokamake.runtime.ranks import Ranks

# A slow moment of the machine is no failure, and each run tries the same examples;
# `--hypothesis-profile=random` looks for more.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", UNTIMED)
settings.register_profile("fixed", UNTIMED, derandomize=True)
settings.load_profile("fixed")

SAMPLES = {
    "code": {"num_files": 2, "file_bytes": 60_000},
    "docs": {"num_files": 2, "file_bytes": 40_000},
}


def pytest_configure(config: pytest.Config) -> None:
    """Hide accelerators, on which results differ from what tests hold them against; say one thread.

    `pytest -m gpu` shows them to the tests that are of them. Several tests run at a time: threads
    of torch that await each other would cost a fifth of all processor time. Workers of xdist are
    forks of a Python that has collected the tests.
    """
    if config.option.markexpr != "gpu":
        os.environ.update(HIDDEN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Snakemake sets another number in jobs: threads that wait must not keep the cores busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch is already imported
    # torch writes hundreds of lines for each checkpoint, which pytest would format and keep.
    logging.disable(logging.DEBUG)
    # Before workers begin, which use it, too. The cache of who runs the tests stays as it is.
    os.environ["HF_HOME"] = str(shared_folder() / "huggingface")
    if not hasattr(config, "workerinput"):
        config.option.tx = [
            f"popen//python={worker_python(config.args)}" if spec == "popen" else spec
            for spec in config.getoption("tx", [])
        ]


def pytest_collection() -> None:
    """Collect no garbage while tests are collected: all of it is kept."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave out of garbage collection what was imported: to look through it takes long."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Count the fault of a test of the marker `fault`; skip a test whose extra is not installed."""
    for marker in item.iter_markers("extra"):
        name, *packages = marker.args
        # Not imported: trackio reads its folder when it is imported.
        if not all(find_spec(package) for package in packages):
            pytest.skip(f"pip install 'tokamake[{name}]'")
    faults.injected_by_default(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many faults the tests injected, and how many were survived."""
    calls = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call"
    ]
    if lines := faults.table(calls):
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def inject(request: pytest.FixtureRequest) -> faults.Inject:
    """Call it before each fault of a test that injects several."""
    return partial(faults.inject, request.node)


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with raw/<corpus>/*, corpora.tsv and a trained tokenizer; do not write here."""
    return made_once(tmp_path_factory, "sampled", make_samples)


def make_samples(folder: Path) -> None:
    sample_corpus(settings=json.dumps(SAMPLES), output=folder / "raw")
    rows = [
        f"{corpus}\t{folder}/raw/{corpus}/*\ttext\t{weight}"
        for corpus, weight in (("code", 0.7), ("docs", 0.3))
    ]
    (folder / "corpora.tsv").write_text(
        "\n".join(["corpus\tfiles\ttext_key\tweight", *rows]) + "\n"
    )
    raw = sorted((folder / "raw").rglob("*.*"))
    train_tokenizer(raw, vocab_size=400, output=folder / "tokenizer")


@pytest.fixture(scope="session")
def sentences(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> SentenceData:
    """Real text as datasets of sentences, with its tokenizer; do not write here."""
    make = partial(make_sentences, raw=sampled / "raw")
    return at(made_once(tmp_path_factory, "sentences", make))


@pytest.fixture(scope="session")
def retro_data(
    sampled: Path, sentences: SentenceData, tmp_path_factory: pytest.TempPathFactory
) -> neighbors.RetroData:
    """Datasets of documents with vectors of their chunks; do not write here."""
    make = partial(
        neighbors.make_datasets,
        raw=sampled / "raw",
        tokenizer=sampled / "tokenizer",
        wordpiece=sentences.tokenizer,
    )
    return neighbors.at(made_once(tmp_path_factory, "retro", make), sampled / "tokenizer")


@pytest.fixture(scope="module")
def lone_rank() -> Iterator[None]:
    """One process group for all runs of this process: DeepSpeed remembers its first."""
    with process_group(Ranks(0, 1, 0, 1)):
        yield


@pytest.fixture
def snakemake_version() -> None:
    """Name the version of Snakemake in the report of a test that fails."""
    print(f"Snakemake {version('snakemake')}")


@pytest.fixture
def workspace(sampled: Path, tmp_path: Path) -> Path:
    """A copy of `sampled` to write in."""
    return Path(shutil.copytree(sampled, tmp_path / "workspace"))


def documents(*paths: Path) -> list[str]:
    """Texts of plain jsonl files, read with nothing of ours."""
    return [json.loads(line)["text"] for path in paths for line in path.open(encoding="utf-8")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files of quick tests first, then those of ranks, of Slurm, and of whole workflows.

    Files stay together, so that each fixture of a module is built once. Tests on Slurm wait for
    minutes, so other tests must be left to run beside them. Files of many tests come last, because
    workers can share them. Tests that submit jobs to the machine's own PBS run on request only.
    """
    if "pbs" not in config.option.markexpr:
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("pbs")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("pbs")]
    place: dict[Path, tuple[bool, bool, bool]] = {}
    for item in items:
        marks = [name in item.keywords for name in ("slow", "slurm", "ranks")]
        own = (marks[0] and not marks[1], marks[1], marks[2])
        place[item.path] = max(own, place.get(item.path, own))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (place[item.path], tests[item.path], item.path))


@pytest.fixture
def shards(workspace: Path) -> list[Path]:
    """Shards of the code corpus, one a raw file."""
    raw = sorted((workspace / "raw/code").iterdir())
    prefixes = [workspace / f"shards/code-{number}" for number in range(len(raw))]
    for prefix, path in zip(prefixes, raw, strict=True):
        tokenized(workspace, path, name=prefix)
    return prefixes


@pytest.fixture
def ours(workspace: Path, shards: list[Path]) -> list[Path]:
    """Two shards and the dataset that they merge into."""
    merge(shards, output=workspace / "merged/all", corpus="code")
    return [*shards, workspace / "merged/all"]


@pytest.fixture
def others(tmp_path: Path) -> list[Path]:
    """Datasets of another program; their sequences have at most two tokens."""
    return [
        write_megatron_dataset(tmp_path / f"in/p{place}", part, longest=2)
        for place, part in enumerate(MERGE_INPUTS)
    ]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A local server in place of the Hub, an empty cache, and no waiting between attempts."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.chdir(home)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tokamake.remote.https._FIRST_WAIT", 0.0)
    monkeypatch.setattr("tokamake.remote.https._POLL", 0.01)
    with serving() as state:
        monkeypatch.setenv("HF_ENDPOINT", state.url)
        yield state
