"""Models of the Hub: what comes before the checks of a workflow, and what is still to come."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.web_server import Server
from tokamake.errors import UserError
from tokamake.remote.download import download
from tokamake.remote.fetch import fetch
from tokamake.remote.hub_models import fetched_path, list_model, pin, unfetched

MODEL = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"pickled",
    "tokenizer.json": b"{}",
}
WEIGHTS = [name for name in MODEL if name.endswith(".safetensors")]
FOLDER = Path("results/raw/hub/models/org/gpt")


@pytest.fixture
def hub(server: Server) -> Server:
    server.repositories["models/org/gpt"] = dict(MODEL)
    return server


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_config_and_tokenizer_come_and_weights_are_listed(hub: Server) -> None:
    folder = pin("hf://org/gpt", tokenizer_only=False)
    assert folder == FOLDER / hub.commit("models/org/gpt")[:12]
    assert names(folder) == {"config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert [file.path for file in unfetched(folder)] == [str(folder / name) for name in WEIGHTS]
    # The network is asked for what is missing only.
    hub.repositories.clear()
    before = len(hub.requests)
    assert pin("hf://org/gpt", tokenizer_only=False) == folder
    assert fetched_path("hf://org/gpt") == folder
    assert len(hub.requests) == before


def test_each_file_of_the_weights_comes_by_its_own_address(hub: Server) -> None:
    folder = pin("hf://org/gpt@main", tokenizer_only=False)
    first, second = unfetched(folder)
    fetch([first.url])
    assert (folder / WEIGHTS[0]).read_bytes() == b"one"
    assert unfetched(folder) == [second]
    fetch(["hf://org/gpt"])
    assert unfetched(folder) == []


def test_a_branch_stays_at_the_commit_that_was_pinned(hub: Server) -> None:
    folder = pin("hf://org/gpt", tokenizer_only=False)
    hub.repositories["models/org/gpt"]["config.json"] = b'{"new": 1}'
    assert pin("hf://org/gpt", tokenizer_only=False) == folder
    other = pin(f"hf://org/gpt@{hub.commit('models/org/gpt')}", tokenizer_only=False)
    assert other != folder
    assert (other / "config.json").read_bytes() == b'{"new": 1}'


def test_a_tokenizer_comes_alone_and_its_model_later(hub: Server) -> None:
    folder = pin("hf://org/gpt", tokenizer_only=True)
    assert names(folder) == {"tokenizer.json"}
    assert unfetched(folder) == []
    assert pin("hf://org/gpt/tokenizer.json", tokenizer_only=True) == folder / "tokenizer.json"
    assert pin("hf://org/gpt", tokenizer_only=False) == folder
    assert "config.json" in names(folder)
    assert len(unfetched(folder)) == 2


def test_a_file_of_a_tokenizer_comes_by_its_address(hub: Server) -> None:
    path = pin("hf://org/gpt/tokenizer.json", tokenizer_only=True)
    assert path.read_bytes() == b"{}"
    assert names(path.parent) == {"tokenizer.json"}


def test_a_model_may_be_a_folder_of_a_repository(hub: Server) -> None:
    hub.repositories["models/org/gpt"] = {f"step-7/{name}": MODEL[name] for name in MODEL}
    folder = pin("hf://org/gpt/step-7", tokenizer_only=False)
    assert folder.name == "step-7"
    assert names(folder) == {"config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert len(unfetched(folder)) == 2


def test_files_of_a_pattern_are_listed_as_they_are(hub: Server) -> None:
    listed = list_model("hf://org/gpt/*.bin", tokenizer_only=False)
    assert [Path(file.path).name for file in listed] == ["pytorch_model.bin"]


def test_an_emptied_cache_is_filled_again_at_the_same_commit(hub: Server, tmp_path: Path) -> None:
    folder = pin("hf://org/gpt", tokenizer_only=False)
    for file in unfetched(folder):
        download(file)
    shutil.rmtree(tmp_path / "cache")
    assert len(unfetched(folder)) == 2
    with pytest.raises(UserError, match="hf://org/gpt: gone from the cache: "):
        fetched_path("hf://org/gpt")
    assert pin("hf://org/gpt", tokenizer_only=False) == folder
    assert (folder / "config.json").is_file()
    assert fetched_path("hf://org/gpt") == folder  # jobs bring the weights


def test_other_paths_have_nothing_to_come(tmp_path: Path) -> None:
    model = tmp_path / "a/b/c/model"
    model.mkdir(parents=True)
    (tmp_path / "a.json").write_text(json.dumps({"files": 3}))
    assert unfetched(model) == unfetched(Path("a")) == []


def test_a_torn_list_is_named(hub: Server) -> None:
    folder = pin("hf://org/gpt", tokenizer_only=False)
    folder.with_suffix(".json").write_text("{")
    with pytest.raises(UserError, match=r"[0-9a-f]{12}\.json: not valid JSON .*; remove it, and"):
        pin("hf://org/gpt", tokenizer_only=False)


def test_mistakes_are_one_line(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="hf://org/none: no such repository, or a private one"):
        pin("hf://org/none", tokenizer_only=True)
    hub.repositories["models/org/gpt"] = {"README.md": b""}
    with pytest.raises(UserError, match=r"hf://org/gpt: has no model\*\.safetensors or pytorch"):
        pin("hf://org/gpt", tokenizer_only=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing can list its files"):
        pin("hf://org/gpt", tokenizer_only=True)
