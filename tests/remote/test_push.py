"""An export is uploaded to the Hub in one commit."""

import json
from pathlib import Path

import pytest

from tests.support.web_server import Server
from tokamake.config.root import Config
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.remote.push import push

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)), "README.md": b"# card"}


@pytest.fixture
def export(server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    export = Path("export")
    export.mkdir()
    for name, content in FILES.items():
        (export / name).write_bytes(content)
    (export / ".snakemake_timestamp").touch()
    return export


def test_a_folder_becomes_a_private_repository(server: Server, export: Path) -> None:
    push(export, "hf://org/gpt", output=Path("push.json"))
    assert server.repositories["models/org/gpt"] == FILES
    assert server.private == {"models/org/gpt"}
    commit = server.commit("models/org/gpt")
    assert json.loads(Path("push.json").read_text()) == {
        "address": "hf://org/gpt",
        "commit": commit,
        "url": f"{server.url}/org/gpt/commit/{commit}",
    }


def test_a_public_repository_that_exists_is_updated(server: Server, export: Path) -> None:
    push(export, "hf://org/gpt", private=False)
    (export / "README.md").write_bytes(b"# new card")
    push(export, "hf://org/gpt", private=False)
    assert server.repositories["models/org/gpt"] == {**FILES, "README.md": b"# new card"}
    assert not server.private


def test_mistakes_are_one_line(
    server: Server, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("org/gpt", "hf://datasets/org/gpt", "hf://org/gpt/folder"):
        with pytest.raises(UserError, match=r"write hf://ORG/NAME, or hf://ORG/NAME@BRANCH"):
            push(export, address)
    (export / "config.json").rename("config.json")
    with pytest.raises(UserError, match=r"export: has no config\.json; name the folder of an exp"):
        push(export, "hf://org/gpt")
    Path("config.json").rename(export / "config.json")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", "none")
    with pytest.raises(UserError, match="hf://org/gpt: ") as caught:
        push(export, "hf://org/gpt", output=Path("push.json"))
    assert "\n" not in str(caught.value)
    assert not Path("push.json").exists()
    assert "models/org/gpt" not in server.repositories
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing can upload to it"):
        push(export, "hf://org/gpt")


def test_the_config_checks_the_address() -> None:
    sections = {"model": {"architecture": "a.yaml"}, "export": {"push": "org/gpt"}}
    with pytest.raises(UserError, match=r"my\.yaml: export\.push: 'org/gpt': "):
        validate(Config, sections, "my.yaml")
