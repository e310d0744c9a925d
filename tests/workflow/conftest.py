"""Fixtures of the workflow's tests."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.shared_folders import made_once
from tests.support.slurm_cluster import Slurm, slurm
from tests.support.slurm_site import Site, make_shim
from tests.support.workflows import CONFIG, MINE, jobs, make_workspace, snakemake


@pytest.fixture
def workspace_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the current one."""
    monkeypatch.chdir(make_workspace(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which everything has been built once; do not write here."""
    return made_once(tmp_path_factory, "built", build)


@pytest.fixture
def finished(built: Path, tmp_path: Path) -> Path:
    """A copy of the finished workspace, which the test alone writes in."""
    return Path(shutil.copytree(built, tmp_path / "copy", symlinks=True))


def build(folder: Path) -> None:
    before = jobs(snakemake(make_workspace(folder), "-n", *MINE, "all"))
    assert before == {
        "sample_corpus": 1, "train_tokenizer": 1, "tokenize": 6, "merge": 4, "describe": 1,
        "weigh": 1, "index": 1, "resolve": 1, "train": 1,
        "model_card": 1, "export_hf": 1, "evaluate": 1, "generate": 1, "report": 1,
        "all": 1,
    }  # fmt: skip
    assert not (folder / "results").exists()
    result = snakemake(folder, *MINE, "all")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"input: .*results/data/plan\.json", result.stdout + result.stderr)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """A Slurm of three nodes."""
    with slurm() as running:
        yield running


@pytest.fixture
def site(tmp_path: Path, sampled: Path, cluster: Slurm) -> Iterator[Site]:
    """A user's folder on the Slurm."""
    folder = make_workspace(tmp_path)
    row = f"all\t{sampled}/raw/*/*-00.jsonl\ttext\t1\n"
    (folder / "corpora.tsv").write_text(f"corpus\tfiles\ttext_key\tweight\n{row}")
    config = {
        **CONFIG,
        "sample_corpus": {},
        "tokenizer": {"path": str(sampled / "tokenizer")},
        "plan": {"shard_bytes": 1000, "max_jobs": 2},
        "train": {
            **CONFIG["train"],
            "train_steps": 30,
            "segment_steps": 10,
            "evaluation_interval": 10,
            "save_interval": 2,
        },
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    user_file = folder / ".config/tokamake/slurm.yaml"
    user_file.parent.mkdir(parents=True)
    user_file.write_text("account: mine\npartition: all\n")
    workspace = Site(folder, make_shim(folder / "shim"), cluster)
    yield workspace
    for controller in workspace.controllers:
        controller.kill()
        controller.wait()
    if jobs := cluster.jobs():
        cluster.run("scancel", *jobs)
    cluster.await_idle()
