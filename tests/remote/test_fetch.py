"""`tokamake fetch` brings models and tokenizers, and configs then name them by address."""

import shutil
from pathlib import Path

import pytest

from tests.support.web_server import Server
from tokamake.config.root import Config
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.remote.fetch import fetch

MODEL = {
    "README.md": b"card",
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"pickled",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "original/consolidated.00.pth": b"other form",
}
FOLDER = Path("results/raw/hub/models/org/gpt")


@pytest.fixture
def hub(server: Server) -> Server:
    server.repositories["models/org/gpt"] = dict(MODEL)
    server.large = {name for name in MODEL if name.endswith((".safetensors", ".bin"))}
    return server


def fetched(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_comes_with_its_weights_in_one_form_and_its_tokenizer(
    hub: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(["hf://org/gpt"])
    others = {"README.md", "pytorch_model.bin", "original/consolidated.00.pth"}
    assert fetched(FOLDER / "main") == MODEL.keys() - others
    assert capsys.readouterr().out.endswith(f"{FOLDER}/main: hf://org/gpt, files: 7\n")


def test_without_safetensors_pickled_weights_come(hub: Server) -> None:
    for name in [name for name in MODEL if "safetensors" in name]:
        del hub.repositories["models/org/gpt"][name]
    fetch(["hf://org/gpt"])
    assert "pytorch_model.bin" in fetched(FOLDER / "main")


def test_a_tokenizer_comes_alone_and_a_path_as_it_is(hub: Server) -> None:
    fetch(["hf://org/gpt"], tokenizer=True)
    assert fetched(FOLDER / "main") == {"tokenizer.json", "tokenizer_config.json"}
    fetch(["hf://org/gpt/original/*", "hf://org/gpt/README.md"])
    assert {"README.md", "original/consolidated.00.pth"} < fetched(FOLDER / "main")


def test_a_branch_stays_at_its_commit_until_it_is_fetched_again(hub: Server) -> None:
    fetch(["hf://org/gpt"])
    first = (FOLDER / "main").resolve()
    hub.repositories["models/org/gpt"]["config.json"] = b'{"new": 1}'
    assert (FOLDER / "main/config.json").read_bytes() == b"{}"
    fetch(["hf://org/gpt@main"])
    assert (FOLDER / "main").resolve() != first
    assert (FOLDER / "main/config.json").read_bytes() == b'{"new": 1}'
    assert (first / "config.json").read_bytes() == b"{}"


def test_a_config_names_what_was_fetched(hub: Server, tmp_path: Path) -> None:
    commit = hub.commit("models/org/gpt")
    sections = {
        "tokenizer": {"path": f"hf://org/gpt@{commit}/tokenizer.json"},
        "model": {"checkpoint": "hf://org/gpt"},
        "train": {"finetune": True},
    }
    with pytest.raises(UserError) as caught:
        validate(Config, sections, "my.yaml")
    model, tokenizer = sorted(str(caught.value).splitlines())
    assert model == (
        "my.yaml: model.checkpoint: 'hf://org/gpt': not fetched yet; start the "
        "workflow again on a node with a network, or run `tokamake fetch hf://org/gpt`"
    )
    assert tokenizer.startswith("my.yaml: tokenizer.path: 'hf://org/gpt@")
    fetch(["hf://org/gpt"])
    hub.repositories.clear()
    config = validate(Config, sections, "my.yaml")
    assert config.tokenizer.path == FOLDER / commit[:12] / "tokenizer.json"
    # Another commit is another path, so that nothing made from this one counts as made from it.
    assert config.model.folder == FOLDER / commit[:12]
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match=r"gone from the cache: results/raw/hub/models/org/gpt/"):
        validate(Config, sections, "my.yaml")


def test_a_repository_without_weights_or_tokenizer_is_refused(hub: Server) -> None:
    hub.repositories["models/org/gpt"] = {"README.md": b"", "flax_model.msgpack": b""}
    with pytest.raises(UserError, match=r"hf://org/gpt: has no model\*\.safetensors or pytorch"):
        fetch(["hf://org/gpt"])
    with pytest.raises(UserError, match="--tokenizer is for models; leave it out"):
        fetch(["hf://datasets/org/x"], tokenizer=True)
    with pytest.raises(UserError, match="hf://org/gpt: has no file of a tokenizer; name another"):
        fetch(["hf://org/gpt"], tokenizer=True)
