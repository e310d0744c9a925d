"""Tokenizers and checkpoints by addresses, in configs and on the command line."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.web_server import Server
from tokamake import cli
from tokamake.config.root import Config
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.remote.fetch import fetch
from tokamake.remote.local_copy import bring, fetch_tokenizer, local_copy, replace_addresses
from tokamake.serve.serve import _names

MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}


@pytest.fixture
def hub(server: Server) -> Server:
    server.repositories["models/org/gpt"] = dict(MODEL)
    return server


@pytest.mark.parametrize(
    ("name", "beside", "others"),
    [
        ("gpt2-vocab.json", ["gpt2-merges.txt"], ["merges.txt", "tokenizer_config.json"]),
        ("vocab.json", ["merges.txt", "tokenizer_config.json"], ["gpt2-merges.txt"]),
        ("bert-vocab.txt", [], ["tokenizer_config.json", "merges.txt"]),
        ("tokenizer.json", ["special_tokens_map.json"], ["merges.txt", "vocab.json"]),
        ("tokenizer.model", ["added_tokens.json"], ["merges.txt"]),
    ],
)
def test_a_tokenizer_comes_with_the_files_that_belong_to_it(
    server: Server, name: str, beside: list[str], others: list[str]
) -> None:
    for each in (name, *beside, *others):
        server.files[f"/models/{each}"] = each.encode()
    path = local_copy(f"{server.url}/models/{name}?x=1", tokenizer_only=True)
    assert path.name == name
    assert {each.name for each in path.parent.iterdir()} == {name, *beside}
    assert all(each.read_bytes() == each.name.encode() for each in path.parent.iterdir())
    # It stays as it is, without the network, until it is fetched again.
    before = len(server.requests)
    for online in (True, False):
        assert path == local_copy(
            f"{server.url}/models/{name}?x=1", tokenizer_only=True, online=online
        )
    assert len(server.requests) == before
    server.files[f"/models/{name}"] = b"new"
    fetch([f"{server.url}/models/{name}?x=1"], tokenizer=True)
    assert path.read_bytes() == b"new"


def test_missing_merges_and_a_server_in_trouble_are_named(server: Server) -> None:
    server.files["/vocab.json"] = b"{}"
    with pytest.raises(UserError, match=r"/merges\.txt: the server answers 404 Not Found"):
        fetch_tokenizer(f"{server.url}/vocab.json")
    with pytest.raises(UserError, match=r"/none\.json: the server answers 404 Not Found"):
        fetch_tokenizer(f"{server.url}/none.json")


def test_a_config_takes_a_tokenizer_by_https(server: Server) -> None:
    server.files["/t/tokenizer.json"] = b"{}"
    address = f"{server.url}/t/tokenizer.json"
    sections = {"tokenizer": {"path": address}}
    with pytest.raises(UserError, match=f"tokenizer.path: '{address}': not fetched yet; run `tok"):
        validate(Config, sections, "my.yaml")
    config = validate(Config, sections, "my.yaml", context={"fetch": True})
    server.files.clear()
    assert config.tokenizer.path == validate(Config, sections, "my.yaml").tokenizer.path
    assert config.tokenizer.path
    assert config.tokenizer.path.read_bytes() == b"{}"
    model = {"model": {"checkpoint": address}, "train": {"finetune": True}}
    with pytest.raises(UserError, match=r"model.checkpoint: .*: no model of the Hub; write hf://"):
        validate(Config, model, "my.yaml", context={"fetch": True})


def test_a_password_is_not_shown(server: Server) -> None:
    address = server.url.replace("//", "//me:secret@") + "/tokenizer.json"
    with pytest.raises(UserError, match=r"has a user or password") as caught:
        validate(Config, {"tokenizer": {"path": address}}, "my.yaml", context={"fetch": True})
    assert "secret" not in str(caught.value)
    assert server.requests == []


def test_a_command_takes_a_model_with_its_weights(hub: Server) -> None:
    folder = bring("hf://org/gpt")
    assert {path.name for path in folder.iterdir()} == {*MODEL}
    assert bring("hf://org/gpt", tokenizer_only=True) == folder
    assert _names(("hf://org/gpt", "a=hf://org/gpt")) == {"#0": folder, "a": folder}
    hub.repositories.clear()
    arguments: dict[str, Any] = {
        "checkpoint": Path("hf://org/gpt"),
        "tokenizer": Path("hf://org/gpt"),
        "output": Path("out"),
        "number": 3,
    }
    replace_addresses(arguments)
    assert arguments == {
        "checkpoint": folder,
        "tokenizer": folder,
        "output": Path("out"),
        "number": 3,
    }
    with pytest.raises(UserError, match=r"weights: hf://org/gpt: takes no address; run `tokamake"):
        replace_addresses({"weights": Path("hf://org/gpt")})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "hf://org/gpt"], "results/raw/hub/models/org/gpt/"),
        (
            ["extend-tokenizer", "--output", "out", "--tokenizer", "{url}/m/tokenizer.json"],
            "tokenizer results/raw/tokenizers/127.0.0.1:",
        ),
        (
            ["extend-tokenizer", "--output", "out", "--tokenizer=hf://org/gpt"],
            "tokenizer results/raw/hub/models/org/gpt/",
        ),
        (
            ["verify", "hf://org/gpt"],
            "prefixes: hf://org/gpt: takes no address; run `tokamake fetch",
        ),
    ],
)
def test_the_command_line_takes_addresses(
    hub: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    hub.files["/m/tokenizer.json"] = b"{}"
    words = [word.format(url=hub.url) for word in arguments]
    monkeypatch.setattr(sys, "argv", ["tokamake", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit):
        cli.main()
    assert message in capsys.readouterr().err
