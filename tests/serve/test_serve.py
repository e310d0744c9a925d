"""The command: its address, names of models, signals, ranks and mistakes."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.grids import params
from tests.support.paths import ROOT
from tests.support.programs import torch_python, torchrun
from tokamake.errors import UserError
from tokamake.serve.options import Limits
from tokamake.serve.serve import serve


class Running:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        self.process, self.line = process, line
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line
        self.url = found[0]

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    @property
    def is_idle(self) -> bool:
        """Whether it continues no sequence."""
        with urllib.request.urlopen(f"{self.url}/metrics") as reply:
            return b"tokamake_sequences 0.0" in reply.read()


@contextmanager
def started(*arguments: object, ranks: int = 1, port: int = 0) -> Iterator[Running]:
    """The command, once it answers; by default with a free port."""
    launcher = torchrun(ranks) if ranks > 1 else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [
            *(*launcher, torch_python(), "-m", "tokamake"),
            *("serve", *map(str, arguments), "--port", str(port)),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        line = next(line for line in process.stdout if line.startswith("serves "))
        yield Running(process, line)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", params([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_requests_in_flight_end_after_a_signal(
    tiny: Path, chat_tokenizer: Path, number: signal.Signals
) -> None:
    with started(tiny, "--tokenizer", chat_tokenizer) as running:
        assert running.line == f"serves {tiny.name} at {running.url}; Ctrl-C stops it\n"
        body = {"prompt": "The", "max_tokens": 50, "n": 16, "temperature": 1, "seed": 1}
        replies: list[Any] = []
        asked = threading.Thread(
            target=lambda: replies.append(running.ask("/v1/completions", body))
        )
        asked.start()
        while running.is_idle:
            pass
        running.process.send_signal(number)
        asked.join()
        assert len(replies[0]["choices"]) == 16
        assert running.process.wait(60) == 0


def test_streams_that_outlast_the_grace_end_with_an_event(tiny: Path, chat_tokenizer: Path) -> None:
    body = {"prompt": "The", "n": 64, "temperature": 1, "seed": 1, "ignore_eos": True}
    with started(
        tiny, "--tokenizer", chat_tokenizer, "--grace-seconds", 0, "--batch-size", 2
    ) as running:
        content = json.dumps({**body, "stream": True, "max_tokens": 40}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{running.url}/v1/completions", content, headers)
        streams = [urllib.request.urlopen(request, timeout=60) for _ in range(3)]
        running.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert "the server stops" in stream.read().decode().strip().splitlines()[-1]
        assert running.process.wait(60) == 0


@pytest.mark.slow
def test_a_kill_under_load_loses_only_the_requests_in_flight(
    tiny: Path, chat_tokenizer: Path
) -> None:
    arguments = (tiny, "--tokenizer", chat_tokenizer)
    body = {"prompt": "The", "max_tokens": 40, "temperature": 1, "seed": 1}
    done, failures = list[Any](), list[Exception]()

    def ask_until_it_fails() -> None:
        try:
            while True:
                done.append(running.ask("/v1/completions", body)["choices"])
        except (OSError, http.client.HTTPException) as error:
            failures.append(error)

    with started(*arguments) as running:
        clients = [threading.Thread(target=ask_until_it_fails) for _ in range(4)]
        for client in clients:
            client.start()
        while len(done) < 8:
            pass
        running.process.kill()
        for client in clients:
            client.join()
    assert len(failures) == 4
    assert all(choices == done[0] for choices in done)
    port = int(running.url.rpartition(":")[2])
    with started(*arguments, port=port) as again:
        assert again.ask("/v1/completions", body)["choices"] == done[0]


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_serve_the_same_model(tiny: Path, chat_tokenizer: Path) -> None:
    arguments = (tiny, "--tokenizer", chat_tokenizer)
    body = {"prompt": ["The", "def "], "max_tokens": 8, "temperature": 0.7, "seed": 1}
    scored = {**body, "temperature": 0, "logprobs": 2, "echo": True}
    searched = {"prompts": ["The"], "tokens_to_generate": 4, "beam_width": 3}
    with started(*arguments) as alone:
        expected = alone.ask("/v1/completions", body)["choices"]
        scores = alone.ask("/v1/completions", scored)["choices"]
        beams = alone.ask("/api", searched, method="PUT")
    layout = ("--tensor-parallel-size", 2)
    with started(*arguments, *layout, ranks=2) as shared:
        assert shared.ask("/v1/completions", body)["choices"] == expected
        for ours, theirs in zip(
            shared.ask("/v1/completions", scored)["choices"], scores, strict=True
        ):
            assert ours["text"] == theirs["text"]
            pairs = (each["logprobs"]["token_logprobs"][1:] for each in (ours, theirs))
            assert next(pairs) == pytest.approx(next(pairs), abs=1e-4)
        found = shared.ask("/api", searched, method="PUT")
        assert found["text"] == beams["text"]
        assert found["scores"] == pytest.approx(beams["scores"], abs=1e-4)
        # A client that leaves frees the place on both ranks.
        long = json.dumps({**body, "stream": True, "max_tokens": 40}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{shared.url}/v1/completions", long, headers)
        ) as reply:
            reply.readline()
        while not shared.is_idle:
            pass
        assert shared.ask("/v1/completions", body)["choices"] == expected
        replies: list[Any] = []
        more = {**body, "n": 8, "max_tokens": 40}
        asked = threading.Thread(target=lambda: replies.append(shared.ask("/v1/completions", more)))
        asked.start()
        while shared.is_idle:
            pass
        shared.process.send_signal(signal.SIGTERM)  # torchrun sends it to all ranks
        asked.join()
        assert len(replies[0]["choices"]) == 16
        shared.process.wait(60)


def test_models_have_the_names_that_the_user_gives(
    tiny: Path, chat_tokenizer: Path, tmp_path: Path
) -> None:
    twin = tmp_path / "tiny"
    twin.symlink_to(tiny)
    arguments = (f"first={tiny}", tiny, twin, "--tokenizer", chat_tokenizer)
    with started(*arguments) as running:
        names = [model["id"] for model in running.ask("/v1/models")["data"]]
        assert names == ["first", tiny.name, f"{tiny.name}-2"]
        for name in names:
            body = {"model": name, "prompt": "The", "max_tokens": 4, "temperature": 0}
            assert running.ask("/v1/completions", body)["model"] == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoints": ()}, "checkpoints: none given; name the folder of a checkpoint or a run"),
        ({"checkpoints": ("nowhere",)}, "nowhere: no such folder"),
        (
            {"checkpoints": ("a=b", "a=c")},
            "a=c: another checkpoint has the name a; give NAME=FOLDER",
        ),
        ({"checkpoints": ("=b",)}, "=b: has no name; give NAME=FOLDER"),
        ({"port": 70000}, "port: 70000: not a port; give 1 to 65535, or 0 for a free one"),
        ({"host": "256.1.1.1"}, "256.1.1.1:5000: "),
        ({"host": "a..b"}, "a..b:5000: not a name of a host; give another --host or --port"),
        ({"limits": Limits(batch_size=0)}, "batch_size: 0: out of range; give 1 or more"),
        ({"limits": Limits(max_length=1)}, "max_length: 1: out of range; give 2 or more"),
        ({"limits": Limits(max_seconds=0)}, "max_seconds: 0: out of range; give 1 or more"),
    ],
)
def test_mistakes_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = arguments.pop("checkpoints", ("nowhere",))
    with pytest.raises(UserError, match=re.escape(message)):
        serve(checkpoints, **{"port": 0, **arguments} if "host" not in arguments else arguments)


def test_a_port_in_use_is_named(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = rf"127\.0\.0\.1:{port}: Address already in use; give another --host or --port"
        with pytest.raises(UserError, match=expected):
            serve((str(tiny),), port=port)


@pytest.mark.parametrize("content", ["", " \n", "two words", "é"])
def test_a_file_without_a_token_is_refused(tiny: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(UserError, match=r"token_file: .*token"):
        serve((str(tiny),), port=0, token_file=path)
