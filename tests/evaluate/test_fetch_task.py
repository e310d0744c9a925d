"""Data of tasks behind addresses: downloaded once, then scored like local files."""

import json
from pathlib import Path

import pytest

from tests.support.llamas import write_confident
from tests.support.web_server import Server
from tokamake.errors import UserError
from tokamake.evaluate.evaluate_task import evaluate_task
from tokamake.evaluate.fetch_task import fetch_task

TEXT = b'{"text": "The function returns the value"}\n{"text": "He reads a list"}\n'


@pytest.fixture
def address(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of a file; the current folder and the cache are empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    server.files["/passages.jsonl"] = TEXT
    return f"{server.url}/passages.jsonl"


def test_downloaded_files_are_scored_like_local_ones(
    address: str, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_confident(tmp_path / "model", vocab_size=400, context=32)
    Path("local.jsonl").write_bytes(TEXT)
    fetched = tmp_path / "passages.fetched"
    mixed = json.dumps({"data": [address, "local.jsonl"]})
    fetch_task("text", settings=mixed, output=fetched)
    (path,) = json.loads(fetched.read_text())["files"][address]
    assert Path(path).read_bytes() == TEXT
    assert f"{path}: {len(TEXT)} bytes" in capsys.readouterr().out
    common = {"checkpoint": model, "tokenizer": sampled / "tokenizer"}
    evaluate_task("text", settings=mixed, fetched=fetched, output=tmp_path / "a.json", **common)
    local = json.dumps({"data": [path, "local.jsonl"]})
    evaluate_task("text", settings=local, output=tmp_path / "b.json", **common)
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert first == second
    assert first["scores"]["documents"] == 4
    with pytest.raises(UserError, match=r"data: http.*: not downloaded; run tokamake fetch-task"):
        evaluate_task("text", settings=mixed, **common)
    other = json.dumps({"data": [f"{address}.other"]})
    with pytest.raises(UserError, match=r"passages\.fetched: has no files of http.*other"):
        evaluate_task("text", settings=other, fetched=fetched, **common)


def test_mistakes_are_explained(address: str) -> None:
    with pytest.raises(UserError, match="text: all its data are local files; there is nothing"):
        fetch_task("text", settings=json.dumps({"data": ["local.jsonl"]}))
    with pytest.raises(UserError, match="nowhere"):
        fetch_task("text", settings=json.dumps({"data": [f"{address}/nowhere"]}))
