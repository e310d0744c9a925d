"""The client prints what a server answers, and says what went wrong."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.served import Served, served
from tests.support.web_server import serving
from tokamake.errors import UserError
from tokamake.serve.complete import complete


def address(server: Served) -> str:
    return f"127.0.0.1:{server.port}"


def test_each_line_of_a_file_is_continued(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("def main\n\nThe\r\n")
    complete(address(server), prompts=path, max_new_tokens=5, top_k=1)
    body = {"prompts": ["def main", "The"], "tokens_to_generate": 5, "top_k": 1}
    first, second = server.ask("PUT", "/api", body).json["text"]
    assert capsys.readouterr().out == f"{first}\n\n{second}\n\n"


def test_prompts_come_from_standard_input(
    server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("The\n"))
    complete(f"http://{address(server)}/api", max_new_tokens=3, temperature=0.5, top_p=0.9, seed=4)
    assert capsys.readouterr().out.startswith("The")


def test_a_person_at_a_terminal_sees_errors_and_goes_on(server: Served) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    command = [sys.executable, "-m", "tokamake", "complete", address(server)]
    command += ["--max-new-tokens", "64", "--top-k", "1"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    os.close(theirs)
    os.write(ours, b"The list of words of the list of words\nThe\n\x04")
    printed, errors = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0
    assert b"tokens_to_generate: 64: too many after a prompt of" in errors
    assert b"Traceback" not in errors
    assert printed.count(b"prompt: ") >= 2


def test_a_refused_prompt_of_a_file_ends_the_command(server: Served, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("The\n")
    message = "status 400: temperature: -1: give a number above 0, at most 100"
    with pytest.raises(UserError, match=message):
        complete(address(server), prompts=path, max_new_tokens=3, temperature=-1)


def test_the_token_of_the_server_is_sent(
    tiny: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, token = tmp_path / "prompts.txt", tmp_path / "token"
    path.write_text("The\n")
    token.write_text("secret\n")
    with served({"tiny": tiny}, sampled / "tokenizer", token="secret") as guarded:
        with pytest.raises(UserError, match="status 401: no valid token"):
            complete(address(guarded), prompts=path, max_new_tokens=3)
        complete(address(guarded), prompts=path, max_new_tokens=3, token_file=token)
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.parametrize("server", ["", "localhost:port", "ftp://localhost", "localhost:99999"])
def test_an_address_that_is_none_is_refused(server: str) -> None:
    with pytest.raises(UserError, match="not an address; give HOST:PORT"):
        complete(server, prompts=Path(os.devnull))


def test_other_servers_and_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("The\n")
    with pytest.raises(UserError, match="is the server running there"):
        complete("127.0.0.1:1", prompts=path)
    with serving() as other, pytest.raises(UserError, match="no answer of a text generation serv"):
        complete(other.url, prompts=path)
    with pytest.raises(UserError, match=r"a\.\.b:5000: "):
        complete("a..b:5000", prompts=path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match="not UTF-8; convert it"):
        complete("127.0.0.1:1", prompts=path)
