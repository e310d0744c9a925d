"""Models of the Hub: what comes before the checks of a workflow, and what is still to come."""

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


def move_on(hub: Server) -> str:
    """Change the repository, as its owner does; return its new commit."""
    return hub.move_on("models/org/gpt", {"README.md": b"new"})


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
    for tokenizer_only in (False, True):
        assert pin("hf://org/gpt", tokenizer_only=tokenizer_only) == folder
        assert fetched_path("hf://org/gpt", tokenizer_only=tokenizer_only) == folder
    assert len(hub.requests) == before


def test_each_file_of_the_weights_comes_by_its_own_address(
    hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pin("hf://org/gpt@main", tokenizer_only=False)
    first, second = unfetched(folder)
    move_on(hub)
    before = [request for request in hub.requests if "/api/" in request]
    fetch([first.url])
    assert [request for request in hub.requests if "/api/" in request] == before
    assert (folder / WEIGHTS[0]).read_bytes() == b"one"
    assert unfetched(folder) == [second]
    # Without a network, what the cache has is linked.
    download(second)
    (folder / WEIGHTS[1]).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fetch([second.url])
    assert unfetched(folder) == []


def test_a_branch_stays_at_the_commit_that_was_pinned(hub: Server) -> None:
    """Whatever else of the repository is named later."""
    folder = pin("hf://org/gpt", tokenizer_only=True)
    assert names(folder) == {"tokenizer.json"}
    assert unfetched(folder) == []
    commit = move_on(hub)
    assert pin("hf://org/gpt", tokenizer_only=False) == folder
    assert pin("hf://org/gpt/tokenizer.json", tokenizer_only=True) == folder / "tokenizer.json"
    assert "config.json" in names(folder)
    assert len(unfetched(folder)) == 2
    assert pin(f"hf://org/gpt@{commit}", tokenizer_only=False) == FOLDER / commit[:12]
    # `tokamake fetch` moves it.
    fetch(["hf://org/gpt"])
    assert pin("hf://org/gpt", tokenizer_only=False) == FOLDER / commit[:12]


@pytest.mark.parametrize("first", ["config.json", "step-7", "model-00001-of-00002.safetensors"])
def test_a_part_that_was_named_before_does_not_pass_for_the_model(hub: Server, first: str) -> None:
    hub.repositories["models/org/gpt"] |= {f"step-7/{name}": MODEL[name] for name in MODEL}
    fetch([f"hf://org/gpt/{first}"])
    folder = pin("hf://org/gpt", tokenizer_only=False)
    assert (folder / "tokenizer.json").exists()
    listed = [file.path for file in unfetched(folder)]
    assert listed == [str(folder / name) for name in WEIGHTS if name != first]


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


def test_files_of_a_pattern_or_of_another_format_are_listed_as_they_are(hub: Server) -> None:
    listed = list_model("hf://org/gpt/*.bin", tokenizer_only=False)
    assert [Path(file.path).name for file in listed] == ["pytorch_model.bin"]
    hub.repositories["models/org/gpt"] |= {"native/latest": b"x", "native/deep/0.distcp": b"y"}
    listed = list_model("hf://org/gpt/native", tokenizer_only=False)
    assert {Path(file.path).name for file in listed} == {"latest", "0.distcp"}


def test_weights_of_another_format_come_by_hand(hub: Server, tmp_path: Path) -> None:
    hub.repositories["models/org/gpt"] |= {"native/latest": b"x", "native/deep/0.distcp": b"y"}
    address = "hf://org/gpt/native"
    with pytest.raises(UserError, match=r"native: has no model.*; fetch it before you start: `tok"):
        pin(address, tokenizer_only=False)
    assert not [request for request in hub.downloads() if "distcp" in request]
    fetch([address])
    folder = pin(address, tokenizer_only=False)
    assert names(folder) == {"latest", "deep/0.distcp"}
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match="fetch it before you start"):
        pin(address, tokenizer_only=False)


def test_fetching_a_part_does_not_move_the_branch(hub: Server) -> None:
    folder = pin("hf://org/gpt", tokenizer_only=False)
    move_on(hub)
    fetch(["hf://org/gpt/pytorch_model.bin"])
    assert (folder / "pytorch_model.bin").exists()
    assert pin("hf://org/gpt", tokenizer_only=False) == folder


def test_lost_lists_are_named(hub: Server) -> None:
    """The commit of the branch is known by its first digits alone."""
    folder = pin("hf://org/gpt", tokenizer_only=False)
    for file in folder.parent.glob("*.json"):
        file.unlink()
    with pytest.raises(
        UserError, match=r"the lists of its files .* are missing; run `tokamake fetch"
    ):
        pin("hf://org/gpt", tokenizer_only=False)
    move_on(hub)
    fetch(["hf://org/gpt"])
    assert pin("hf://org/gpt", tokenizer_only=False) != folder


def test_an_emptied_cache_is_filled_again_at_the_same_commit(hub: Server, tmp_path: Path) -> None:
    folder = pin("hf://org/gpt", tokenizer_only=False)
    for file in unfetched(folder):
        download(file)
    shutil.rmtree(tmp_path / "cache")
    assert len(unfetched(folder)) == 2
    with pytest.raises(UserError, match=r"hf://org/gpt: gone from the cache: .*/config.json; st"):
        fetched_path("hf://org/gpt", tokenizer_only=False)
    assert pin("hf://org/gpt", tokenizer_only=False) == folder
    assert (folder / "config.json").is_file()
    assert not (folder / WEIGHTS[0]).is_symlink()
    assert fetched_path("hf://org/gpt", tokenizer_only=False) == folder  # jobs bring the weights


def test_other_paths_have_nothing_to_come(tmp_path: Path) -> None:
    model = tmp_path / "a/b/c/model"
    model.mkdir(parents=True)
    assert unfetched(model) == unfetched(Path("a")) == unfetched(FOLDER) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://org/none", "hf://org/none: no such repository, or a private one"),
        ("hf://org/bare", "hf://org/bare: has no model*.safetensors or pytorch_model*.bin; name a"),
        ("hf://datasets/org/gpt", "hf://datasets/org/gpt: is a dataset; name a model"),
    ],
)
def test_mistakes_are_one_line(hub: Server, address: str, message: str) -> None:
    hub.repositories["models/org/bare"] = {"README.md": b""}
    with pytest.raises(UserError) as caught:
        pin(address, tokenizer_only=False)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_what_the_system_refuses_is_one_line(hub: Server, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in place of the folder")
    with pytest.raises(UserError, match=r"hf://org/gpt: /.*: (Not a directory|File exists)"):
        pin("hf://org/gpt", tokenizer_only=True)


def test_offline_an_unknown_model_is_named(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing can list its files"):
        pin("hf://org/gpt", tokenizer_only=True)


def test_a_torn_list_is_named(hub: Server) -> None:
    folder = pin("hf://org/gpt", tokenizer_only=False)
    (listed,) = folder.parent.glob("*.json")
    listed.write_text("{")
    with pytest.raises(UserError, match=r"\.json: not valid JSON .*; remove it, and run `tok"):
        pin("hf://org/gpt", tokenizer_only=False)
