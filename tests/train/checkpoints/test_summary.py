"""The environment of a training job is described without secrets."""

import json
import subprocess
from pathlib import Path

import pytest

from tokamake.train.checkpoints.summary import _PACKAGE, _commit, environment


def test_secrets_are_left_out() -> None:
    secrets = ("HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_AUTH")
    variables = dict.fromkeys(secrets, "s3cret") | {
        "LOADEDMODULES": "frameworks/2025:hdf5",
        "https_proxy": "http://me:s3cret@proxy:3128 https://s3cret@other/x@y",
        "PATH": "/usr/bin",
    }
    found = environment(variables)
    assert "s3cret" not in json.dumps(found)
    assert found["variables"]["https_proxy"] == "http://***@proxy:3128 https://***@other/x@y"
    assert found["variables"]["PATH"] == "/usr/bin"
    assert not {*secrets} & {*found["variables"]}
    assert found["modules"] == ["frameworks/2025", "hdf5"]
    assert found["packages"]["torch"]


def test_the_commit_and_its_changes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment({})["commit"] is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    Path("a").write_text("1")
    for arguments in (["init"], ["add", "a"], ["commit", "-m", "a"]):
        git(*arguments)
    commit = git("rev-parse", "HEAD")
    assert (found := environment({}))["commit"] == commit
    assert found["changed_files"] == []
    Path("a").write_text("2")
    assert environment({})["changed_files"] == ["M a"]
    assert environment({})["tokamake"] == _commit(_PACKAGE)  # these tests run in a checkout
    monkeypatch.setattr("tokamake.train.checkpoints.summary._PACKAGE", tmp_path)
    assert environment({})["tokamake"] is None  # it has no __init__.py
    Path("__init__.py").touch()
    assert environment({})["tokamake"] is None  # in no commit
    for arguments in (["add", "__init__.py"], ["commit", "-m", "b"]):
        git(*arguments)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    git("init")
    found = environment({})
    assert (found["commit"], found["changed_files"]) == (None, None)
    monkeypatch.chdir(tmp_path)
    assert found["tokamake"] == {"commit": git("rev-parse", "HEAD"), "changed_files": ["M a"]}
